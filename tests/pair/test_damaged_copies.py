"""A copy of a log with a damaged file, a copy to a full disk, and how often a failed copy is tried again."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pair.file_pairs import SETTINGS, BrokerPair, contents, put, segments
from pair.pair_stores import DIRECTORY, pair

from broker_io.errors import Damaged, DiskFailed, DiskFull, TooManyFiles
from broker_io.filelog.log.records import START, Index, StoreLog
from broker_io.filelog.pair import copying
from broker_io.filelog.pair.copying import CopyFiles
from broker_io.filelog.pair.link_record import LinkRecord, pause_after
from broker_io.filelog.replication.member import Followed, PairMember
from broker_io.testing.contract.base import eventually as until


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[BrokerPair]:
    made = BrokerPair(tmp_path)
    yield made
    made.a.stop()
    made.b.stop()


def filled(brokers: BrokerPair) -> dict[str, Path]:
    """A primary alone, with two topics of a sealed and an open ledger each; the sealed files."""
    a = brokers.a.start()
    brokers.a.live()
    a.create_topics(["bad", "good"])
    for topic in ("bad", "good"):
        put(a, topic, *[f"{topic} {number}" for number in range(50)])
        a.roll(topic)
        put(a, topic, "last")
    a.log.checkpoint()
    found = sorted((Path(brokers.a.directory) / "topics").glob("*/1-0.log"))
    return dict(zip(("bad", "good"), found, strict=True))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "short", "missing"])
def test_backup_joins_a_live_with_a_damaged_file(brokers: BrokerPair, how: str) -> None:
    bad = filled(brokers)["bad"]
    if how == "flipped":
        flip(bad)
    elif how == "short":
        os.truncate(bad, 7)
    else:
        bad.unlink()
    b = brokers.b.start()
    until(brokers.same)
    a = brokers.a.broker
    assert a.status()["copies"] == 1
    assert contents(b, "good") == contents(a, "good")
    assert [*a.status()["damaged"]] == ["bad"]
    assert str(bad) in a.status()["problem"]
    with pytest.raises(Damaged):
        contents(b, "bad")
    put(a, "bad", "more")
    until(brokers.same)


def test_bytes_that_the_disk_cant_read_are_zeros_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    live, backup = pair()
    live.make("a", "b")
    live.append("a", b"x" * 100)
    live.append("b", b"y" * 100)
    opened, broken = live.disk.open, f"{DIRECTORY}/topics/1/1-0.log"

    def open_broken(path: str, **options: Any) -> Any:
        file = opened(path, **options)
        if path == broken and not options.get("write"):

            def read(offset: int, size: int) -> bytes:
                raise OSError(errno.EIO, "Input/output error")

            monkeypatch.setattr(file, "read", read)
        return file

    monkeypatch.setattr(live.disk, "open", open_broken)
    backup.receive(live.store.begin_copy())
    found = backup.state()
    assert found["a"][1] == [bytes(found["a"][0].ledgers[0].bytes)]
    assert any(found["b"][1][0])
    assert [*live.store.log.damage.topics()] == ["a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE], ids=["no space", "no descriptors"])
def test_backup_whose_disk_is_full_during_a_copy_stays_and_joins_later(
    brokers: BrokerPair, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    filled(brokers)
    full, add, problem = True, CopyFiles.add, os.strerror(number)

    def add_if_there_is_space(files: CopyFiles, chunk: Any) -> None:
        add(files, chunk)
        if full and chunk.name.startswith("topics/2"):
            raise OSError(number, problem)

    monkeypatch.setattr(copying.CopyFiles, "add", add_if_there_is_space)
    b = brokers.b.start()
    until(lambda: problem in b.status()["problem"])
    until(lambda: not segments(brokers.b.directory))  # they would take the space that is missing
    assert b.failure is None
    put(brokers.a.broker, "good", "while the disk is full")
    full = False
    until(brokers.same)
    until(lambda: not b.status()["problem"])


def test_a_lack_of_descriptors_that_ends_a_node_is_not_tried_again(brokers: BrokerPair) -> None:
    """A standby waits for ever for what passes; its process has to end, so that it is started again."""
    filled(brokers)
    b = brokers.b.start()
    b._node.failed(TooManyFiles("no descriptor is left"))
    assert type(b._node.failure) is DiskFailed
    assert str(b._node.failure) == "no descriptor is left"


def test_files_of_a_copy_that_was_not_completed_are_removed() -> None:
    live, backup = pair()
    live.make("a", "b")
    live.append("a", b"x" * 100)
    live.append("b", b"y" * 100)
    backup.store.mark_partial(True)
    with backup.store.receive() as receiver, live.store.begin_copy() as copy:
        for chunk in [*copy][:-1]:
            receiver.add(chunk)
        assert segment_files(backup)
    assert not segment_files(backup)


def segment_files(member: Any) -> list[str]:
    return [path for path in member.disk.files() if path.endswith(".log")]


def test_full_disk_of_a_receiver_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node goes on after it; any other error of a disk ends the node."""
    live, backup = pair()
    live.make("a")
    live.append("a", b"x" * 100)
    backup.store.mark_partial(True)
    with backup.store.receive() as receiver, live.store.begin_copy() as copy:
        backup.disk.capacity = 1
        with pytest.raises(DiskFull):
            for chunk in copy:
                receiver.add(chunk)


# --- how often a link begins again ---


def test_pause_after_a_failed_link_grows_up_to_two_leases() -> None:
    pauses = [pause_after(count, SETTINGS) for count in range(1, 40)]
    assert pauses[:2] == [0, SETTINGS.member_timeout // 8]
    assert all(one <= other for one, other in itertools.pairwise(pauses))
    assert pauses[3] == 4 * pauses[1]
    assert pauses[-1] == 2 * SETTINGS.terms.ttl


def test_links_that_end_before_they_follow_are_failures_in_a_row() -> None:
    links, now = LinkRecord(SETTINGS), 0
    for number in range(1, 20):
        assert links.may_begin(now)
        links.up(number)
        links.ended(number, f"failure {number}", now)
        links.ended(number, "", now)  # reported twice, it is one
        pause = pause_after(number, SETTINGS)
        assert links.may_begin(now + pause)
        assert not pause or not links.may_begin(now + pause - 1)
        now += pause
    assert links.problem == "failure 19"


def test_a_link_that_has_followed_for_a_while_ends_the_pauses() -> None:
    links, now = LinkRecord(SETTINGS), 0
    member = PairMember(SETTINGS, StoreLog(b"b", Index(), 0, 0, 0, START))
    for number in range(1, 10):
        links.up(number)
        links.ended(number, "the disk is full", now)
    links.up(10)
    links.tick(member, now)
    member.followed = Followed(1, b"a", 0, 0)
    links.tick(member, now)
    links.tick(member, now + SETTINGS.member_timeout - 1)
    assert links.problem == "the disk is full"
    links.tick(member, now + SETTINGS.member_timeout)
    assert links.problem == ""
    links.ended(10, "the connection was lost", now)
    assert links.may_begin(now)
