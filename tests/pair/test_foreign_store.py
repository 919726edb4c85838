"""A directory of another pair, or of a pair that was dissolved, never joins a pair, and is never live in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pair.pair_directories import LEASE, Machines, contents, put

from broker_io.environment import current
from broker_io.errors import CallerError
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import PairEntry, load_manifest
from broker_io.filelog.pair import open_lock
from broker_io.filelog.pair.broker import PairBroker
from broker_io.filelog.pair.dissolving import dissolve
from broker_io.filelog.replication.lock import LockRecord
from broker_io.testing.contract.base import eventually as until


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.stop(*[*made.open])


def pair_of(machines: Machines, number: int) -> PairEntry:
    manifest = load_manifest(current().disk, machines.directories[number])
    assert manifest is not None
    return manifest.pair


def record_of(machines: Machines) -> LockRecord:
    lock = open_lock(machines.lock)
    try:
        return lock.read().record
    finally:
        lock.close()


def check_refused(broker: PairBroker) -> None:
    until(lambda: broker.failure is not None)
    assert isinstance(broker.failure, CallerError)
    assert "belongs to another pair" in str(broker.failure)
    with pytest.raises(CallerError, match="belongs to another pair"):
        broker.promote()
    with pytest.raises(CallerError, match="belongs to another pair"):
        broker.wait_live(LEASE)


def test_copy_and_lock_have_the_id_that_the_founder_drew(machines: Machines) -> None:
    machines.begin()
    pair = pair_of(machines, 0).id
    assert len(pair) == 16
    assert (pair_of(machines, 1).id, record_of(machines).pair) == (pair, pair)
    machines.stop(0)
    assert machines.open[1].wait_live(120.0)
    machines.start(0)
    until(lambda: len(machines.open[1].status()["in_sync"]) == 2)
    assert record_of(machines).pair == pair
    machines.stop(0, 1)
    assert {pair_of(machines, number).id for number in (0, 1)} == {pair}


def test_store_of_another_pair_keeps_its_log(machines: Machines, tmp_path: Path) -> None:
    """Only the name of the lock was changed, to that of a pair which runs."""
    (tmp_path / "other").mkdir()
    other = Machines(tmp_path / "other")
    other.start(0)
    assert other.open[0].wait_live(120.0)
    other.open[0].create_topic("precious")
    put(other.open[0], "precious", "value")
    other.stop(0)
    machines.begin()
    machines.stop(1)
    machines.directories[1] = other.directories[0]
    check_refused(machines.start(1))
    machines.stop(1)
    assert len(machines.open[0].status()["in_sync"]) < 2 or machines.open[0].status()["peer"] is None
    other.start(0)
    assert other.open[0].wait_live(120.0)
    assert contents(other.open[0], "precious") == ["value"]
    other.stop(0)


def test_store_of_a_dissolved_pair_is_refused_by_the_new_one(machines: Machines, tmp_path: Path) -> None:
    """Its epoch is above that of the new pair, so the new primary has nothing to say to it."""
    machines.begin()
    for live, other in ((0, 1), (1, 0)):
        machines.stop(live)
        assert machines.open[other].wait_live(120.0)
        machines.start(live)
        until(lambda other=other: len(machines.open[other].status()["in_sync"]) == 2)
    machines.stop(1, 0)
    dissolve(machines.directories[0], machines.options())
    machines.alone(0)
    machines.lock = f"file:{tmp_path / 'lock2'}"
    machines.start(0)
    assert machines.open[0].wait_live(120.0)
    check_refused(machines.start(1))
    machines.stop(1, 0)
    check_refused(machines.start(1))
    machines.stop(1)
    with pytest.raises(CallerError, match="belongs to another pair"):
        dissolve(machines.directories[1], machines.options(1), force=True)


@pytest.mark.parametrize("appended", [False, True])
def test_log_that_would_found_a_pair_does_not_join_one(machines: Machines, tmp_path: Path, appended: bool) -> None:
    """It is started as a founder at a lock that has the record of a pair."""
    machines.begin()
    machines.stop(0, 1)
    machines.directories[0] = str(tmp_path / "own")
    with FileBroker.open(machines.directories[0], watermark_bytes=0) as broker:
        broker.create_topic("precious")
        if appended:
            put(broker, "precious", "value")
    machines.start(1)
    check_refused(machines.start(0))
    machines.stop(0)
    manifest = load_manifest(current().disk, machines.directories[0])
    assert manifest is not None
    assert [topic.name for topic in manifest.topics] == ["precious"]


def test_founder_whose_directory_was_emptied_gets_a_copy(machines: Machines, tmp_path: Path) -> None:
    machines.begin()
    machines.stop(0)
    machines.directories[0] = str(tmp_path / "empty")
    assert machines.open[1].wait_live(120.0)
    machines.start(0)
    until(lambda: len(machines.open[1].status()["in_sync"]) == 2)
    assert contents(machines.open[0], "orders") == ["both"]
    machines.stop(0)
    assert pair_of(machines, 0).id == record_of(machines).pair
