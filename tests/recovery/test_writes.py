"""Writes of which only some messages become durable always leave a complete snapshot."""

import itertools

import numpy as np
import pytest
from snapshot_driver import (
    SMALL,
    Interfering,
    abort_some,
    add_bounds,
    assert_true,
    bounds_of,
    entries,
    manager_on,
    put,
    written,
)
from writing import TopicWriter

from broker_io.batch import Batch, Message
from broker_io.errors import DiskFailed, InvalidTopicName
from broker_io.memory import MemoryBroker
from broker_io.position import Positions
from snapshots.errors import OwnershipLost, SnapshotMissing
from snapshots.format import END, MUTATIONS, OVERFLOW, SEGMENT, SNAPSHOT_TOPIC, EndEntry, EntryKey, gone
from snapshots.scan import scan
from snapshots.writer import SnapshotWriter
from txnbuffer.buffer.state import BufferSegment, Items
from txnbuffer.recovery.codec import BufferSegmentPayload, EncodedSegment, encode_segment
from txnbuffer.recovery.restore import holds_transactions

T = "t"
OLD = [(1, 1), (2, 2), (3, 3)]
NEW = [*OLD, (4, 5)]
"""The mutation snapshots before and after the write."""


def before_the_write(**options):
    """An owner with a durable snapshot, and a plan for the next one: more segments, overflow, an end, tombstones."""
    broker = MemoryBroker(ledger_entries=9)
    owner = manager_on(broker, max_entry_bytes=SMALL, **options)
    owner.register(T)
    writer = TopicWriter(broker, T)
    for _ in range(6):
        writer.plain("p")
    writer.records(90, "open")
    abort_some(writer, *range(1, 9))
    owner.pump()
    add_bounds(broker, owner, T, 1, 2, 3, segment_entries=1)
    owner.snapshot(T)
    abort_some(writer, *range(20, 11, -1))  # not in the order of their numbers
    writer.plain("p")
    owner.pump()
    add_bounds(broker, owner, T, 5, segment_entries=1)
    plan = owner._followed[T].capture(owner.epoch).plan
    return broker, owner, plan


def subsets(items):
    return itertools.chain.from_iterable(itertools.combinations(items, size) for size in range(len(items) + 1))


def test_the_plan_is_worth_testing():
    _, _, plan = before_the_write()
    kinds = [message.properties["tb.kind"] for message in plan.first]
    assert kinds.count("part") >= 2
    assert kinds.count("spill") >= 2
    assert kinds.count("mutations") == 1
    assert len(plan.tombstones) >= 2


@pytest.mark.parametrize("compacted", [False, True])
def test_row_p1_no_order_of_durable_writes_loses_an_abort(compacted):
    """Any subset of one step may become durable; each step begins after all before were acknowledged."""
    _, _, plan = before_the_write()
    steps = [plan.first, [plan.end], plan.tombstones]
    landings = 0
    for step, messages in enumerate(steps):
        for chosen in subsets(range(len(messages))):
            broker, _owner, plan = before_the_write()
            steps = [plan.first, [plan.end], plan.tombstones]
            durable = [*itertools.chain.from_iterable(steps[:step]), *(steps[step][index] for index in chosen)]
            if durable:
                put(broker, *durable)
            if compacted:
                broker.compact(SNAPSHOT_TOPIC)
            successor = manager_on(broker, max_entry_bytes=SMALL)
            assert_true(successor, broker, T)
            assert bounds_of(successor, T) == (OLD if step == 0 or (step == 1 and not chosen) else NEW)
            assert successor.notes == []
            successor.snapshot(T)
            assert_true(manager_on(broker, max_entry_bytes=SMALL), broker, T)
            landings += 1
    assert landings >= 30


@pytest.mark.parametrize("fault", ["fail", "lose", "part"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_row_p2_u1_u2_a_failed_write_reaches_the_caller_and_is_repeated(fault, step):
    broker, _, _ = before_the_write()
    between = Interfering(broker)
    owner = manager_on(between, max_entry_bytes=SMALL)
    changes = owner._followed[T].due.changes
    between.before = failing(broker, step, {"fail": 0, "lose": 99, "part": 1}[fault])
    with pytest.raises(DiskFailed):
        owner.snapshot(T)
    assert owner._followed[T].due.changes == changes
    owner.snapshot(T)
    assert owner.epoch > 2
    assert owner._followed[T].due.changes == 0
    assert_true(owner, broker, T)
    assert_true(manager_on(broker, max_entry_bytes=SMALL), broker, T)


@pytest.mark.parametrize("durable", [0, 1, 99])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_row_p1_a_crash_in_any_step_leaves_a_whole_snapshot(step, durable):
    broker, _, _ = before_the_write()
    between = Interfering(broker)
    owner = manager_on(between, max_entry_bytes=SMALL)
    between.before = failing(broker, step, durable)
    with pytest.raises(DiskFailed):
        owner.snapshot(T)
    broker.compact(SNAPSHOT_TOPIC)
    successor = manager_on(broker, max_entry_bytes=SMALL)
    assert successor.notes == []
    assert_true(successor, broker, T)


def test_the_order_of_writes_is_segments_and_overflow_then_the_end_then_tombstones():
    broker, owner, _ = before_the_write()
    owner = manager_on(broker, max_entry_bytes=SMALL)
    add_bounds(broker, owner, T, 5, segment_entries=1)
    before = broker.last_position(SNAPSHOT_TOPIC)
    owner.snapshot(T)
    kinds = [message.properties["tb.kind"] for message in written(broker, before)]
    order = {"part": 0, "mutations": 0, "spill": 0, "end": 1, "gone": 2}
    steps = [order[kind] for kind in kinds]
    assert steps == sorted(steps)
    assert {*kinds} == {*order}


def test_a_durable_unacknowledged_end_entry_is_the_snapshot():
    """Its segments are named, so they are never written again, and its number is used."""
    broker, _, _ = before_the_write()
    between = Interfering(broker)
    owner = manager_on(between, max_entry_bytes=SMALL)
    between.before = failing(broker, 1, 99)
    with pytest.raises(DiskFailed):
        owner.snapshot(T)
    stored = EndEntry.decode(entries(broker, T).end.value)
    owner.snapshot(T)
    assert EndEntry.decode(entries(broker, T).end.value).snapshot_id == stored.snapshot_id + 1
    parts = [message.key for message in written(broker) if message.properties["tb.kind"] == "part"]
    assert len(parts) == len(set(parts))


def failing(broker, step, durable):
    """Let the append of one step fail after it wrote some messages."""
    appends = itertools.count()

    def before(name, topic):
        if name == "append" and next(appends) == step:
            broker.faults.fail_append(DiskFailed("the disk is gone"), written=durable, topic=topic)

    return before


def test_row_u1_a_failed_first_snapshot_registers_nothing():
    broker = MemoryBroker()
    owner = manager_on(broker)
    broker.faults.fail_append(DiskFailed("the disk is gone"), topic=SNAPSHOT_TOPIC)
    with pytest.raises(DiskFailed):
        owner.register(T)
    assert owner.topics == []
    with pytest.raises(Exception, match="register it first"):
        owner.buffer(T)
    owner.register(T)
    assert entries(broker, T).end is not None


def test_row_p4_segments_are_in_the_order_of_markers_not_of_ids():
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    abort_some(TopicWriter(broker, T), 9, 3, 7, 1, 8)
    owner.pump()
    (part,) = owner.buffer(T).segments.take_sealed()
    assert part.items.least.tolist() == [9, 3, 7]


def test_row_p3_no_entry_outgrows_the_limit():
    """Bounds are in bytes of the encoded entry, with the worst columns that there can be."""
    count = 8000
    wild = np.array([2**62, -(2**62)] * (count // 2), np.int64)
    zeros = np.zeros(count, np.int64)
    places = Positions(zeros, np.arange(count), zeros - 1)
    worst = Positions(wild, wild, wild)
    none = Positions.of([])
    for items in (
        Items(wild, wild, worst, none, none),
        Items(zeros[:0], zeros[:0], none, worst, worst),
        Items(wild, wild, places, none, none),
    ):
        writer = SnapshotWriter("t" * 400, "i" * 64)
        writer.chains[SEGMENT].add([BufferSegmentPayload(BufferSegment(1, items))])
        plan = writer.plan(2**60, bytes(5 * 2**20))
        sizes = Batch.of([*plan.first, plan.end, *plan.tombstones]).sizes()
        assert len(plan.first) == 1 + 6
        assert sizes.max() <= writer.max_entry_bytes


@pytest.mark.parametrize("size", [0, 1, 122, 123, 124, 1000, 5000])
def test_row_p3_states_around_the_limit_fit(size):
    writer = SnapshotWriter(T, "incarnation", SMALL)
    state = bytes(range(256)) * 20
    plan = writer.plan(1, state[:size])
    assert Batch.of([*plan.first, plan.end]).sizes().max() <= SMALL
    assert b"".join(message.value for message in plan.first) + plan.entry.state == state[:size]


def test_entries_too_short_for_anything_are_refused():
    with pytest.raises(ValueError, match="too short"):
        SnapshotWriter(T, "i", 1000)


def test_row_p5_trimming_and_deleting_leave_no_stale_key():
    broker = MemoryBroker(ledger_entries=8)
    owner = manager_on(broker, max_entry_bytes=SMALL)
    owner.register(T)
    writer = TopicWriter(broker, T)
    writer.records(99, "open")
    writer.commit(99)
    abort_some(writer, *range(1, 30))
    owner.pump()
    owner.snapshot(T)
    assert sorted(entries(broker, T).numbered[SEGMENT]) == list(range(1, 10))
    owner.trim(T, broker.ledgers(T)[-2].ledger)
    kept = entries(broker, T)
    assert sorted(kept.numbered[SEGMENT]) == [8, 9]
    assert set(kept.numbered[OVERFLOW]) == set(owner._followed[T].writer.last.overflow_numbers)
    assert_recovers_what_remains(broker, owner)
    owner.delete(T)
    broker.compact(SNAPSHOT_TOPIC)
    assert_says_deleted(broker)
    assert [m.message.key for m in read_all(broker)] == [b"__owner", b"t-end"]
    broker.delete_topic(T)
    manager_on(broker)
    broker.compact(SNAPSHOT_TOPIC)
    assert [m.message.key for m in read_all(broker)] == [b"__owner"]
    assert not scan(broker).topics.get(T)


def read_all(broker):
    messages = []
    with broker.reader(SNAPSHOT_TOPIC, compacted=True) as reader:
        while (placed := reader.read()) is not None:
            messages += placed
    return messages


def assert_recovers_what_remains(broker, owner):
    successor = manager_on(broker, max_entry_bytes=SMALL)
    assert successor.buffer(T).aborted.ids() == owner.buffer(T).aborted.ids()
    assert successor.buffer(T).snapshot_state().differences(owner.buffer(T).snapshot_state()) == []
    owner._ownership = successor._ownership  # continue the test under the new epoch


@pytest.mark.parametrize("durable", range(7))
def test_row_p5_a_deletion_that_was_cut_short_is_finished(durable):
    broker, owner, _ = before_the_write()
    followed = owner._followed[T]
    followed.writer.chains[SEGMENT].waiting.clear()
    plan = followed.writer.plan_deletion(owner.epoch, keep_end=True)
    assert len(plan.tombstones) == 6
    put(broker, *[plan.end, *plan.tombstones][: durable + 1])
    for _ in range(2):  # a deletion that is finished stays one
        broker.compact(SNAPSHOT_TOPIC)
        successor = manager_on(broker, max_entry_bytes=SMALL)
        assert successor.problems == {}
        assert successor.topics == []
        assert_says_deleted(broker)
    successor.register(T)
    assert_true(successor, broker, T)
    assert_true(manager_on(broker, max_entry_bytes=SMALL), broker, T)


def assert_says_deleted(broker):
    left = entries(broker, T)
    assert EndEntry.decode(left.end.value).deleted
    assert not any(left.numbered.values())


def test_a_snapshot_that_was_lost_is_not_taken_for_one_that_never_was():
    broker, owner, _ = before_the_write()
    put(broker, gone(EntryKey(T, END), owner.epoch), *[gone(EntryKey(T, SEGMENT, n), owner.epoch) for n in range(1, 5)])
    put(broker, *[gone(EntryKey(T, kind, n), owner.epoch) for kind in (MUTATIONS, OVERFLOW) for n in range(1, 30)])
    last = broker.last_position(SNAPSHOT_TOPIC)
    owner = manager_on(broker)
    for _ in range(2):
        with pytest.raises(SnapshotMissing, match=f"txnbuf recover ADDRESS {T} --write"):
            owner.register(T)
        assert owner.topics == []
    assert [message.key for message in written(broker, last)] == [b"__owner"]
    owner.rebuild(T)
    assert_true(owner, broker, T)


@pytest.mark.parametrize("lost", ["commit", "record"])
def test_whatever_a_log_says_of_transactions_needs_a_snapshot(lost):
    broker = MemoryBroker()
    writer = TopicWriter(broker, T)
    if lost == "record":
        put(broker, Message(b"k", b"v", {"tb.v": "1", "tb.txn": "nonsense"}), topic=T)
    else:
        writer.commit(1)
    assert holds_transactions(broker, T)
    with pytest.raises(SnapshotMissing):
        manager_on(broker).register(T)


def test_an_epoch_marker_alone_needs_no_snapshot() -> None:
    """It is written before the first snapshot."""
    broker = MemoryBroker()
    TopicWriter(broker, T).commit()
    put(broker, Message(b"k", b"v"), topic=T)
    assert not holds_transactions(broker, T)
    with manager_on(broker) as manager:
        manager.register(T)
        assert manager.buffer(T).applied == broker.last_position(T)


def test_a_deletion_of_an_older_topic_of_that_name_excuses_nothing():
    broker, owner, _ = before_the_write()
    owner.delete(T)
    owner.register(T)
    owner.delete(T)
    broker.delete_topic(T)
    abort_some(TopicWriter(broker, T), 1)
    for made in (owner, manager_on(broker)):
        with pytest.raises(SnapshotMissing):
            made.register(T)
        owner = made
    assert not entries(broker, T)


def test_internal_topics_have_no_buffer():
    owner = manager_on(MemoryBroker())
    for work in (owner.register, owner.rebuild):
        with pytest.raises(InvalidTopicName, match="is internal and has no buffer"):
            work(SNAPSHOT_TOPIC)


def test_row_p8_no_transactional_record_before_the_first_snapshot_is_durable():
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    stored = entries(broker, T).end
    assert stored is not None
    assert broker.last_position(T) is None


def test_row_p9_positions_to_resume_from_are_in_the_end_entry_only():
    broker, owner, _ = before_the_write()
    state = owner._followed[T].state()
    part = next(iter(entries(broker, T).numbered[SEGMENT].values()))
    assert state.buffer.max_read is not None
    assert b"max_read" not in part.value
    assert state.buffer.max_read < state.buffer.applied


def test_row_p10_a_segment_once_named_is_never_written_again():
    broker = MemoryBroker()
    owner = manager_on(broker)
    owner.register(T)
    writer = TopicWriter(broker, T)
    for start in range(1, 40, 4):
        abort_some(writer, *range(start, start + 4))
        owner.pump()
        owner.snapshot(T)
        if start % 8 == 1:
            owner = manager_on(broker)
    keys = [message.key for message in written(broker) if message.properties["tb.kind"] == "part"]
    assert len(keys) == len(set(keys)) == 13


def test_an_orphan_segment_is_overwritten_by_its_true_owner():
    """A segment whose end entry was never written is ignored, even if its contents differ."""
    broker, owner, plan = before_the_write()
    items = Items.of([((0, 5), (1, 1, -1))])
    number = plan.keys[0].number
    before = plan.digests[SEGMENT][number - 1]
    forged = encode_segment(EncodedSegment(T, owner.epoch, before, BufferSegment(number, items)))
    put(broker, plan.first[0]._replace(value=forged))
    successor = manager_on(broker, max_entry_bytes=SMALL)
    assert_true(successor, broker, T)
    successor.snapshot(T)
    assert_true(manager_on(broker, max_entry_bytes=SMALL), broker, T)


def test_a_fenced_owner_writes_no_snapshot_and_says_so():
    broker, owner, _ = before_the_write()
    manager_on(broker, max_entry_bytes=SMALL)
    for work in (lambda: owner.snapshot(T), owner.pump, lambda: owner.buffer(T), lambda: owner.register("u")):
        with pytest.raises(OwnershipLost):
            work()
    owner.close()


def test_segments_must_come_in_their_order():
    writer = SnapshotWriter(T, "i")
    items = Items.of([((0, 5), (1, 1, -1))])
    with pytest.raises(ValueError, match="got part segment 2, expected 1"):
        writer.chains[SEGMENT].add([BufferSegmentPayload(BufferSegment(2, items))])
