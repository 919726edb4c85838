"""Upkeep by an owner: sequencing that lags, segments that are dropped, a snapshot topic that stays small."""

from snapshot_driver import Interfering, abort_some, assert_true, entries, manager_on
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from snapshots.format import SEGMENT, SNAPSHOT_TOPIC
from txnbuffer.recovery.followed_topic import drop_segments

T = "t"


def registered(broker):
    owner = manager_on(broker)
    owner.register(T)
    return owner, TopicWriter(broker, T)


def trailing(broker):
    """An owner that holds no messages for sequencing, so that it reads all of the log again."""
    owner, writer = registered(broker)
    owner._followed[T].held_limit = 0
    return owner, writer


def test_undecided_messages_read_again_are_sequenced_later():
    broker = MemoryBroker()
    owner, writer = trailing(broker)
    writer.records(1, "open")
    writer.plain("a", "b")
    writer.records(2, "open")
    writer.plain("c", "d")
    owner.pump()
    writer.commit(1)
    owner.pump()
    assert owner.followed(T).numbered.next_seqno == 4
    writer.commit(2)
    owner.pump()
    assert owner.followed(T).numbered.next_seqno == 7
    assert_true(owner, broker, T)


def test_sequencing_that_has_caught_up_needs_no_older_ledgers():
    broker = MemoryBroker()
    owner, writer = trailing(broker)
    for txn in range(1, 5):
        writer.records(txn, "open")
        writer.plain("a")
        owner.pump()
        broker.roll(T)
        writer.commit(txn)
        owner.pump()
        assert owner._followed[T]._again is None
        owner.snapshot(T)
        owner.snapshot(T)
        assert owner.trim(T, 10**6) == broker.ledgers(T)[-1].ledger
    assert owner.problems == {}
    assert owner.followed(T).numbered.next_seqno == 9


def test_segments_that_wait_to_be_written_are_not_dropped():
    broker = MemoryBroker()
    owner, writer = registered(broker)
    abort_some(writer, *range(1, 8))
    broker.roll(T)
    writer.plain("p")
    owner.pump()
    followed = owner._followed[T]
    followed.capture(owner.epoch)
    assert len(followed.writer.chains[SEGMENT].waiting) == 2
    assert not drop_segments(broker, SNAPSHOT_TOPIC, followed, broker.ledgers(T)[-1].ledger)
    assert len(owner.buffer(T).aborted) == 7
    assert len(followed.buffer.segments.summaries) == 2
    owner.snapshot(T)
    assert drop_segments(broker, SNAPSHOT_TOPIC, followed, broker.ledgers(T)[-1].ledger)
    assert len(owner.buffer(T).aborted) == 1


def test_the_snapshot_topic_is_compacted_once_it_has_grown(monkeypatch):
    monkeypatch.setattr("snapshots.writer.COMPACT_BYTES", 2000)
    between = Interfering(MemoryBroker())
    compactions = []
    between.before = lambda name, topic: compactions.append(topic) if name == "compact" else None
    owner, writer = registered(between)
    written, rounds = 0, 0
    while written < 10 * 2000:
        writer.plain("p")
        owner.pump()
        owner.snapshot(T)
        written += len(entries(between, T).end.value)
        rounds += 1
    assert 5 <= len(compactions) <= 10 < rounds / 2
