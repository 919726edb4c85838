"""Ending a pair: which member may do it, what becomes of its log, and that the other one is never live again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pair.pair_directories import LEASE, Machines, contents, put

from broker_io.environment import current
from broker_io.errors import CallerError, LockUnavailable, NotAMember, NotPromotable
from broker_io.filelog.log.broker import FileBroker
from broker_io.filelog.log.layout import load_manifest
from broker_io.filelog.pair import dissolving
from broker_io.filelog.pair.broker import PairOptions
from broker_io.filelog.pair.dissolving import dissolve
from broker_io.testing.contract.base import eventually as until


@pytest.fixture
def machines(tmp_path: Path) -> Any:
    made = Machines(tmp_path)
    yield made
    made.stop(*[*made.open])


def test_log_of_the_last_live_is_served_alone_after_it(machines: Machines) -> None:
    machines.begin()
    machines.stop(1)
    put(machines.open[0], "orders", "first only")
    incarnation = machines.open[0].incarnation("orders")
    machines.stop(0)
    with pytest.raises(NotAMember):
        FileBroker.open(machines.directories[0])
    dissolve(machines.directories[0], machines.options())
    manifest = load_manifest(current().disk, machines.directories[0])
    assert manifest is not None
    assert (manifest.mark.epoch, manifest.is_member) == (0, False)  # its journal is that of no pair
    assert machines.alone(0) == ["both", "first only", "alone"]
    with FileBroker.open(machines.directories[0]) as broker:
        assert broker.incarnation("orders") == incarnation
    with pytest.raises(CallerError, match="belongs to no pair"):
        dissolve(machines.directories[0], machines.options())


def test_other_store_is_never_live_again_and_can_not_be_forced(machines: Machines) -> None:
    machines.begin()
    machines.stop(1, 0)
    dissolve(machines.directories[0], machines.options())
    other = machines.start(1)
    until(lambda: "the pair was dissolved" in other.status()["waits_for"])
    assert not other.wait_live(3 * LEASE)
    with pytest.raises(NotPromotable, match="the pair was dissolved"):
        other.promote()
    machines.stop(1)
    with pytest.raises(NotPromotable, match="by the other member"):
        dissolve(machines.directories[1], machines.options(1), force=True)
    with pytest.raises(NotAMember):
        FileBroker.open(machines.directories[1])


def test_request_for_force_that_came_before_does_not_make_it_live(machines: Machines) -> None:
    """The request is made while the lock does not answer, so nothing is known of the end of the pair."""
    machines.begin()
    machines.stop(1)
    put(machines.open[0], "orders", "first only")
    machines.stop(0)
    dissolve(machines.directories[0], machines.options())
    other = machines.start(1)
    other._node._member.known = None
    other.promote()
    assert not other.wait_live(2 * LEASE)
    assert other.status()["role"] == "backup"


def test_store_that_lacks_records_is_refused_unless_forced(machines: Machines) -> None:
    machines.begin()
    machines.stop(1)
    put(machines.open[0], "orders", "first only")
    until(lambda: len(machines.open[0].status()["in_sync"]) == 1)
    machines.stop(0)
    with pytest.raises(NotPromotable, match=r"may lack acknowledged records.*it is not in sync"):
        dissolve(machines.directories[1], machines.options(1))
    with pytest.raises(NotAMember):
        FileBroker.open(machines.directories[1])
    dissolve(machines.directories[1], machines.options(1), force=True)
    assert machines.alone(1) == ["both", "alone"]


def test_pair_with_a_live_is_not_dissolved(machines: Machines) -> None:
    machines.begin()
    machines.stop(1)
    with pytest.raises(NotPromotable, match=r"has the lease of the primary|not in sync"):
        dissolve(machines.directories[1], machines.options(1))
    put(machines.open[0], "orders", "goes on")
    assert contents(machines.open[0], "orders") == ["both", "goes on"]


@pytest.mark.parametrize("step", ["_mark", "open_log"])
def test_interrupted_end_of_a_pair_is_done_again(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    machines.begin()
    machines.stop(1, 0)

    def fail(*_: Any, **__: Any) -> None:
        raise LockUnavailable("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(dissolving, step, fail)
        with pytest.raises(LockUnavailable):
            dissolve(machines.directories[0], machines.options())
    dissolve(machines.directories[0], machines.options())
    assert machines.alone(0) == ["both", "alone"]


def test_process_that_is_killed_after_the_lock_was_changed_is_repeated(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The directory is that of the moment: nothing was closed."""
    machines.begin()
    machines.stop(1)
    until(lambda: len(machines.open[0].status()["in_sync"]) == 1)
    put(machines.open[0], "orders", "first only")
    machines.stop(0)
    mark = dissolving._mark

    def mark_and_copy(*arguments: Any) -> None:
        mark(*arguments)
        for copy in ("killed", "killed as well"):
            shutil.copytree(machines.directories[0], tmp_path / copy)

    with monkeypatch.context() as patch:
        patch.setattr(dissolving, "_mark", mark_and_copy)
        dissolve(machines.directories[0], machines.options())
    machines.directories[0] = str(tmp_path / "killed")
    member = machines.start(0)
    until(lambda: "this store has the log: repeat" in member.status()["waits_for"])
    with pytest.raises(NotPromotable, match="this store has the log: repeat"):
        member.promote()
    machines.stop(0)
    machines.directories[0] = str(tmp_path / "killed as well")
    dissolve(machines.directories[0], machines.options())
    assert machines.alone(0) == ["both", "first only", "alone"]


@pytest.mark.parametrize("force", [False, True])
def test_lock_without_a_record_is_refused_and_stays_so(machines: Machines, tmp_path: Path, force: bool) -> None:
    machines.begin()
    machines.stop(1, 0)
    wrong = machines.options()._replace(lock=f"file:{tmp_path / 'wrong'}")
    with pytest.raises(NotPromotable, match="has no record of a pair: check its name"):
        dissolve(machines.directories[0], wrong, force=force)
    assert not (tmp_path / "wrong").exists()
    dissolve(machines.directories[0], machines.options())


def test_directory_without_a_pair_is_refused(tmp_path: Path) -> None:
    pair = PairOptions(f"file:{tmp_path / 'lock'}", "", "")
    with pytest.raises(CallerError, match="belongs to no pair"):
        dissolve(str(tmp_path / "none"), pair)
    assert not (tmp_path / "none").exists()
