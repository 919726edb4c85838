import dataclasses

import pytest
from snapshot_driver import (
    abort_some,
    assert_true,
    end_of,
    entries,
    flipped,
    manager_on,
    put,
    stored,
    trimmed_to,
)
from writing import TopicWriter

from broker_io.memory import MemoryBroker
from snapshots.errors import (
    AppliedPositionTrimmed,
    SnapshotDamaged,
    SnapshotMissing,
    UnsupportedSnapshot,
)
from snapshots.format import END, SEGMENT, SNAPSHOT_TOPIC, EndEntry, EntryKey, gone, message
from snapshots.scan import scan
from txnbuffer.recovery.restore import restore

T = "t"


def with_end(broker, **changes):
    end = dataclasses.replace(end_of(broker), **changes)
    return message(EntryKey(T, END), end.epoch, end.encode())


# Incarnations


def test_a_topic_recreated_inherits_nothing():
    broker, _, _ = stored()
    broker.delete_topic(T)
    TopicWriter(broker, T).plain("new")
    with pytest.raises(SnapshotMissing, match="re-created"):
        restore(broker, scan(broker), T)
    owner = manager_on(broker)
    assert owner.topics == []
    assert "re-created" in owner.notes[0]
    assert not entries(broker, T)
    owner.register(T)
    assert_true(owner, broker, T)
    assert owner.buffer(T).aborted.ids() == []


def test_what_is_left_of_a_topic_that_is_gone_is_removed():
    broker, _, _ = stored()
    broker.delete_topic(T)
    owner = manager_on(broker)
    assert owner.problems == {}
    assert not entries(broker, T)


def test_an_applied_position_whose_ledger_is_gone_is_an_error():
    broker, owner, writer = stored()
    writer.plain(*["p"] * 20)
    trimmed_to(broker, 10**6)
    owner = manager_on(broker)
    assert isinstance(owner.problems[T], AppliedPositionTrimmed)
    assert "txnbuf recover ADDRESS t --write" in str(owner.problems[T])
    with pytest.raises(AppliedPositionTrimmed):
        owner.buffer(T)


def test_a_ledger_closed_and_wholly_applied_may_go():
    broker, owner, writer = stored()
    broker.roll(T)
    writer.plain("p")
    owner.pump()
    owner.snapshot(T)
    broker.roll(T)
    owner = manager_on(broker)
    owner.snapshot(T)
    assert trimmed_to(broker, 10**6) == owner._followed[T].state().following_ledger
    for _ in range(2):  # the proof has to outlive the ledger that it is about
        owner = manager_on(broker)
        assert owner.problems == {}
        owner.snapshot(T)
    writer.plain("q")
    owner.pump()
    assert owner.buffer(T).applied == broker.last_position(T)
    assert [txn.least for txn in owner.buffer(T).aborted.ids()] == [10, 11]  # of the segment that is not sealed yet


def test_a_ledger_closed_but_not_wholly_applied_may_not_go():
    broker, owner, writer = stored()
    writer.plain("p")
    owner.pump()
    writer.plain("q")
    broker.roll(T)
    owner.snapshot(T)
    trimmed_to(broker, 10**6)
    assert isinstance(manager_on(broker).problems[T], AppliedPositionTrimmed)


def test_an_empty_log_whose_first_ledger_is_gone_is_an_error():
    broker = MemoryBroker(ledger_entries=3)
    manager_on(broker).register(T)
    TopicWriter(broker, T).plain(*"abcdefg")
    trimmed_to(broker, 10**6)
    assert isinstance(manager_on(broker).problems[T], AppliedPositionTrimmed)


# Falling back


def test_an_unusable_end_falls_back_to_the_older_one():
    broker, owner, writer = stored()
    first = end_of(broker).snapshot_id
    abort_some(writer, 20, 21)
    owner.pump()
    owner.snapshot(T)
    end = entries(broker, T).end
    put(broker, message(EntryKey(T, END), 1, flipped(end.value, 30)))
    abort_some(writer, 22)
    successor = manager_on(broker)
    assert_true(successor, broker, T)
    assert "t-end" in successor.notes[0]
    assert f"older snapshot {first + 1}" in successor.notes[1]
    successor.snapshot(T)
    assert end_of(broker).snapshot_id > first + 1
    again = manager_on(broker)
    assert_true(again, broker, T)
    assert again.notes == []


def test_an_unusable_older_end_is_skipped():
    broker, _owner, _writer = stored()
    second = entries(broker, T).end
    put(broker, *[message(EntryKey(T, END), 1, flipped(second.value, at)) for at in (30, 31)])
    successor = manager_on(broker)
    assert_true(successor, broker, T)
    assert f"older snapshot {end_of_value(second).snapshot_id}" in successor.notes[1]


def end_of_value(stored):
    return EndEntry.decode(stored.value)


def test_segments_that_only_the_older_snapshot_has_are_written_again():
    broker, _owner, _writer = stored()
    put(broker, gone(EntryKey(T, SEGMENT, 2), 1))
    broker.compact(SNAPSHOT_TOPIC)
    rewritten = with_end(broker)
    put(broker, rewritten)
    successor = manager_on(broker)
    assert_true(successor, broker, T)
    assert "older snapshot" in successor.notes[1]  # that the raw topic still holds with all its segments
    again = manager_on(broker)
    assert_true(again, broker, T)
    assert again.notes == []


def only_damaged(broker):
    """A snapshot topic that holds nothing of the topic but a chain with a hole."""
    found = entries(broker, T)
    broker.delete_topic(SNAPSHOT_TOPIC)
    broker.create_topic(SNAPSHOT_TOPIC)
    parts = [message(EntryKey(T, SEGMENT, n), 1, entry.value) for n, entry in found.numbered[SEGMENT].items() if n != 2]
    put(broker, *parts, message(EntryKey(T, END), 1, found.end.value))


def test_a_replay_from_the_start_needs_the_start():
    broker, _, _ = stored()
    only_damaged(broker)
    successor = manager_on(broker)
    assert_true(successor, broker, T)
    assert "replayed from the start" in successor.notes[1]

    broker, _owner, _writer = stored()
    only_damaged(broker)
    trimmed_to(broker, broker.ledgers(T)[1].ledger)
    successor = manager_on(broker)
    with pytest.raises(SnapshotDamaged, match="t-2: it is missing"):
        successor.buffer(T)


def test_repair_takes_what_the_log_still_holds():
    broker, _owner, _writer = stored()
    only_damaged(broker)
    trimmed_to(broker, broker.ledgers(T)[1].ledger)
    successor = manager_on(broker)
    successor.rebuild(T)
    assert successor.problems == {}
    assert_true(successor, broker, T)
    again = manager_on(broker)
    assert again.problems == {}
    assert again.buffer(T).aborted.ids() == successor.buffer(T).aborted.ids()


def test_a_newer_format_is_never_fallen_back_from():
    broker, _, _ = stored()
    end = entries(broker, T).end
    newer = message(EntryKey(T, END), 1, end.value)
    put(broker, newer._replace(properties={**newer.properties, "tb.v": "4"}))
    assert isinstance(manager_on(broker).problems[T], UnsupportedSnapshot)
