import pytest
from snapshot_driver import SMALL, Interfering, abort_some, assert_true, entries, manager_on, put, stored, trimmed_to
from writing import TopicWriter

from broker_io.batch import Batch, Message
from broker_io.errors import Damaged
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.errors import (
    AppliedPositionTrimmed,
)
from snapshots.format import END, SNAPSHOT_TOPIC, EntryKey, message
from snapshots.scan import HISTORY_KEPT, scan
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.restore import read_snapshot, restored_topics

T = "t"


def test_h10_recovery_resumes_where_the_state_was_applied():
    """A commit before the snapshot while an older transaction is open is neither late nor lost after it."""
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.records(1, "open")
    writer.records(2, "x")
    writer.commit(2)
    owner.pump()
    owner.snapshot(T)
    successor = manager_on(broker)
    assert successor.buffer(T).counters.late == 0
    assert successor.buffer(T).applied == broker.last_position(T)
    assert successor.buffer(T).outcome(TxnId(0, 2)) is Outcome.COMMIT
    assert_true(successor, broker, T)


def test_h1_a_committed_transaction_is_known_after_recovery():
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.records(1, "x")
    writer.commit(1)
    owner.pump()
    owner.snapshot(T)
    writer.records(1, "x", first_seq=1)  # resent after the marker
    successor = manager_on(broker)
    assert successor.buffer(T).outcome(TxnId(0, 1)) is Outcome.COMMIT
    assert successor.buffer(T).counters.late == 1
    assert len(successor.buffer(T).ongoing) == 0
    assert_true(successor, broker, T)


def test_h15_seqnos_are_the_same_after_every_recovery():
    broker = MemoryBroker(ledger_entries=7)
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("a", "b")
    writer.records(1, "open")
    for txn in range(2, 9):
        writer.records(txn, "x")
        (writer.commit if txn % 2 else writer.abort)(txn)
        writer.plain("p")
        owner.pump()
        owner.snapshot(T)
        owner = manager_on(broker)
        assert owner.followed(T).numbered.next_seqno == 3
        assert owner.trim(T, 10**6) == broker.ledgers(T)[0].ledger
    assert broker.first_position(T) == Position(broker.ledgers(T)[0].ledger, 0)
    writer.commit(1)
    owner = manager_on(broker)
    assert owner.followed(T).numbered.next_seqno == 3 + 1 + 3 + 7
    assert_true(owner, broker, T)


def test_h15_seqnos_that_can_no_longer_be_known_stop_recovery():
    broker = MemoryBroker(ledger_entries=4)
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.plain("a", "b")
    writer.records(1, "open")
    writer.plain(*"cdefgh")
    owner.pump()
    owner.snapshot(T)
    trimmed_to(broker, owner.buffer(T).applied.ledger)  # retention that knows nothing of the floor
    assert isinstance(manager_on(broker).problems[T], AppliedPositionTrimmed)


def test_row_p7_topics_with_names_like_keys_do_not_conflict():
    broker = MemoryBroker(ledger_entries=9)
    owner = manager_on(broker, max_entry_bytes=SMALL + 60)
    names = ["a", "a-1", "a-s1", "a-end", "a-partition-1", "a-1-end", "__owner"]
    for step, name in enumerate(names):
        owner.register(name)
        abort_some(TopicWriter(broker, name), *range(1, 6 + step))
    owner.pump()
    for name in names:
        owner.snapshot(name)
    successor = manager_on(broker, max_entry_bytes=SMALL + 60)
    assert successor.topics == sorted(names)
    for name in names:
        assert_true(successor, broker, name)
    successor.delete("a")
    for name in names[1:]:
        assert entries(broker, name).end is not None


def test_row_p11_a_compacted_topic_that_ends_in_tombstones_is_read_to_its_end():
    broker, owner, _ = stored()
    owner.register("u")
    owner.delete("u")
    broker.delete_topic("u")
    manager_on(broker)
    broker.compact(SNAPSHOT_TOPIC)
    between = Interfering(broker)
    table = scan(between)
    assert between.reads <= 4
    assert restored_topics(table) == [T]
    assert_true(manager_on(broker), broker, T)


def test_row_u4_a_replay_adds_no_abort_twice():
    broker, owner, writer = stored()
    writer.records(50, "open")
    abort_some(writer, 51, 52)
    owner.pump()
    owner.snapshot(T)
    for _ in range(3):
        owner = manager_on(broker)
        owner.snapshot(T)
    assert_true(owner, broker, T)
    unsealed = owner._followed[T].state().buffer.unsealed
    assert len(set(unsealed.least.tolist())) == len(unsealed.least)


def test_row_u6_a_snapshot_after_recovery_has_the_real_positions():
    broker, owner, writer = stored()
    abort_some(writer, 50)
    owner = manager_on(broker)
    owner.snapshot(T)
    state = read_snapshot(T, entries(broker, T)).state.buffer
    assert state.max_read == state.applied == broker.last_position(T)


def test_row_u13_one_bad_topic_stops_no_other():
    broker, owner, _ = stored()
    for name in ("bad", "unreadable", "worse"):
        owner.register(name)
        abort_some(TopicWriter(broker, name), 1)
    owner.pump()
    owner.snapshot("bad")
    found = entries(broker, "bad")
    put(broker, *[message(EntryKey("bad", END), 1, b"junk")] * HISTORY_KEPT)
    assert found.end is not None
    with broker.writer("worse") as writer:
        writer.append(Batch.of([Message(None, b"junk", {"tb.v": "1", "tb.marker": "1"})])).result()
    TopicWriter(broker, "unreadable").plain("p")
    broker.faults.fail_read(Damaged("file", 3, "bit rot"), topic="unreadable")
    successor = manager_on(broker)
    assert sorted(successor.problems) == ["bad", "unreadable", "worse"]
    assert_true(successor, broker, T)
    for name, match in (("bad", "bad-end"), ("unreadable", "bit rot"), ("worse", "topic worse stopped")):
        with pytest.raises(Exception, match=match):
            successor.buffer(name)
        with pytest.raises(Exception, match=match):
            successor.register(name)
    abort_some(TopicWriter(broker, T), 77)
    successor.pump()
    successor.snapshot(T)
    assert_true(successor, broker, T)
