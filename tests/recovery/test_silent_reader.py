"""A reader that falls silent before the end proves nothing: another one is asked before anything is concluded."""

from __future__ import annotations

import pytest
from cut_readers import cut_short
from writing import TopicWriter

from broker_io.batch import Batch
from broker_io.errors import ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.memory.handles import MemoryReader
from snapshots.keys import SNAPSHOT_TOPIC
from snapshots.scan import scan
from snapshots.shards import ONLY
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import Lease, Owner, encode
from txnbuffer.recovery.decision_log import read_decisions
from txnbuffer.recovery.load import load
from txnbuffer.recovery.manager import SnapshotManager


def test_a_dead_reader_hides_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker, SnapshotManager(broker) as keeper:
        keeper.recover()
        keeper.register("orders")
        log = TopicWriter(broker, "orders")
        log.records(1, "x")
        log.abort(1)
        keeper.pump()
        keeper.snapshot("orders")
        honest = MemoryReader.read
        silent: list[MemoryReader] = []

        def read(self: MemoryReader, **options: float) -> object:
            # The first reader says nothing, as one of Pulsar may that lost its broker.
            if not silent:
                silent.append(self)
            return None if self is silent[0] else honest(self, **options)  # type: ignore[arg-type]  # as they come

        monkeypatch.setattr(MemoryReader, "read", read)
        assert scan(broker, SNAPSHOT_TOPIC).topics["orders"].end is not None
        silent.clear()
        assert load(broker, "orders").registered


class ClusterBroker(MemoryBroker):
    """Passes for a cluster, whose brokers may be slow."""

    def check_topic(self, topic: str) -> None:
        pass


def registered(broker: MemoryBroker, *topics: str) -> None:
    with SnapshotManager(broker) as keeper:
        keeper.recover()
        for topic in topics:
            keeper.register(topic)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_what_a_slow_broker_keeps_back_is_read_from_the_log(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    """Else a topic with a snapshot would pass for one that never had transactions."""
    with ClusterBroker() as broker:
        registered(broker, "orders", "payments")
        whole = scan(broker, SNAPSHOT_TOPIC).topics
        cut_short(monkeypatch, broker, given)
        assert scan(broker, SNAPSHOT_TOPIC).topics == whole
        assert load(broker, "payments").registered


def test_who_gets_nothing_of_what_is_there_is_told_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ClusterBroker() as broker:
        registered(broker, "orders")
        cut_short(monkeypatch, broker, 1, which=lambda _: True)
        with pytest.raises(ServiceUnavailable, match=r"nothing came after .* try again"):
            load(broker, "orders")


def test_what_was_trimmed_comes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with ClusterBroker(ledger_entries=1) as broker:
        registered(broker, "orders")
        end = broker.last_position(SNAPSHOT_TOPIC)
        assert end is not None
        broker.roll(SNAPSHOT_TOPIC)
        broker.trim(SNAPSHOT_TOPIC, end.ledger + 1)
        cut_short(monkeypatch, broker, 0, which=lambda _: True)
        assert not scan(broker, SNAPSHOT_TOPIC).topics


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_decision_log_is_begun_anew_above_all_that_it_says(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    with ClusterBroker() as broker:
        broker.create_topic(DECISIONS)
        with broker.writer(DECISIONS) as writer:
            entries = [Owner(7, "a"), Lease(1, 100, "s", 0), Lease(101, 100, "s", 0)]
            writer.append(Batch.of([encode(entry) for entry in entries])).result()
        cut_short(monkeypatch, broker, given)
        found = read_decisions(broker, ONLY)
        assert (found.history.epoch, sorted(found.history.leases), found.lost) == (7, [1, 101], None)
