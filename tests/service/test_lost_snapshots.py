"""An owner that finds topics of its decision log without their snapshots."""

from __future__ import annotations

import pytest
from cluster_app import app_on, cluster_engine
from cut_readers import cut_short
from raw_session import transactional
from service_setup import engine_on, eventually, session_on, visible
from writing import TopicWriter

from bench.log_owner import LogOwner
from broker_io import compacted
from broker_io.errors import ServiceUnavailable
from broker_io.memory import MemoryBroker
from snapshots.errors import SnapshotMissing
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.errors import CoordinatorStopped
from txnbuffer.model import Outcome
from txnbuffer.recovery.restore import holds_transactions


async def commit_half(cluster: MemoryBroker) -> None:
    """Commit a transaction of two topics, and crash before its marker is in one of them."""
    with cluster.connect() as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b")
            await session.write(("a", transactional(ids[:1])), ("b", transactional(ids[:1])))
            engine.topics.get("a").held = True  # as while it is opened: its marker waits
            assert await session.commit(ids[0], ["a", "b"], [1, 1]) is Outcome.COMMIT
            await eventually(lambda: not engine.topics.get("b").followed.buffer.ongoing)
            engine.fail(CoordinatorStopped("as if it had crashed"))


async def test_a_decision_waits_until_the_snapshots_that_were_lost_are_rebuilt():
    with MemoryBroker() as cluster:
        await commit_half(cluster)
        assert visible(cluster, "a") == {}
        cluster.delete_topic(SNAPSHOT_TOPIC)
        for _ in range(2):
            with cluster.connect() as broker:
                async with engine_on(broker) as engine:
                    assert isinstance(engine.topics.get("a").problem, SnapshotMissing)
                    assert isinstance(engine.topics.get("b").problem, SnapshotMissing)
        with cluster.connect() as broker, LogOwner(broker) as manager:
            manager.recover()
            manager.rebuild("a")
            manager.rebuild("b")
        with cluster.connect() as broker:
            async with engine_on(broker) as engine:
                await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert visible(cluster, "a") == visible(cluster, "b") == {b"v": 1}


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_topic_that_was_deleted_is_not_taken_for_one_that_lost_its_snapshot(recreated):
    with MemoryBroker() as cluster:
        await commit_half(cluster)
        cluster.delete_topic(SNAPSHOT_TOPIC)
        cluster.delete_topic("a")
        if recreated:
            cluster.create_topic("a")
        with cluster.connect() as broker:
            async with engine_on(broker) as engine:
                assert engine.topics.get("a") is None
                assert isinstance(engine.topics.get("b").problem, SnapshotMissing)
                await session_on(engine, "a")


async def test_a_slow_cluster_does_not_hide_that_a_snapshot_was_lost():
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            app = await app_on(engine, cluster, "a")
            txn = next(app.ids)
            await app.write("a", [txn])
            assert await app.commit(txn, "a") is Outcome.COMMIT
        cluster.delete_topic(SNAPSHOT_TOPIC)
        with cluster.connect() as broker:
            broker.faults.fail_read(ServiceUnavailable("the cluster is slow"), topic="a")
            async with engine_on(broker, cluster_mode=True) as engine:
                assert broker.faults.reads == []
                await eventually(lambda: isinstance(engine.topics.get("a").problem, SnapshotMissing))
                assert engine.topics.get("a").stopped


def test_a_log_that_was_trimmed_to_its_end_holds_no_transactions(monkeypatch):
    monkeypatch.setattr(compacted, "READ_SECONDS", 0.01)
    monkeypatch.setattr(compacted, "REOPEN_AFTER", 0.01)
    with MemoryBroker() as broker:
        TopicWriter(broker, "a").records(1, "x")
        broker.roll("a")
        broker.trim("a", broker.ledgers("a")[-1].ledger)
        assert not holds_transactions(broker, "a")


def test_silence_does_not_prove_that_a_topic_never_had_transactions(monkeypatch):
    with MemoryBroker() as broker:
        TopicWriter(broker, "a").records(1, "x")
        assert holds_transactions(broker, "a")
        with monkeypatch.context() as silent:
            cut_short(silent, broker, 0, which=lambda _: True)
            with pytest.raises(ServiceUnavailable, match="nothing came"):
                holds_transactions(broker, "a")
