"""Snapshots and decision logs are read by the rules for the end of a log, which `end_rules` tests."""

from __future__ import annotations

import pytest
from cut_readers import cut_short
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io.batch import Batch
from broker_io.memory import MemoryBroker
from broker_io.memory.broker import MemoryReader
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.scan import scan
from snapshots.shards import ONLY
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import Lease, Owner, encode
from txnbuffer.recovery.decision_log import read_decisions
from txnbuffer.recovery.restore import load


def test_a_dead_reader_hides_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register("orders")
        log = TopicWriter(broker, "orders")
        log.records(1, "x")
        log.abort(1)
        manager.pump()
        manager.snapshot("orders")
        honest = MemoryReader.read
        silent: list[MemoryReader] = []

        def read(self: MemoryReader, **options: float) -> object:
            # The first reader returns nothing, as a reader of Pulsar may that lost its broker.
            if not silent:
                silent.append(self)
            return None if self is silent[0] else honest(self, **options)  # type: ignore[arg-type]  # as they come

        monkeypatch.setattr(MemoryReader, "read", read)
        assert scan(broker, SNAPSHOT_TOPIC).topics["orders"].end is not None
        silent.clear()
        assert load(broker, "orders").registered


class ClusterBroker(MemoryBroker):
    """A broker that looks like a cluster, whose brokers may be slow."""

    def check_topic(self, topic: str) -> None:
        pass


def registered(broker: MemoryBroker, *topics: str) -> None:
    with LogOwner(broker) as manager:
        manager.recover()
        for topic in topics:
            manager.register(topic)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_what_a_slow_broker_keeps_back_is_read_from_the_log(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    """Otherwise a topic with a snapshot would look like one that never had transactions."""
    with ClusterBroker() as broker:
        registered(broker, "orders", "payments")
        whole = scan(broker, SNAPSHOT_TOPIC).topics
        cut_short(monkeypatch, broker, given)
        assert scan(broker, SNAPSHOT_TOPIC).topics == whole
        assert load(broker, "payments").registered


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_reset_decision_log_continues_above_all_its_ids_and_epochs(
    monkeypatch: pytest.MonkeyPatch, given: int
) -> None:
    with ClusterBroker() as broker:
        broker.create_topic(DECISIONS)
        with broker.writer(DECISIONS) as writer:
            entries = [Owner(7, "a"), Lease(1, 100, "s", 0), Lease(101, 100, "s", 0)]
            writer.append(Batch.of([encode(entry) for entry in entries])).result()
        cut_short(monkeypatch, broker, given)
        found = read_decisions(broker, ONLY)
        assert (found.history.epoch, sorted(found.history.leases), found.lost) == (7, [1, 101], None)
