"""The store of a member: what its directory has after each thing that a node does with it."""

from __future__ import annotations

import errno
import os

import pytest
from file_logs import World, append, numbered
from hypothesis import given
from hypothesis import strategies as st
from pair.pair_stores import DIRECTORY, KINDS, OPTIONS, Live, Member, pair

from broker_io.errors import (
    AppendUnknown,
    CallerError,
    Damaged,
    DiskFailed,
    Error,
    NotAMember,
    PeerError,
    TooManyFiles,
    TopicNotFound,
)
from broker_io.filelog.log import FileBroker
from broker_io.filelog.log.records import START, Fork
from broker_io.filelog.pair.store import DirectoryStore
from broker_io.position import LEDGERS_OF_A_HISTORY
from broker_io.testing.contract.base import eventually as until

STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=40)


def fill(live: Live) -> None:
    live.make("a", "b", "c")
    for number in range(30):
        live.append("abc"[number % 3], b"%d" % number * 100, b"x" * number)
    live.roll("b")
    live.append("b", b"after the roll")
    live.trim("b", 2)
    live.delete("c")
    live.make("c", "d")


def test_founder_begins_at_a_random_mark() -> None:
    live = Live().open()
    assert live.opened.index.base.lsn == 1
    assert live.opened.index.base.chain != 0
    assert not live.opened.partial
    again = live.restarted()
    assert (again.opened.store, again.opened.index.end) == (live.opened.store, live.opened.index.end)


def test_backup_begins_empty() -> None:
    backup = Member().open()
    assert backup.opened.index.end == START
    assert len(backup.opened.store) == 16
    assert backup.restarted().opened.store == backup.opened.store


def test_ordinary_log_founds_a_pair_and_joins_none() -> None:
    world = World()
    with FileBroker.open(DIRECTORY, world.environment) as broker:
        broker.create_topic("a")
        append(broker, "a", numbered(10))
    with pytest.raises(CallerError, match="not of this pair"):
        DirectoryStore(DIRECTORY, OPTIONS, world.environment).open_log(Member().events)
    live = Live(world.disk).open()
    assert live.state()["a"][0].ledgers[-1].entries == 10
    live.abandon()
    with pytest.raises(NotAMember):
        FileBroker.open(DIRECTORY, world.environment)


def test_backup_has_what_its_live_has() -> None:
    live, backup = pair()
    fill(live)
    backup.follow(live.records)
    assert backup.state() == live.state()
    assert backup.store.log.applied == live.store.log.applied


@given(STEPS, st.lists(st.integers(1, 8), max_size=8))
def test_r6_state_is_the_same_for_any_number_of_lanes(steps: list[tuple[str, int]], sizes: list[int]) -> None:
    live = Live(seed=1).open()
    live.begin()
    live.make("first", "second", "third")
    backups = [Member(seed=2 + lanes, lanes=lanes).open() for lanes in (1, 2, 4, 8)]
    for backup in backups:
        backup.receive(live.store.begin_copy())
        backup.events.peer = live.store.read_prepared
    first = len(live.records)
    for kind, choice in steps:
        live.do(kind, choice)
    for backup in backups:
        at = first
        for size in sizes:
            backup.follow(live.records[first : at + size])
            at += size
        backup.follow(live.records[first:])
        assert backup.state() == live.state()
        assert backup.manifest() == live.manifest()
    for member in (live, *backups):
        assert member.events.failures == []
        member.abandon()


def prepared(live: Live) -> int:
    """A compaction that the primary has prepared; its number."""
    live.make("a")
    live.append("a", b"one" * 100, b"two" * 100)
    live.roll("a")
    return live.prepare("a")


def test_h13_backup_fetches_what_is_prepared_and_says_so() -> None:
    live, backup = pair()
    number = prepared(live)
    backup.follow(live.records)
    until(lambda: [result.number for result in backup.events.rewrites] == [number])
    until(lambda: backup.events.rewrites == live.events.rewrites)
    live.swap("a", number)
    backup.follow(live.records)
    assert backup.state() == live.state()
    assert backup.events.replaced == live.events.replaced
    assert [name for name, _ in live.events.replaced] == ["topics/1/1-0.log"]
    assert live.events.replaced[0][1] > 200
    for member in (live, backup):
        member.store.remove_files([name for name, _ in member.events.replaced])
        assert not member.disk.exists(f"{DIRECTORY}/topics/1/1-0.log")


def test_h13_swap_waits_for_files_that_are_not_here() -> None:
    live, backup = pair()
    backup.events.peer = None
    number = prepared(live)
    live.swap("a", number)
    live.append("a", b"after the swap")
    with pytest.raises(PeerError):
        backup.follow(live.records)
    assert backup.store.log.applied.lsn < backup.end.lsn
    backup.events.peer = live.store.read_prepared
    backup.store.apply(backup.end.lsn)
    assert backup.state() == live.state()


def test_h13_swap_of_files_that_are_gone_needs_a_copy() -> None:
    live, backup = pair()
    backup.events.peer = None
    live.swap("a", prepared(live))
    live.store.remove_files(["topics/1/1-1.log"])
    backup.events.peer = live.store.read_prepared
    with pytest.raises(TopicNotFound, match=r"topics/1/1-1\.log"):
        backup.follow(live.records)


def test_h13_fetched_file_with_other_bytes_does_not_count() -> None:
    live, backup = pair()
    backup.events.peer = lambda name, offset, size: bytes(size)
    live.swap("a", prepared(live))
    with pytest.raises(Damaged, match="not what the log says"):
        backup.follow(live.records)
    backup.events.peer = live.store.read_prepared
    backup.store.apply(backup.end.lsn)
    assert backup.state() == live.state()


def test_h13_prepared_files_are_copied_and_kept() -> None:
    live, backup = pair()
    number = prepared(live)
    backup.events.peer = None
    backup.receive(live.store.begin_copy())
    until(lambda: [result.number for result in backup.events.rewrites] == [number])
    again = backup.restarted()
    until(lambda: [result.number for result in again.events.rewrites] == [number])
    live.begin()
    again.follow(live.records)
    assert again.store.log.pair.prepared == live.store.log.pair.prepared == ()
    assert [name for name, _ in again.events.replaced] == ["topics/1/1-1.log"]


@pytest.mark.parametrize("name", ["manifest", "../x", "topics/1/../../lock", "topics/1/1-1.log", "topics/1/1-1.index"])
def test_peer_reads_segments_only(name: str) -> None:
    live, _ = pair()
    with pytest.raises(TopicNotFound):
        live.store.read_prepared(name, 0, 10)


def test_copy_that_is_not_complete_is_refused() -> None:
    live, backup = pair()
    fill(live)
    chunks, mark = list(copy := live.store.begin_copy()), copy.mark
    backup.store.mark_partial(True)
    changed = chunks[1]._replace(data=chunks[1].data + b"x")
    for broken, what in (
        (chunks[1:], "of its"),
        ([*chunks[:-2], chunks[-1]], "of its"),
        ([chunks[0], changed, *chunks[2:]], "checksum"),
        (chunks[:-1], "first line"),
        ([chunks[-1], *chunks[:-1]], "can follow"),
        ([chunks[0]._replace(name="topics/1/../../manifest")], "can follow"),
    ):
        with pytest.raises(Damaged, match=what), backup.store.receive() as receiver:
            for chunk in broken:
                receiver.add(chunk)
            receiver.finish(mark, ())
    with pytest.raises(Damaged, match="not of"), backup.store.receive() as receiver:
        for chunk in chunks:
            receiver.add(chunk)
        receiver.finish(START, ())
    again = backup.restarted()
    assert (again.opened.partial, again.state()) == (True, {})
    again.receive(live.store.begin_copy())
    assert again.state() == live.state()


def test_h14_files_of_a_copy_stay_until_it_ends() -> None:
    live, backup = pair()
    fill(live)
    copy = live.store.begin_copy()
    live.delete("a")
    live.store.remove_files([name for name, _ in live.events.replaced])
    backup.receive(copy)
    assert "a" in backup.state()
    assert not [name for name, _ in live.events.replaced if live.disk.exists(f"{DIRECTORY}/{name}")]
    backup.follow(live.records)
    assert backup.state() == live.state()


def test_h9_forced_promotion_begins_a_history_that_the_manifest_remembers() -> None:
    live, backup = pair()
    fill(live)
    backup.follow(live.records)
    before = live.end
    live.begin(forced=True)
    live.append("a", b"in another history")
    assert live.store.log.topic("a").entry.ledgers[-1].ledger >= LEDGERS_OF_A_HISTORY
    backup.follow(live.records)
    assert backup.state() == live.state()
    for member in (live, backup):
        member.store.log.checkpoint()
        member.store.drop_journal(member.end.lsn)
        assert member.restarted().opened.forks == (Fork(2, before),)


def test_checkpoints_are_reported_and_the_journal_is_dropped() -> None:
    live, backup = pair()
    live.make("a")
    for _ in range(10):
        live.append("a", b"x" * 4000)
    backup.follow(live.records)
    for member in (live, backup):
        mark = member.events.checkpoints[-1]
        assert mark.lsn > 8
        member.store.drop_journal(mark.lsn)
        assert 2 < member.store.log.journal.base.lsn <= mark.lsn
        end = member.end
        opened = member.restarted().opened
        assert (opened.manifest, opened.index.end) == (mark, end)


def test_cut_record_is_never_applied() -> None:
    live, backup = pair()
    live.make("a")
    backup.follow(live.records)
    live.append("a", b"uncommitted")
    backup.follow(live.records, apply=False)
    backup.store.cut(backup.end.lsn - 1)
    again = backup.restarted()
    assert again.opened.index.end.lsn == live.end.lsn - 1
    again.follow(live.records)
    assert again.state() == live.state()


def test_what_is_not_known_to_be_committed_is_not_applied_at_the_next_start() -> None:
    live, backup = pair()
    live.make("a")
    backup.follow(live.records)
    live.append("a", b"uncommitted")
    backup.follow(live.records, apply=False)
    again = backup.restarted()
    assert (again.opened.commit, again.opened.index.end) == (live.end.lsn - 1, live.end)
    again.store.note_commit(live.end.lsn)
    assert again.restarted().opened.commit == live.end.lsn


def test_full_disk_is_reported_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_io.filelog.pair.store.SPACE_SECONDS", 0.01)
    live, backup = pair()
    live.make("a")
    backup.store._watermark._watermark_bytes = 10**9
    backup.disk.capacity = 10**6
    backup.clock.advance(2)
    backup.follow(live.records)
    assert backup.events.space == [True]
    backup.disk.capacity = 10**10
    until(lambda: backup.events.space == [True, False])


def test_store_stops_after_an_error_of_its_disk() -> None:
    live, backup = pair()
    live.make("a")
    backup.disk.fail_at(1, errno.EIO)
    with pytest.raises(DiskFailed):
        backup.follow(live.records)
    with pytest.raises(DiskFailed):
        backup.store.apply(live.end.lsn)


def test_live_whose_lease_has_ended_does_not_answer() -> None:
    live, _ = pair()
    live.make("a")
    live.unknown = True
    with pytest.raises(AppendUnknown):
        live.append("a", b"applied")
    live.unknown = False
    assert live.append("a", b"second")[0].entry == 1


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.EIO, DiskFailed, "repair the disk or free space"),
        (errno.EMFILE, TooManyFiles, "raise the limit (ulimit -n)"),
    ],
    ids=["failed disk", "no descriptor"],
)
def test_the_error_of_a_member_that_stops_says_what_to_do_about_its_cause(
    number: int, kind: type[Error], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, _ = pair()
    live.make("a")
    live.append("a", b"x")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "journal-1")

    monkeypatch.setattr(live.store.log.journal, "read", refuse)
    with pytest.raises(kind) as failed:
        list(live.store.read(1, 2))
    assert str(failed.value) == f"journal-1: {os.strerror(number)}: the member of the pair stops; {remedy}"
