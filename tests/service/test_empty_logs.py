"""A cluster replaces the empty ledger of a topic whenever it loads the topic, so a registered topic has a message."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from cluster_app import app_on
from service_setup import eventually, on_a_loop, visible

from broker_io.batch import Batch, Message
from broker_io.errors import AppendUnknown
from broker_io.memory import MemoryBroker
from broker_io.port import Ledger
from snapshots.errors import AppliedPositionTrimmed
from snapshots.scan import scan
from tests.cluster_app import cluster_engine
from txnbuffer.errors import RegistrationFailed
from txnbuffer.model import Marker, Outcome
from txnbuffer.protocol import MARKER, decode_marker
from txnbuffer.recovery.codec import TopicState
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.recovery.restore import load, read_snapshot
from txnbuffer.service.cluster import ClusterTopics


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
            if not newest.describe().entries:
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

    def load_and_append(self, followed, epoch_marker, new):
        cluster.load(followed.topic)
        return append(self, followed, epoch_marker, new)

    return load_and_append


def stored_states(broker: MemoryBroker, topic: str) -> list[TopicState]:
    return [read_snapshot(topic, entries).state for entries in [scan(broker, only=topic).topics[topic]]]


@on_a_loop
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


@on_a_loop
async def test_what_was_registered_without_a_message_gets_one_when_a_service_starts(cluster):
    with SnapshotManager(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    async with cluster_engine(cluster) as (engine, _):
        await eventually(lambda: len(messages(cluster, "a")) == 1)
        assert engine.topics.get("a").problem is None
    cluster.load("a")
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").problem is None


@on_a_loop
async def test_a_ledger_that_is_replaced_before_a_service_starts_is_no_loss(cluster):
    with SnapshotManager(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").problem is None
        await app_on(engine, cluster, "a")
        assert len(epoch_markers(cluster, "a")) == 1


@on_a_loop
async def test_a_snapshot_that_applied_nothing_of_a_log_with_records_stays_unusable(cluster):
    with SnapshotManager(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    with SnapshotManager(cluster.connect()) as manager:
        manager.recover()
        assert isinstance(manager.problems["a"], AppliedPositionTrimmed)


def test_others_than_the_owner_do_not_miss_messages_of_a_ledger_that_was_replaced(cluster: Cluster) -> None:
    with SnapshotManager(cluster.connect()) as manager:
        manager.recover()
        manager.register("a")
    cluster.load("a")
    assert load(cluster, "a").first_ledger == cluster.ledgers("a")[0].ledger
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    with pytest.raises(AppliedPositionTrimmed):
        load(cluster, "a")


@on_a_loop
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


@on_a_loop
async def test_a_cursor_that_is_added_during_the_registration_is_kept(cluster, monkeypatch):
    """The registration follows the topic again once its ledger was replaced."""
    append, go = once_loaded(cluster), threading.Event()

    def append_later(self, followed, epoch_marker, new):
        go.wait(30)
        return append(self, followed, epoch_marker, new)

    async with cluster_engine(cluster) as (engine, _):
        monkeypatch.setattr(ClusterTopics, "_append_if_empty", append_later)
        opening = asyncio.create_task(app_on(engine, cluster, "a"))
        await eventually(lambda: (topic := engine.topics.get("a")) is not None and topic.followed is not None)
        async with engine.topics.snapshot_lock:
            go.set()
            await eventually(lambda: epoch_markers(cluster, "a"))
            await asyncio.sleep(0.1)
            adding = asyncio.create_task(engine.cursors.add("a", "mine", "beginning"))
            await asyncio.sleep(0.1)
        assert await adding == 0
        await opening
        assert engine.topics.get("a").followed.cursors == {"mine": 0}


@on_a_loop
async def test_a_topic_is_not_registered_before_its_epoch_marker_is_durable(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        broker.faults.fail_append(AppendUnknown("who knows"), topic="a")
        with pytest.raises(RegistrationFailed, match="who knows"):
            await app_on(engine, cluster, "a")
        assert "a" not in engine.coordinator.topics()
        await app_on(engine, cluster, "a")
        assert len(epoch_markers(cluster, "a")) == 1


@on_a_loop
async def test_a_log_that_lasts_gets_none():
    with MemoryBroker() as embedded:
        async with cluster_engine(embedded) as (engine, _):
            await app_on(engine, embedded, "a")
            assert messages(embedded, "a") == []


@on_a_loop
async def test_a_log_that_has_a_message_gets_none(cluster):
    cluster.create_topic("a")
    with cluster.writer("a") as writer:
        writer.append(Batch.of([Message(None, b"first")])).result()
    async with cluster_engine(cluster) as (engine, _):
        await app_on(engine, cluster, "a")
        assert epoch_markers(cluster, "a") == []
