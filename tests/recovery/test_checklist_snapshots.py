"""The conformance checklist, the rows that need snapshots; see tests/CHECKLIST.md."""

import pytest
from snapshot_driver import Interfering, abort_some, assert_true, end_of, entries, manager_on, stored
from writing import TopicWriter

from broker_io.errors import Damaged, DiskFailed
from broker_io.memory import MemoryBroker
from broker_io.testing.disk import SimulatedClock
from snapshots.format import SEGMENT, SNAPSHOT_TOPIC
from snapshots.scan import scan
from txnbuffer.follow import visible_records
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.recovery.restore import load, read_snapshot

T = "t"


def registered(segment_size=3, **options):
    broker = MemoryBroker(**options)
    owner = manager_on(broker, segment_size=segment_size)
    owner.register(T)
    return broker, owner, TopicWriter(broker, T)


def visible(broker, owner):
    """Values of the visible records, in their order."""
    found = []
    with broker.reader(T) as reader:
        while (placed := reader.read()) is not None:
            found += visible_records(placed, owner.buffer(T)).messages.values.to_list()
    return found


@pytest.mark.parametrize("second", ["commit", "abort"])
def test_row_01_two_interleaved_transactions_over_a_restart(second):
    broker, owner, writer = registered()
    for _ in range(3):
        writer.records(1, "one")
        writer.records(2, "two")
    writer.commit(1)
    owner.pump()
    owner.snapshot(T)
    assert visible(broker, owner) == [b"one"]  # 2 began right after the first record of 1
    owner = manager_on(broker)
    getattr(writer, second)(2)
    owner.pump()
    assert visible(broker, owner) == ([b"one", b"two"] * 3 if second == "commit" else [b"one"] * 3)


@pytest.mark.parametrize("by", ["count", "time"])
def test_row_02_snapshots_by_time_and_count_carry_positions_and_aborts(by):
    clock = SimulatedClock()
    broker = MemoryBroker(clock=clock)
    policy = SnapshotPolicy(changes=10) if by == "count" else SnapshotPolicy()
    owner = manager_on(broker, clock=clock, policy=policy)
    owner.register(T)
    writer = TopicWriter(broker, T)
    abort_some(writer, *range(1, 11))
    if by == "time":
        clock.sleep(5)
    owner.pump()
    snapshot = read_snapshot(T, entries(broker, T))
    assert snapshot.state.buffer.max_read == broker.last_position(T)
    assert len(snapshot.buffer.aborted) == 10


def test_row_03_an_abort_goes_with_the_ledger_of_its_marker():
    broker, owner, writer = registered(segment_size=1)
    abort_some(writer, 1)
    broker.roll(T)
    abort_some(writer, 2, 3)
    owner.pump()
    owner.snapshot(T)
    owner.snapshot(T)
    owner.trim(T, broker.ledgers(T)[1].ledger)
    assert owner.buffer(T).aborted.ids() == [TxnId(0, 2), TxnId(0, 3)]
    assert manager_on(broker, segment_size=1).buffer(T).aborted.ids() == [TxnId(0, 2), TxnId(0, 3)]


def test_row_04_a_deleted_topic_leaves_no_entry():
    broker, owner, _ = stored()
    owner.delete(T)
    broker.delete_topic(T)
    manager_on(broker)
    broker.compact(SNAPSHOT_TOPIC)
    with broker.reader(SNAPSHOT_TOPIC, compacted=True) as reader:
        assert reader.read().messages.keys.to_list() == [b"__owner"]


def test_row_05_errors_of_reader_and_writer_stop_the_topic():
    broker, _, writer = stored()
    writer.plain("p")
    broker.faults.fail_read(Damaged("segment", 7, "bit rot"), topic=T)
    owner = manager_on(broker)
    with pytest.raises(Damaged):
        owner.buffer(T)
    broker.faults.fail_append(DiskFailed("no more"), topic=SNAPSHOT_TOPIC)
    with pytest.raises(DiskFailed):
        owner.register("u")
    assert owner.topics == []


def test_row_06_every_entry_round_trips():
    """Byte by byte in the golden tests; here as a whole, through the topic."""
    broker, owner, writer = stored(max_entry_bytes=1200)
    writer.records(50, "open")
    owner.pump()
    owner.snapshot(T)
    found = read_snapshot(T, entries(broker, T))
    assert found.buffer.snapshot_state().differences(owner.buffer(T).snapshot_state()) == []


def test_row_07_fourteen_aborts_of_capacity_five():
    broker, owner, writer = registered(segment_size=5)
    abort_some(writer, *range(1, 11))
    broker.roll(T)
    abort_some(writer, *range(11, 15))
    owner.pump()
    owner.snapshot(T)
    snapshot = read_snapshot(T, entries(broker, T))
    assert (len(snapshot.digests), len(snapshot.state.buffer.unsealed)) == (2, 4)
    assert_true(manager_on(broker, segment_size=5), broker, T)
    owner = manager_on(broker, segment_size=5)
    owner.snapshot(T)
    owner.trim(T, broker.ledgers(T)[1].ledger)
    assert [txn.least for txn in owner.buffer(T).aborted.ids()] == [11, 12, 13, 14]


def test_row_09_a_clear_that_failed_can_be_finished():
    broker, owner, _ = stored()
    broker.faults.fail_append(DiskFailed("no more"), topic=SNAPSHOT_TOPIC)
    with pytest.raises(DiskFailed):
        owner.delete(T)
    manager_on(broker).delete(T)
    assert end_of(broker).deleted
    assert not entries(broker, T).numbered[SEGMENT]


def test_row_12_messages_published_while_recovering_are_covered():
    broker, _, writer = stored()
    between = Interfering(broker)
    seen = []

    def publish(name, topic):
        if (name, topic) == ("read", T) and not seen:
            seen.append(writer.plain("late"))

    writer.plain("p")
    between.before = publish
    owner = manager_on(between)
    owner.pump()
    assert owner.buffer(T).max_read_position == seen[0].last == broker.last_position(T)


def test_row_13_max_read_stays_where_nothing_is_published():
    broker, owner, _ = stored()
    before = owner.buffer(T).max_read_position
    again = manager_on(broker)
    again.pump()
    assert again.buffer(T).max_read_position == before


def test_row_23_a_deleted_topic_has_no_reader_left():
    _broker, owner, writer = stored()
    owner.delete(T)
    writer.plain("p")
    assert owner.pump() == {}
    assert owner.topics == []


def test_row_24_the_first_snapshot_precedes_the_first_transactional_message():
    broker, _owner, _ = registered()
    assert entries(broker, T).end is not None
    assert broker.last_position(T) is None


def test_row_26_27_an_unreadable_log_is_never_taken_as_recovered():
    broker, _, writer = stored()
    abort_some(writer, 70)
    broker.faults.fail_read(Damaged("segment", 7, "bit rot"), topic=T)
    owner = manager_on(broker)
    assert isinstance(owner.problems[T], Damaged)
    with pytest.raises(Damaged):
        owner.buffer(T)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_row_36_37_what_ended_before_a_restart_stays_ended(end):
    broker, owner, writer = registered()
    writer.records(1, "x")
    getattr(writer, end)(1)
    owner.pump()
    owner.snapshot(T)
    owner = manager_on(broker)
    assert visible(broker, owner) == ([b"x"] if end == "commit" else [])


def test_row_38_an_open_transaction_found_by_recovery_holds_readers_back():
    broker, owner, writer = registered()
    at = writer.plain("p").last
    writer.records(1, "x")
    writer.plain("q")
    owner = manager_on(broker)
    assert owner.buffer(T).max_read_position == at
    owner.snapshot(T)
    assert manager_on(broker).buffer(T).max_read_position == at


def test_row_39_aborted_transactions_found_by_recovery_are_filtered_at_once():
    broker, _, _ = stored()
    owner = manager_on(broker)
    assert len(owner.buffer(T).aborted) == 11
    assert visible(broker, owner) == [b"p"]
    assert len(load(broker, T).buffer.aborted) == 11


def test_row_50_the_newest_value_of_each_key_counts():
    broker, owner, writer = stored()
    abort_some(writer, 70)
    owner.pump()
    owner.snapshot(T)
    raw, compacted = entries(broker, T), None
    broker.compact(SNAPSHOT_TOPIC)
    compacted = entries(broker, T)
    assert raw == compacted


def test_row_51_max_read_is_right_once_ready():
    broker, _, writer = stored()
    writer.plain(*"abc")
    owner = manager_on(broker)
    assert owner.buffer(T).max_read_position == broker.last_position(T)


def test_row_58_many_topics_are_deleted_with_their_snapshots():
    broker, owner, _ = stored()
    for name in ("u", "v"):
        owner.register(name)
    for name in owner.topics:
        owner.delete(name)
        broker.delete_topic(name)
    assert manager_on(broker).topics == []
    assert not any(scan(broker).topics.values())


def test_row_59_one_writer_for_all_topics():
    broker = MemoryBroker()
    between = Interfering(broker)
    opened = []
    between.before = lambda name, topic: None
    inner = between.writer
    between.writer = lambda topic, **options: opened.append(topic) or inner(topic, **options)
    owner = manager_on(between)
    for name in ("a", "b", "c"):
        owner.register(name)
    owner.close()
    assert opened == [SNAPSHOT_TOPIC]
