"""A standby keeps the topics of its shard warm, and takes over with the state of a recovery from the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cluster_app import App, app_on, cluster_engine
from service_setup import eventually, visible

from bench.log_owner import LogOwner
from broker_io.errors import ServiceUnavailable
from broker_io.memory import MemoryBroker
from txnbuffer.model import Outcome
from txnbuffer.recovery.verify import diff_states
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.standby import takeover, warm_topics
from txnbuffer.service.standby.takeover import Standby

ROOM = 10 * 1024 * 1024


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(takeover, "SLICE", 0.1)
    monkeypatch.setattr(takeover, "READ_SECONDS", 0.02)
    monkeypatch.setattr(takeover, "PAUSE", 0.02)
    monkeypatch.setattr(warm_topics, "STEP", 0.02)
    monkeypatch.setattr(warm_topics, "AGAIN_AFTER", 0.05)
    with MemoryBroker() as opened:
        yield opened


class Waiting:
    """A standby with a connection of its own."""

    def __init__(self, cluster: MemoryBroker, room: int = ROOM) -> None:
        self.cluster = cluster
        self.broker = cluster.connect()
        self.standby = Standby(self.broker, warm_bytes=room)
        self.stop = asyncio.Event()
        self.turn = asyncio.ensure_future(self.standby.wait(self.stop))

    async def has(self, **lag: int) -> None:
        """Wait until the standby reports this lag."""
        await eventually(lambda: lag.items() <= self.standby.topics.lag._asdict().items() or self.turn.done())

    def renewed(self, topic: str, first: object) -> bool:
        """Whether it has restored a topic again."""
        kept = self.standby.topics._kept.get(topic)
        return kept is not None and kept.warm is not first

    def applied(self, topic: str) -> bool:
        """Whether it has applied the whole log of a topic."""
        kept = self.standby.topics._kept.get(topic)
        return kept is not None and kept.warm.followed.at == self.cluster.last_position(topic)


@asynccontextmanager
async def taken_over(waiting: Waiting) -> AsyncIterator[Engine]:
    state = await waiting.turn
    assert state is not None
    async with cluster_engine(waiting.cluster, standby_state=state) as (engine, _):
        yield engine
    waiting.broker.close()


async def commit(app: App, *topics: str, **options: Any) -> None:
    txn = next(app.ids)
    for topic in topics:
        await app.write(topic, [txn], **options)
    assert await app.commit(txn, *topics) is Outcome.COMMIT


def equals_a_recovery(engine: Engine, cluster: MemoryBroker, *topics: str) -> None:
    """Assert that buffers equal those of another recovery, which ends the engine."""
    mine = {topic: engine.topics.manager.followed(topic) for topic in topics}
    other = LogOwner(cluster)
    other.recover()
    for topic, followed in mine.items():
        expected = other.followed(topic)
        followed.sequence_all()
        assert followed.at == expected.at
        assert diff_states(followed.buffer, expected.buffer) == []
        assert followed.numbered.next_seqno == expected.numbered.next_seqno
        assert followed.failover == expected.failover


async def take_over(waiting: Waiting, active: Engine, *, warm: int) -> None:
    """Let the standby take over topic a, and assert how many topics were warm, and that all equals a recovery."""
    async with taken_over(waiting) as engine:
        assert engine.topics.manager.warm == warm
        equals_a_recovery(engine, waiting.cluster, "a")
        engine.fail(ServiceUnavailable("another owner has recovered"))
    active.fail(ServiceUnavailable("its process is gone"))


async def test_all_topics_are_warm_at_a_takeover(cluster):
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a", "b")
        await commit(app, "a", "b")
        waiting = Waiting(cluster)
        await waiting.has(topics=2, warm=2, no_room=0)
        await app.session.register("c")  # registered while it stands by
        await commit(app, "a", "c")
        await waiting.has(topics=3, warm=3)
        open_one = next(app.ids)
        await app.write("b", [open_one])
        await eventually(lambda: all(map(waiting.applied, "abc")))
        its.close()
        async with taken_over(waiting) as engine:
            assert (engine.topics.manager.warm, engine.topics.manager.discarded) == (3, 0)
            assert engine.topics.manager.buffer("b").ongoing.oldest() is not None
            await eventually(lambda: visible(cluster, "a") == {b"v": 2})
            equals_a_recovery(engine, cluster, "a", "b", "c")
            engine.fail(ServiceUnavailable("another owner has recovered"))
        active.fail(ServiceUnavailable("its process is gone"))


async def test_it_writes_to_no_topic(cluster):
    async with cluster_engine(cluster) as (active, _):
        app = await app_on(active, cluster, "a")
        await commit(app, "a")
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})
        waiting = Waiting(cluster)
        opened, writer = [], waiting.broker.writer

        def recorded(topic, **options):
            opened.append((topic, options))
            return writer(topic, **options)

        waiting.broker.writer = recorded
        await waiting.has(warm=1)
        await commit(app, "a")
        await eventually(lambda: waiting.applied("a"))
        waiting.stop.set()
        assert await waiting.turn is None
        assert {topic for topic, _ in opened} == {"__txnbuffer_decisions"}
        assert all(options["wait"] is not None for _, options in opened)  # which fences nobody
        await commit(app, "a")
        waiting.broker.close()


async def test_topics_without_room_are_recovered_from_the_log(cluster):
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a", "b")
        await commit(app, "a", "b")
        waiting = Waiting(cluster, 1)
        await waiting.has(topics=2, warm=0)
        its.close()
        async with taken_over(waiting) as engine:
            assert (engine.topics.manager.warm, engine.topics.manager.topics) == (0, ["a", "b"])
            engine.fail(ServiceUnavailable("the test has ended"))
        active.fail(ServiceUnavailable("its process is gone"))


async def test_a_topic_with_a_newer_snapshot_is_restored_from_it(cluster, monkeypatch):
    monkeypatch.setattr(warm_topics, "RENEW_AFTER", 0.0)
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a")
        waiting = Waiting(cluster)
        await waiting.has(warm=1)
        first = waiting.standby.topics._kept["a"].warm
        await commit(app, "a")
        await commit(app, "a")
        await active.snapshots.snapshot(["a"])
        await eventually(lambda: waiting.renewed("a", first))
        await commit(app, "a")
        await eventually(lambda: waiting.applied("a"))
        assert waiting.standby.topics.lag.restarted == 0
        its.close()
        await take_over(waiting, active, warm=1)


async def test_a_topic_that_is_created_again_is_followed_again(cluster):
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a")
        await commit(app, "a")
        waiting = Waiting(cluster)
        await waiting.has(warm=1)
        cluster.delete_topic("a")
        await eventually(lambda: waiting.standby.topics.lag.restarted > 0)
        app.forget_writers()
        while "a" not in cluster.log.topics:  # a service creates it once it has seen that it is gone
            await app.session.register("a")
            await asyncio.sleep(0.005)
        await commit(app, "a")
        await waiting.has(warm=1)
        await eventually(lambda: waiting.applied("a"))
        its.close()
        await take_over(waiting, active, warm=1)


async def test_what_was_read_and_not_applied_makes_no_topic_warm(cluster):
    """Its reader would continue after the messages that the buffer lacks."""
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a")
        await commit(app, "a")
        waiting = Waiting(cluster)
        await waiting.has(warm=1)
        kept = waiting.standby.topics._kept["a"]
        kept.reader.paused += 1
        await commit(app, "a")
        await eventually(lambda: kept.reader.at == cluster.last_position("a"))
        its.close()
        await asyncio.wait([waiting.turn])
        await app.write("a", [next(app.ids)])  # which the reader would return next
        await take_over(waiting, active, warm=0)
