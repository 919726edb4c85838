"""Warm topics: a takeover from a standby leads to the state of a cold recovery, or is one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from recovery.owner_life import KINDS, Life, T
from snapshot_driver import NEVER, manager_on
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.environment import current
from broker_io.errors import Error
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.format import END, SEGMENT, SNAPSHOT_TOPIC, EntryKey
from snapshots.scan import scan
from txnbuffer.recovery.codec import BufferSegmentPayload
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.warm_topic import WarmTopic

STEPS = st.lists(st.tuples(st.sampled_from([*KINDS, "warm", "read", "read", "renew"]), st.integers(0, 5)), max_size=40)


def load(broker: MemoryBroker) -> WarmTopic:
    return WarmTopic.load(broker, scan(broker, SNAPSHOT_TOPIC), T, SNAPSHOT_TOPIC, current().clock)


def read(warm: WarmTopic) -> None:
    while (placed := warm.followed.fetch()) is not None:
        warm.apply(placed)


def state_of(followed: FollowedTopic) -> dict[str, Any]:
    """All that a topic's owner has of it."""
    writer, buffer = followed.writer, followed.buffer
    writer.chains[SEGMENT].add(map(BufferSegmentPayload, buffer.segments.take_sealed()))
    return {
        "state": repr(followed.state()),
        "aborted": sorted(buffer.aborted.ids()),
        "coordinators": repr(buffer.coordinators),
        "numbered": repr(followed.numbered.snapshot_state()),
        "taken": followed.taken,
        "chains": {kind: repr(chain) for kind, chain in writer.chains.items()},
        "writer": (writer.incarnation, writer.last, writer.last_id, writer.live_overflow, writer.next_overflow),
        "limit": writer.max_entry_bytes,
        "failover": followed.failover,
        "index": repr(followed.index),
        "cursors": dict(followed.cursors),
        "generations": followed.generations,
        "origin": followed.origin_ledger,
        "due": (followed.due.policy, followed.due.messages, followed.due.changes),
        "unstored": followed.unstored,
    }


def taken_over(broker: MemoryBroker, warm: WarmTopic) -> tuple[LogOwner, LogOwner]:
    """An owner after a cold recovery, and its successor, which a warm topic was given."""
    cold = manager_on(broker, max_entry_bytes=2000)
    successor = LogOwner(broker, policy=NEVER, segment_size=3, max_entry_bytes=2000)
    successor.recover("", {T: warm})
    return cold, successor


@given(STEPS)
@example([("warm", 0), ("begin", 0), ("abort", 3), ("snapshot", 0), ("plain", 0)])
@example([("begin", 0), ("warm", 0), ("snapshot", 0), ("end", 0), ("snapshot", 0), ("read", 0)])
def test_a_takeover_from_a_warm_topic_has_the_state_of_a_cold_recovery(life):
    one, warm = Life(), None
    for step, number in life:
        if step == "warm":
            warm = warm or load(one.broker)
        elif warm is None or step not in ("read", "renew"):
            if step not in ("read", "renew"):
                one.do(step, number)
        elif step == "read":
            read(warm)
        elif (newer := warm.renewed(scan(one.broker, SNAPSHOT_TOPIC), SNAPSHOT_TOPIC, current().clock)) is not None:
            newer.followed.return_reader(warm.followed.take_reader())
            assert newer.followed.at == warm.followed.at
            warm = newer
    one.broker.faults.appends.clear()
    warm = warm or load(one.broker)
    cold, successor = taken_over(one.broker, warm)
    assert successor.problems == cold.problems == {}
    assert successor.warm + successor.discarded == 1
    mine, expected = successor.followed(T), cold.followed(T)
    assert mine.at == expected.at
    assert state_of(mine) == state_of(expected)
    one.writer.plain("later")
    successor.pump()
    successor.snapshot(T)
    assert load(one.broker).followed.at == one.broker.last_position(T)


def started() -> tuple[Life, WarmTopic]:
    one = Life()
    for step in ("abort", "begin", "plain", "snapshot"):
        one.do(step, 2)
    return one, load(one.broker)


def test_an_unchanged_topic_is_neither_restored_nor_read_again(monkeypatch):
    one, warm = started()
    table = scan(one.broker, SNAPSHOT_TOPIC)
    monkeypatch.setattr(MemoryBroker, "ledgers", None)
    monkeypatch.setattr(MemoryBroker, "reader", None)
    taken = warm.take_over(table, SNAPSHOT_TOPIC, 2000, NEVER, current().clock)
    assert taken is not None
    assert taken[0] is warm.followed


def test_a_newer_snapshot_is_restored_with_the_kept_messages():
    one, warm = started()
    for step in ("abort", "plain", "snapshot", "abort"):
        one.do(step, 3)
    read(warm)
    one.do("plain", 1)
    cold, successor = taken_over(one.broker, warm)
    assert (successor.warm, successor.discarded) == (1, 0)
    assert state_of(successor.followed(T)) == state_of(cold.followed(T))


def test_a_topic_that_was_created_again_is_recovered_cold():
    one, warm = started()
    one.broker.delete_topic(T)
    one.broker.create_topic(T)
    TopicWriter(one.broker, T).plain(*["p"] * 30)
    successor = LogOwner(one.broker, policy=NEVER, segment_size=3)
    successor.recover("", {T: warm})
    assert (successor.warm, successor.discarded) == (0, 1)
    assert successor.topics == []
    assert successor.notes


def test_a_deleted_topic_is_recovered_cold():
    one, warm = started()
    one.broker.delete_topic(T)
    successor = LogOwner(one.broker, policy=NEVER, segment_size=3)
    successor.recover("", {T: warm})
    assert (successor.warm, successor.discarded, successor.topics) == (0, 1, [])


def test_a_topic_whose_rest_was_trimmed_is_not_continued_over_the_gap():
    one, warm = started()
    one.do("end", 0)
    for _ in range(4):
        one.do("plain", 5)
        one.do("roll", 0)
    one.do("plain", 0)
    one.do("snapshot", 0)
    one.broker.trim(T, one.broker.ledgers(T)[-1].ledger)
    cold, successor = taken_over(one.broker, warm)
    assert (successor.warm, successor.discarded) == (0, 1)
    assert state_of(successor.followed(T)) == state_of(cold.followed(T))


def test_messages_that_do_not_begin_at_the_newer_snapshot_are_not_applied_to_it():
    one, warm = started()
    one.do("plain", 1)
    one.do("snapshot", 0)  # ahead of the standby
    one.do("plain", 1)
    cold, successor = taken_over(one.broker, warm)
    assert (successor.warm, successor.discarded) == (0, 1)
    assert state_of(successor.followed(T)) == state_of(cold.followed(T))


def test_a_tail_continues_only_its_start_and_its_own_messages():
    one, warm = started()
    start = warm.tail.start
    one.do("plain", 2)
    read(warm)
    last = one.broker.last_position(T)
    assert last is not None
    assert [len(batch) for batch in warm.tail.after(start) or ()] == [3]
    assert warm.tail.after(last) == []
    assert warm.tail.after(Position(start.ledger, start.entry - 1)) is None
    assert warm.tail.after(Position(last.ledger, last.entry + 1)) is None


def test_a_snapshot_that_was_fallen_back_from_is_not_kept_warm():
    one, _ = started()
    with one.broker.writer(SNAPSHOT_TOPIC, exclusive=True) as writer:
        writer.append(Batch.of([Message(EntryKey(T, END).to_bytes(), b"damaged")])).result()
    with pytest.raises(Error):
        load(one.broker)
    with contextlib.suppress(Error):
        one.owner.close()
