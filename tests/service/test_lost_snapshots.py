"""An owner that finds topics of its decision log without their snapshots."""

from __future__ import annotations

import pytest
from raw_session import transactional
from service_setup import engine_on, eventually, on_a_loop, session_on, visible

from broker_io.memory import MemoryBroker
from snapshots.errors import SnapshotMissing
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.errors import CoordinatorStopped
from txnbuffer.model import Outcome
from txnbuffer.recovery.manager import SnapshotManager


async def commit_half(cluster: MemoryBroker) -> None:
    """Commit a transaction of two topics, and crash before its marker is in one of them."""
    with cluster.connect() as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, "a", "b")
            await session.write(("a", transactional(ids[:1])), ("b", transactional(ids[:1])))
            broker.faults.hold(topic="a", written=False)
            assert await session.commit(ids[0], ["a", "b"], [1, 1]) is Outcome.COMMIT
            await eventually(lambda: not engine.topics.get("b").followed.buffer.ongoing)
            engine.fail(CoordinatorStopped("as if it had crashed"))


@on_a_loop
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
        with cluster.connect() as broker, SnapshotManager(broker) as manager:
            manager.recover()
            manager.rebuild("a")
            manager.rebuild("b")
        with cluster.connect() as broker:
            async with engine_on(broker) as engine:
                await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert visible(cluster, "a") == visible(cluster, "b") == {b"v": 1}


@pytest.mark.parametrize("recreated", [False, True])
@on_a_loop
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
