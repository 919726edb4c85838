"""Topics of a cluster that a new owner can't recover: the others continue, and so do they once the problem passes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from cluster_app import App, app_on, cluster_engine
from raw_session import InProcess, RawSession
from service_setup import engine_on, eventually, visible

from broker_io.errors import Damaged, Error, ServiceUnavailable
from broker_io.memory import MemoryBroker
from snapshots.errors import TopicDamaged
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import CoordinatorStopped, InvalidConfiguration, RegistrationFailed, UnregisteredTopic
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import metrics

AWAY = ServiceUnavailable("the cluster does not answer for it")
DAMAGED = Damaged("ledger 7", 0, "it can't be read")


@pytest.fixture
def cluster():
    with MemoryBroker() as opened:
        yield opened


async def test_an_admin_interface_of_another_cluster_is_refused(cluster):
    with MemoryBroker() as other, cluster.connect() as broker:
        other.create_topic(DECISIONS)
        with (
            patch.object(broker, "ledgers", other.ledgers),
            pytest.raises(InvalidConfiguration, match="belong to the same cluster"),
        ):
            await Engine.start(broker, cluster_mode=True)
    async with cluster_engine(cluster) as (engine, _):
        await app_on(engine, cluster, "a")


async def decide_half(cluster: MemoryBroker) -> tuple[App, int]:
    """Commit a transaction of a and b, and crash before its marker is in a; another transaction is open on b."""
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        txn, left = next(app.ids), next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [txn])
        await app.write("b", [left], b"left")
        with cluster.writer("a", exclusive=True):  # no marker can be written
            assert await app.commit(txn, "a", "b") is Outcome.COMMIT
            await eventually(lambda: visible(cluster, "b") == {b"v": 1})
            engine.fail(CoordinatorStopped("as if it had crashed"))
    app.forget_writers()
    return app, left


@asynccontextmanager
async def successor(cluster: MemoryBroker, error: Callable[[], Error | None]) -> AsyncIterator[Engine]:
    """The next owner; queries of topic a fail with `error`."""
    with cluster.connect() as broker:
        ledgers = broker.ledgers

        def asked(name):
            if name == "a" and (found := error()) is not None:
                raise found
            return ledgers(name)

        with patch.object(broker, "ledgers", asked):
            async with engine_on(broker, cluster_mode=True) as engine:
                yield engine


async def come_again(app: App, engine: Engine, left: int) -> None:
    again = RawSession(InProcess(engine))
    await again.hello(app.session.session, [TxnId(0, left)])
    app.session = again
    app.ids = iter(await again.lease(100))


async def test_a_topic_that_the_cluster_did_not_answer_for_once_continues(cluster):
    app, left = await decide_half(cluster)
    answers = iter([AWAY])
    async with successor(cluster, lambda: next(answers, None)) as engine:
        assert engine.topics.get("a").problem is AWAY
        await come_again(app, engine, left)
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})
        await eventually(lambda: "a" in engine.coordinator.topics())
        assert engine.topics.get("a").obstacle is None
        later = next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [later], b"later")
        assert await app.commit(later, "a", "b") is Outcome.COMMIT
        assert await app.commit(left, "b") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 1, b"later": 1})
        await eventually(lambda: visible(cluster, "b") == {b"v": 1, b"left": 1, b"later": 1})
        await eventually(lambda: not list(engine.coordinator.transactions()))
        assert engine.effects.damaged == 0


async def test_a_client_that_comes_again_does_not_wait_for_a_topic_that_is_away(cluster):
    app, left = await decide_half(cluster)
    answers: list[Error | None] = [AWAY]
    async with successor(cluster, lambda: answers[0]) as engine:
        await come_again(app, engine, left)
        assert await app.commit(left, "b") is Outcome.COMMIT
        refused = next(app.ids)
        assert isinstance(await app.commit(refused, "a"), UnregisteredTopic)
        with pytest.raises(RegistrationFailed, match="topic 'a' could not be registered: the cluster does not answer"):
            await app.session.register("a")
        await eventually(lambda: engine.topics.get("a").problem is AWAY)
        assert visible(cluster, "a") == {}
        answers[0] = None
        await app.session.register("a")
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})


async def test_what_is_tried_again_shows_as_that_and_what_has_stopped_as_that(cluster):
    await decide_half(cluster)
    answers: list[Error | None] = [AWAY]
    async with successor(cluster, lambda: answers[0]) as engine:

        def told() -> dict[str, float]:
            found = {metric.name: metric.value for metric in metrics(engine)}
            return {name: found[name] for name in ("topics_retrying", "topics_stopped")}

        await eventually(lambda: told() == {"topics_retrying": 1, "topics_stopped": 0})
        waits_for = await ServiceAdmin(engine)._waits_for(engine.topics.get("a"))
        assert "is retried: the cluster does not answer" in waits_for
        answers[0] = DAMAGED
        await eventually(lambda: told() == {"topics_retrying": 0, "topics_stopped": 1})


@pytest.mark.parametrize("first", [AWAY, DAMAGED], ids=["later", "at once"])
async def test_what_will_not_pass_stops_that_topic_alone(cluster, first):
    app, left = await decide_half(cluster)
    answers = iter([first])
    async with successor(cluster, lambda: next(answers, DAMAGED)) as engine:
        await eventually(lambda: isinstance(engine.topics.get("a").problem, TopicDamaged))
        await come_again(app, engine, left)
        assert await app.commit(left, "b") is Outcome.COMMIT
        with pytest.raises(Damaged, match="ledger 7"):
            await app.session.register("a")
        await eventually(lambda: visible(cluster, "b") == {b"v": 1, b"left": 1})
