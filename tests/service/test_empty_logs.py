"""A cluster replaces the empty ledger of a topic whenever it loads the topic, so a registered topic has a message."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import pytest
from cluster_app import app_on, cluster_engine
from service_setup import engine_on, eventually, visible

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from snapshots.errors import AppliedPositionTrimmed
from snapshots.scan import scan
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import RegistrationFailed
from txnbuffer.model import Marker, Outcome
from txnbuffer.protocol import MARKER, decode_marker
from txnbuffer.recovery import manager as recovery_manager
from txnbuffer.recovery.codec import TopicState
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.recovery.restore import load, read_snapshot
from txnbuffer.service.cluster.cluster import ClusterTopics


class Cluster(MemoryBroker):
    """Reports ledgers as a cluster does."""

    def connect(self) -> Cluster:
        return Cluster(log=self.log)

    def ledgers(self, topic: str) -> list[Ledger]:
        return [dataclasses.replace(ledger, lasting=ledger.entries > 0) for ledger in super().ledgers(topic)]

    def load(self, topic: str) -> None:
        """Replace the empty ledger by another one."""
        with self.log.changed:
            newest = self._topic(topic).ledgers[-1]
            if not newest.entries:
                newest.number += 10


@pytest.fixture
def cluster():
    with Cluster() as opened:
        yield opened


def messages(broker: MemoryBroker, topic: str) -> list[Message]:
    found: list[Message] = []
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            found += placed.messages
    return found


def epoch_markers(broker: MemoryBroker, topic: str) -> list[Marker]:
    return [decode_marker(message.value) for message in messages(broker, topic) if message.properties.get(MARKER)]


def once_loaded(cluster: Cluster):
    """`_append_if_empty` of a topic whose ledger is replaced just before."""
    append = ClusterTopics._append_if_empty

    def load_and_append(self, name, *arguments, **options):
        cluster.load(name)
        return append(self, name, *arguments, **options)

    return load_and_append


def stored_states(broker: MemoryBroker, topic: str) -> list[TopicState]:
    return [read_snapshot(topic, entries).state for entries in [scan(broker, only=topic).topics[topic]]]


async def test_a_topic_that_is_registered_is_never_empty(cluster):
    async with cluster_engine(cluster) as (engine, _):
        await app_on(engine, cluster, "a")
        (epoch_marker,) = epoch_markers(cluster, "a")
        assert (epoch_marker.coordinator, epoch_marker.epoch, epoch_marker.items) == (0, engine.coordinator.epoch, ())
    cluster.load("a")
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").problem is None
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})
        assert len(epoch_markers(cluster, "a")) == 2  # the second one ends the transaction


async def test_what_was_registered_without_a_message_gets_one_when_a_service_starts(cluster):
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    async with cluster_engine(cluster) as (engine, _):
        await eventually(lambda: len(messages(cluster, "a")) == 1)
        assert engine.topics.get("a").problem is None
    cluster.load("a")
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").problem is None


async def test_a_ledger_that_is_replaced_before_a_service_starts_is_no_loss(cluster):
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").problem is None
        await app_on(engine, cluster, "a")
        assert len(epoch_markers(cluster, "a")) == 1


async def test_a_snapshot_that_applied_nothing_of_a_log_with_records_stays_unusable(cluster):
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        assert isinstance(manager.problems["a"], AppliedPositionTrimmed)


def test_others_than_the_owner_do_not_miss_messages_of_a_ledger_that_was_replaced(cluster: Cluster) -> None:
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    assert load(cluster, "a").first_ledger == cluster.ledgers("a")[0].ledger
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    with pytest.raises(AppliedPositionTrimmed):
        load(cluster, "a")


async def test_a_ledger_that_is_replaced_during_the_registration_is_no_loss(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, _):
        with monkeypatch.context() as context:
            context.setattr(ClusterTopics, "_append_if_empty", once_loaded(cluster))
            app = await app_on(engine, cluster, "a")
        (state,) = stored_states(cluster, "a")
        assert state.origin_ledger == cluster.ledgers("a")[0].ledger
        assert state.buffer.applied is not None
        txn = next(app.ids)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_service_that_ends_between_the_epoch_marker_and_the_first_snapshot_harms_no_topic(
    cluster, monkeypatch, replaced
):
    """A record that an application sends before the next service starts looks as if older ones were trimmed."""
    write = SnapshotManager.write

    def fail_after_the_marker(self, captured):
        if captured and epoch_markers(cluster, "a"):
            raise ServiceUnavailable("the snapshot topic is moving")
        write(self, captured)

    with monkeypatch.context() as context:
        if replaced:
            context.setattr(ClusterTopics, "_append_if_empty", once_loaded(cluster))
        async with cluster_engine(cluster) as (engine, _):
            context.setattr(SnapshotManager, "write", fail_after_the_marker)
            with pytest.raises(RegistrationFailed, match="is moving"):
                await app_on(engine, cluster, "a")
            assert engine.topics.get("a") is None, "a stream would follow it"
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a") is None
        assert visible(cluster, "a") == {b"first": 1}
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"first": 1, b"v": 1})


async def test_a_reader_may_see_the_epoch_marker_before_the_first_snapshot(cluster, monkeypatch):
    cluster.create_topic("a")
    write, seen = SnapshotManager.write, list[int]()

    def read_first(self, captured):
        if captured and epoch_markers(cluster, "a"):
            assert reader.read() is None
            seen.append(len(captured))
        write(self, captured)

    with CommittedReader(cluster, "a") as reader:
        assert reader.read() is None
        async with cluster_engine(cluster) as (engine, _):
            monkeypatch.setattr(SnapshotManager, "write", read_first)
            app = await app_on(engine, cluster, "a")
            monkeypatch.undo()
            txn = next(app.ids)
            await app.write("a", [txn])
            assert await app.commit(txn, "a") is Outcome.COMMIT
            await eventually(lambda: (batch := reader.read()) is not None and batch.messages.values[0] == b"v")
            assert seen == [1]


async def test_a_topic_is_not_registered_before_its_epoch_marker_is_durable(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        broker.faults.fail_append(AppendUnknown("who knows"), topic="a")
        with pytest.raises(RegistrationFailed, match="who knows"):
            await app_on(engine, cluster, "a")
        assert "a" not in engine.coordinator.topics()
        assert engine.topics.get("a") is None
        await app_on(engine, cluster, "a")
        assert len(epoch_markers(cluster, "a")) == 1


async def test_a_recovered_topic_is_not_registered_before_its_epoch_marker_is_durable(cluster):
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    with cluster.connect() as broker:
        for _ in range(2):
            broker.faults.fail_append(AppendUnknown("who knows"), topic="a")
        async with engine_on(broker, cluster_mode=True) as engine:
            await eventually(lambda: len(broker.faults.appends) == 1)  # the service tries it when it starts
            with pytest.raises(RegistrationFailed, match="who knows"):
                await app_on(engine, cluster, "a")
            await app_on(engine, cluster, "a")
            assert len(epoch_markers(cluster, "a")) == 1


@pytest.mark.parametrize("trimmed", [False, True])
async def test_a_topic_that_could_not_be_reached_has_lost_what_was_trimmed(cluster, monkeypatch, trimmed):
    with LogOwner(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    if trimmed:
        with cluster.writer("a") as writer:
            writer.append(Batch.of([Message(None, b"first")])).result()
        cluster.roll("a")
        cluster.trim("a", cluster.ledgers("a")[-1].ledger)
    else:
        cluster.load("a")
    with monkeypatch.context() as unreachable:
        unreachable.setattr(recovery_manager, "restore", Mock(side_effect=ServiceUnavailable("the cluster is away")))
        async with cluster_engine(cluster) as (engine, _):
            assert engine.topics.get("a").missing
            unreachable.undo()
            await eventually(lambda: not engine.topics.get("a").missing and not engine.topics._looked_up)
            assert isinstance(engine.topics.get("a").problem, AppliedPositionTrimmed) == trimmed
            assert len(epoch_markers(cluster, "a")) == (0 if trimmed else 1)


async def test_a_log_that_lasts_gets_none():
    with MemoryBroker() as embedded:
        async with cluster_engine(embedded) as (engine, _):
            await app_on(engine, embedded, "a")
            assert messages(embedded, "a") == []


async def test_a_log_that_has_a_message_gets_none(cluster):
    cluster.create_topic("a")
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    async with cluster_engine(cluster) as (engine, _):
        await app_on(engine, cluster, "a")
        assert epoch_markers(cluster, "a") == []
