"""Snapshots rebuilt from logs: folded in any process, and equal to a fold by the owner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_world import Life, records_of
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.errors import TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from snapshots.errors import SnapshotMissing
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.scan import scan
from snapshots.writer import SnapshotWriter, acquire, commit
from txnbuffer.buffer.state import Items
from txnbuffer.recovery import rebuild
from txnbuffer.recovery.codec import decode_state, encode_state
from txnbuffer.recovery.rebuild import compare, fold_log, write
from txnbuffer.recovery.restore import LoadedTopic, read_snapshot
from txnbuffer.recovery.verify import Level, verify


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.booleans())
def test_a_rebuilt_snapshot_equals_the_log(seed: int, lost: bool) -> None:
    with MemoryBroker() as broker:
        with LogOwner(broker, segment_size=3) as manager:
            manager.recover()
            for topic in ("orders", "stock"):
                Life(broker, manager, topic, seed).run(40)
        before = {topic: records_of(broker, topic) for topic in ("orders", "stock")}
        if lost:
            broker.delete_topic(SNAPSHOT_TOPIC)
        found = [fold_log(broker, topic) for topic in before]
        for one in found:
            assert (one.problem == "") != lost
            assert one.differences == ()
            assert one.visible_records == len(before[one.topic])
            assert one.sound == (not lost or not one.transactional)
        ownership, table = acquire(broker)
        with ownership:
            for one in found:
                write(broker, ownership, table, one, now_ms=1)
        assert [finding for finding in verify(broker) if finding.level is Level.ERROR] == []
        assert {topic: records_of(broker, topic) for topic in before} == before
        with LogOwner(broker) as manager:
            manager.recover()
            assert manager.problems == {}
            assert manager.topics == [*before]
            for one in found:
                assert len(manager.buffer(one.topic).aborted) == one.aborts
                assert manager.followed(one.topic).numbered.next_seqno - 1 == one.visible_records


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_appended_meanwhile_is_no_difference(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with MemoryBroker() as broker, LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        life = Life(broker, manager, "orders", 1)
        life.run(40)
        original = rebuild.from_snapshot

        def busy(broker: Broker, topic: str) -> tuple[LoadedTopic | None, str]:
            if when == "before":
                life.run(20)
            found = original(broker, topic)
            if when == "after":
                life.run(20)
            return found

        monkeypatch.setattr(rebuild, "from_snapshot", busy)
        assert compare(broker, "orders")[2] == []
        assert fold_log(broker, "orders").differences == ()


def test_wrong_contents_of_a_snapshot_are_reported() -> None:
    with MemoryBroker() as broker:
        with LogOwner(broker, segment_size=3) as manager:
            manager.recover()
            Life(broker, manager, "orders", 1).run(40)
        right = fold_log(broker, "orders")
        assert right.sound
        assert right.aborts
        state = decode_state(right.state)
        forgetful = replace(state, buffer=replace(state.buffer, unsealed=Items.of()))  # the newest aborts are lost
        wrong = replace(right, state=encode_state(forgetful))
        with acquire(broker)[0] as ownership:
            write(broker, ownership, scan(broker), wrong, now_ms=1)
        assert "aborted, only in the second" in str(fold_log(broker, "orders").differences)


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_a_sound_snapshot_of_a_trimmed_log_is_not_wrong(seed: int) -> None:
    with MemoryBroker() as broker, LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        life = Life(broker, manager, "orders", seed)
        origin = broker.ledgers("orders")[0].ledger
        life.run(60)
        manager.pump()
        manager.snapshot("orders")
        manager.trim("orders", broker.ledgers("orders")[-1].ledger)
        life.run(20)
        manager.pump()
        found = fold_log(broker, "orders")
        assert found.problem == ""
        assert found.differences == ()
        assert compare(broker, "orders")[2] == []
        gone = broker.ledgers("orders")[0].ledger > origin
        assert found.trimmed == gone
        assert found.transactional or not gone
        assert compare(broker, "orders")[3] == gone


def test_a_snapshot_of_a_trimmed_log_that_lacks_an_abort_is_wrong() -> None:
    with MemoryBroker() as broker:
        with LogOwner(broker, segment_size=100) as manager:
            manager.recover()
            manager.register("orders")
            log = TopicWriter(broker, "orders")
            log.records(1, "gone")
            log.abort(1)
            broker.roll("orders")
            log.records(2, "aborted", "too")
            log.abort(2)
            log.plain("visible")
            manager.pump()
            manager.snapshot("orders")
            (left,) = broker.ledgers("orders")[1:]
            assert manager.trim("orders", left.ledger) == left.ledger
        assert fold_log(broker, "orders").sound
        with acquire(broker)[0] as ownership:
            entries = scan(broker).topics["orders"]
            state = read_snapshot("orders", entries).state
            writer = SnapshotWriter("orders", broker.incarnation("orders"))
            writer.found(entries)
            forgetful = replace(state, buffer=replace(state.buffer, unsealed=Items.of()))
            commit(ownership, [(writer, writer.plan(ownership.epoch, encode_state(forgetful)))])
        found = fold_log(broker, "orders")
        assert found.differences == (f"shown, and hidden by the log: 2 records, such as {left.ledger}:0",)
        assert compare(broker, "orders")[2:] == ([*found.differences], True)


def test_a_recreated_topic_gets_no_snapshot_of_the_old_one() -> None:
    with MemoryBroker() as broker:
        broker.create_topic("orders")
        found = fold_log(broker, "orders")
        broker.delete_topic("orders")
        broker.create_topic("orders")
        ownership, table = acquire(broker)
        with ownership, pytest.raises(TopicNotFound, match="deleted and re-created"):
            write(broker, ownership, table, found, now_ms=1)


def test_a_log_without_transactions_needs_no_snapshot() -> None:
    with MemoryBroker() as broker:
        broker.create_topic("plain")
        found = fold_log(broker, "plain")
        assert (found.transactional, found.sound, found.problem) == (False, True, "the topic has no snapshot")


def test_a_lost_snapshot_is_no_sound_one() -> None:
    with MemoryBroker() as broker:
        with LogOwner(broker) as manager:
            manager.recover()
            life = Life(broker, manager, "orders", 1)
            while not fold_log(broker, "orders").transactional:
                life.run(5)
        broker.delete_topic(SNAPSHOT_TOPIC)
        assert not fold_log(broker, "orders").sound
        with pytest.raises(SnapshotMissing):
            records_of(broker, "orders")
