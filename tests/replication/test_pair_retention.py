"""What members keep for a backup that catches up, and how a compaction is swapped on both."""

from __future__ import annotations

import pytest
from pair_world import World

from broker_io.errors import StorageError
from broker_io.filelog.log.records import START, Index, StoreLog, follows, make_record
from broker_io.filelog.replication import messages as m
from broker_io.filelog.replication.member import PairMember, Peer, PeerStage, Role
from broker_io.filelog.replication.states import step

A, B = 0, 1


def pair() -> World:
    world = World()
    world.do(("start", A))
    world.do(("start", B))
    world.settle()
    return world


def member(world: World, at: int) -> PairMember:
    found = world.nodes[at].member
    assert found is not None
    return found


def log_of(count: int) -> StoreLog:
    records = [make_record(START, 1, 0, b"12345")]
    while len(records) < count:
        records.append(make_record(records[-1].mark, 1, records[-1].lsn, b"12345"))
    return StoreLog.open(b"a1", START, START, records, 0, partial=False)


def test_h13_compaction_is_swapped_when_both_have_rewritten_it() -> None:
    world = pair()
    live, backup = member(world, A), member(world, B)
    ours, theirs = m.RewriteFinished(7, 100, b"ours"), m.RewriteFinished(7, 101, b"theirs")
    assert m.AppendSwap(ours) not in step(live, ours, live.now)
    (sent,) = step(backup, theirs, backup.now)
    assert isinstance(sent, m.SendMessage)
    assert live.link is not None
    assert m.AppendSwap(ours) in step(live, m.Received(live.link, sent.message), live.now)
    assert live.rewrites == ()


def test_h13_live_alone_waits_for_nobody() -> None:
    world = World()
    world.do(("start", A))
    for _ in range(9):
        world._work_off()
        world.do(("time",))
    live, ours = member(world, A), m.RewriteFinished(7, 100, b"ours")
    assert live.role is Role.LIVE
    assert m.AppendSwap(ours) in step(live, ours, live.now)


def test_h13_backup_says_again_on_a_new_link_what_it_has_rewritten() -> None:
    world = pair()
    world.give(B, m.RewriteFinished(7, 101, b"theirs"))
    world.nodes[A].inbound.clear()
    world.do(("break",))
    world._work_off()
    live = member(world, A)
    assert [store for store, _ in live.rewrites] == [b"b1"]


def copying(world: World) -> PairMember:
    """A primary whose backup is copied to."""
    live = member(world, A)
    live.peer = Peer(b"b2", PeerStage.COPYING, sent=live.log.applied, copied=True)
    return live


def test_h14_files_of_a_copy_are_removed_after_it() -> None:
    world = pair()
    live = copying(world)
    assert step(live, m.ReplacedFiles((("1-0.log", 50),)), live.now) == []
    live.peer = Peer(b"b2", PeerStage.FOLLOWING, copied=True, sent=1)
    assert live.link is not None
    durable = m.Durable(1, b"b2", live.log.index.end, 1, False)
    effects = step(live, m.Received(live.link, durable), live.now)
    assert m.RemoveFiles(("1-0.log",)) in effects


def test_h14_copy_that_holds_too_much_begins_again() -> None:
    world = pair()
    live = copying(world)
    limit = live.settings.keep_bytes
    assert step(live, m.ReplacedFiles((("1-0.log", limit),)), live.now) == []
    effects = step(live, m.ReplacedFiles((("2-0.log", 1),)), live.now)
    assert m.RemoveFiles(("1-0.log", "2-0.log")) in effects
    assert live.link is None


def test_h14_files_are_removed_at_once_without_a_copy() -> None:
    world = pair()
    for at in (A, B):
        effects = step(member(world, at), m.ReplacedFiles((("1-0.log", 50),)), member(world, at).now)
        assert effects == [m.RemoveFiles(("1-0.log",))]


def test_h15_journal_is_kept_for_a_backup_that_catches_up() -> None:
    world = pair()
    live = member(world, A)
    live.log = log_of(4)
    assert live.peer is not None
    live.peer.durable, live.peer.sent, live.link = 2, 4, None
    effects = step(live, m.Checkpointed(live.log.mark_at(3)), live.now)
    assert m.DropJournal(2) in effects
    assert live.log.index.base == live.log.mark_at(2)


def test_h15_backup_that_holds_too_much_is_given_up() -> None:
    world = pair()
    live = member(world, A)
    live.log = log_of(4)
    live.settings = live.settings._replace(keep_bytes=4)
    assert live.peer is not None
    live.peer.durable, live.peer.sent = 2, 4
    effects = step(live, m.Checkpointed(live.log.mark_at(3)), live.now)
    assert m.DropJournal(3) in effects
    assert live.link is None


def test_h15_uncommitted_records_stay_in_the_journal() -> None:
    log = log_of(4)
    found = PairMember(World().settings, log)
    assert step(found, m.Checkpointed(log.mark_at(2)), 0) == [m.DropJournal(2)]
    assert log.index.end.lsn == 4
    assert log.index.bytes_between(2, 4) == 10


def test_index_cuts_drops_and_finds_marks() -> None:
    log = log_of(5)
    marks = [START, *log.index.marks]
    log.index.drop(2)
    log.index.cut(4)
    assert [log.index.mark(lsn) for lsn in range(6)] == [None, None, *marks[2:5], None]
    assert not log.index.holds(marks[1])
    assert log.index.holds(marks[4])
    with pytest.raises(StorageError, match="does not follow"):
        log.append(make_record(marks[2], 1, 0, b"x"))
    with pytest.raises(StorageError, match="no record 1"):
        log.mark_at(1)


def test_records_of_an_older_epoch_do_not_follow() -> None:
    index = Index()
    index.add(make_record(START, 2, 0, b"1"))
    assert not follows(index.end, make_record(index.end, 1, 0, b"2"))
    changed = make_record(index.end, 2, 0, b"2")._replace(content=b"3")
    assert not follows(index.end, changed)


def follow(world: World) -> None:
    """Do everything but applies of the backup and what time does."""
    while action := next((each for each in world.actions({}) if each not in (("time",), ("apply", B))), None):
        world.do(action)


def test_h13_backup_joins_once_it_has_applied_what_was_swapped_without_it() -> None:
    """What the primary swaps before the backup is required waits for the primary's own files only."""
    world = pair()
    world.do(("crash", B))
    while len(world.lock.record.in_sync) == 2:
        world.do(("time",))
        world._work_off()
    world.do(("append", A))
    world._work_off()
    world.slow = True
    world.do(("start", B))
    follow(world)
    live, backup = member(world, A), member(world, B)
    assert live.peer is not None
    assert live.peer.required
    assert backup.log.durable == live.log.index.end.lsn > backup.log.applied
    assert world.lock.record.in_sync == (b"a1",)
    world.settle()


def test_h13_store_that_is_gone_leaves_before_another_one_of_its_node_joins() -> None:
    """A record that only the lost store could commit would else wait for a backup that waits for the record."""
    world = pair()
    world.slow = True
    world.do(("crash", B))
    world.do(("wipe", B))
    world.do(("append", A))
    world.do(("disk", A))
    assert member(world, A).log.commit < member(world, A).log.index.end.lsn
    world.settle()
    assert world.lock.record.in_sync == (b"a1", b"b2")


def test_h13_backup_that_lacks_a_file_which_is_gone_gets_a_copy() -> None:
    world = pair()
    world.do(("append", A))
    world._work_off()
    for _ in range(2):
        copies = world.used["copy"]
        world.give(B, m.FilesMissing())
        assert not member(world, B).log.partial  # first it has to leave those that are in sync
        world.settle()
        assert world.used["copy"] == copies + 1
        assert not member(world, B).lacking
