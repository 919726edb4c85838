"""Topics of a cluster that are deleted, stop, or have unsafe policies while a service runs."""

from __future__ import annotations

import pytest
from cluster_app import App, app_on, cluster_engine
from service_setup import engine_on, eventually, visible

from broker_io.errors import PositionTrimmed, TopicNotFound, UnsafePolicy
from broker_io.memory import MemoryBroker
from txnbuffer.config import RetentionConfig
from txnbuffer.coordinator.messages import Commit
from txnbuffer.errors import NotVisible
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import exposition, metrics


@pytest.fixture
def cluster():
    with MemoryBroker() as opened:
        yield opened


async def test_a_deleted_topic_is_recreated_when_it_is_registered_again(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        first = next(app.ids)
        await app.write("a", [first], b"old")
        assert await app.commit(first, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"old": 1})
        cluster.delete_topic("a")
        await eventually(lambda: isinstance(engine.topics.get("a").problem, TopicNotFound))
        await app.session.register("a")
        again = App(cluster, app.session, await app.session.lease(10))
        second = next(again.ids)
        await again.write("a", [second], b"new")
        assert await again.commit(second, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"new": 1})
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a").obstacle is None
        assert visible(cluster, "a") == {b"new": 1}


async def test_a_commit_that_waits_for_a_stopped_topic_is_answered_so(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        early, late = next(app.ids), next(app.ids)
        for txn in (early, late):
            await app.write("a", [txn])
            await app.write("b", [txn])
        await eventually(lambda: engine.topics.get("b").followed.buffer.ongoing)
        broker.faults.hold(topic="b", written=False)

        def commit(request: int, txn: int) -> None:
            plan = Commit(request, TxnId(0, txn), ("a", "b"), (1, 1), True)
            app.session.link.send(ClientFrame(commits=(plan,)))

        commit(1000, early)
        await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing.get(TxnId(0, early)))
        reader = engine.topics.get("b").reader
        engine.topics.readers.leave(reader)
        reader.fail(PositionTrimmed("its beginning is gone"))
        commit(1001, late)
        await app.session.until(lambda: {1000, 1001} <= app.session.answers.keys())
        for request in (1000, 1001):
            assert isinstance(app.session.answers[request], NotVisible)
            assert "'b': it has stopped (its beginning is gone" in str(app.session.answers[request])
        broker.faults.release()


class Watched(MemoryBroker):
    """An operator sets a policy that may drop messages."""

    danger: str | None = None

    def check_topic(self, topic: str) -> None:
        if topic == self.danger:
            raise UnsafePolicy(f"topic {topic!r} is dropped after a second")


async def test_a_policy_that_is_set_later_is_reported_while_it_lasts():
    with Watched() as broker:
        async with engine_on(broker, cluster_mode=True, retention=RetentionConfig(check_seconds=0.05)) as engine:
            await app_on(engine, broker, "a")
            broker.danger = "a"
            await eventually(lambda: list(engine.policy_checks.dangers) == ["a"])
            (told,) = await ServiceAdmin(engine).list_topics({})
            assert "after a second" in told["problem"]
            assert list((await ServiceAdmin(engine).status({}))["policy_problems"]) == ["a"]
            assert b"topics_endangered 1" in exposition(metrics(engine))
            broker.danger = None
            await eventually(lambda: not engine.policy_checks.dangers)
            assert not engine.ended.done()
