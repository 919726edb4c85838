"""Topics that are deleted on a cluster and re-created by applications that keep writing: nothing waits for ever."""

from __future__ import annotations

import pytest
from cluster_app import app_on, cluster_engine
from raw_session import InProcess, RawSession
from service_setup import eventually, visible

from broker_io.errors import ServiceUnavailable, TopicNotFound, UnsafePolicy
from broker_io.memory import MemoryBroker
from txnbuffer.coordinator.messages import Commit, State
from txnbuffer.errors import CoordinatorStopped, NotVisible, RegistrationFailed, UnregisteredTopic
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.verify import verify
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.engine.engine import Engine

WAITING = 1000
"""The number of a waiting request."""


@pytest.fixture
def cluster():
    with MemoryBroker() as opened:
        yield opened


def recreate(cluster: MemoryBroker, name: str) -> None:
    """Delete and create a topic at once, so that nobody sees it missing."""
    with cluster.log.changed:
        cluster.delete_topic(name)
        cluster.create_topic(name)


def ask_visible(app, txn: int, *topics: str) -> None:
    commit = Commit(WAITING, TxnId(0, txn), topics, (1,) * len(topics), True)
    app.session.link.send(ClientFrame(commits=(commit,)))


async def answer(app):
    await app.session.until(lambda: WAITING in app.session.answers)
    return app.session.answers.pop(WAITING)


async def followed_again(engine: Engine, cluster: MemoryBroker, name: str) -> None:
    def followed() -> bool:
        followed = engine.topics.get(name).followed
        return followed is not None and followed.writer.incarnation == cluster.incarnation(name)

    await eventually(followed)
    await eventually(lambda: name in engine.coordinator.topics())


async def noticed(engine: Engine, name: str) -> None:
    await eventually(lambda: isinstance(engine.topics.get(name).problem, TopicNotFound))


async def test_a_recreated_topic_is_registered_again_without_a_request(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        old, new = next(app.ids), next(app.ids)
        await app.write("a", [old], b"old")
        assert await app.commit(old, "a") is Outcome.COMMIT
        recreate(cluster, "a")
        await followed_again(engine, cluster, "a")
        app.forget_writers()
        await app.write("a", [new], b"new")
        ask_visible(app, new, "a")
        assert await answer(app) is Outcome.COMMIT
        assert visible(cluster, "a") == {b"new": 1}
        assert engine.topics.get("a").obstacle is None


async def test_a_topic_recreated_with_partitions_is_no_longer_reported(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        old, new = next(app.ids), next(app.ids)
        await app.write("a", [old], b"old")
        assert await app.commit(old, "a") is Outcome.COMMIT
        with cluster.log.changed:
            cluster.delete_topic("a")
            cluster.partition("a", 2)
        await eventually(lambda: engine.topics.get("a") is None)
        assert "a" not in engine.coordinator.topics()
        await app.session.register("a-partition-1")
        await app.write("a-partition-1", [new], b"new")
        ask_visible(app, new, "a-partition-1")
        assert await answer(app) is Outcome.COMMIT
        assert visible(cluster, "a") == {b"new": 1}
        with pytest.raises(RegistrationFailed, match="such as 'a-partition-0'"):
            await app.session.register("a")
        with cluster.log.changed:  # all of it is deleted, but an application with an open partition re-creates that one
            cluster.log.partitions.clear()
            recreate(cluster, "a-partition-1")
        await eventually(lambda: engine.topics.get("a-partition-1") is None)
    async with cluster_engine(cluster) as (engine, _):
        assert engine.topics.get("a") is None
    assert [(found.topic, found.level) for found in verify(cluster)] == []


async def test_who_waits_hears_of_a_marker_that_was_read_when_the_topic_was_registered_again(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        reader = engine.topics.get("a").reader
        reader.paused += 1  # it has not read the log yet
        recreate(cluster, "a")
        await app.write("a", [txn])
        ask_visible(app, txn, "a")
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, txn)) is not None)
        transaction = engine.coordinator.transaction(TxnId(0, txn))
        await eventually(lambda: transaction.state is State.COMMITTED and not transaction.unfinished)
        assert WAITING not in app.session.answers
        reader.paused -= 1
        engine.topics.readers.wake()
        assert await answer(app) is Outcome.COMMIT
        assert visible(cluster, "a") == {b"v": 1}
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, txn)) is None)


async def test_what_was_committed_to_the_new_topic_before_it_was_noticed_becomes_visible(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        txn = next(app.ids)
        engine.topics.get("a").reader.paused += 1
        recreate(cluster, "a")
        await app.write("a", [txn])
        with cluster.writer("a", exclusive=True):  # no marker can be written
            ask_visible(app, txn, "a")
            await eventually(lambda: engine.topics.get("a").write_problem is not None)
            engine.topics.get("a").reader.paused -= 1
            engine.topics.readers.wake()
            await followed_again(engine, cluster, "a")
            assert TxnId(0, txn) in engine.topics.get("a").followed.buffer.ongoing
            assert visible(cluster, "a") == {}
        assert await answer(app) is Outcome.COMMIT
        assert visible(cluster, "a") == {b"v": 1}


async def test_what_went_with_the_old_topic_needs_no_marker_in_the_new_one(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [txn])
        with cluster.writer("a", exclusive=True):
            ask_visible(app, txn, "a", "b")
            await eventually(lambda: engine.topics.get("a").write_problem is not None)
            recreate(cluster, "a")
            assert await answer(app) is Outcome.COMMIT
        await followed_again(engine, cluster, "a")
        await eventually(lambda: engine.coordinator.low_water_mark >= txn)
        assert cluster.last_position("a") is None
        assert visible(cluster, "b") == {b"v": 1}
        assert engine.effects.damaged == 0


async def test_a_commit_is_refused_where_its_topic_was_deleted_and_nothing_of_it_happens(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [txn])

        def away():
            raise ServiceUnavailable("the broker is away")

        with monkeypatch.context() as patched:  # the missing topic is not resolved yet
            patched.setattr(broker, "topics", away)
            cluster.delete_topic("b")
            await noticed(engine, "b")
            ask_visible(app, txn, "a", "b")
            assert isinstance(await answer(app), UnregisteredTopic)
        await eventually(lambda: "b" not in engine.coordinator.topics())
        assert visible(cluster, "a") == {}
        assert "b" not in broker.topics()


async def test_a_client_that_registers_a_deleted_topic_gets_another_one(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a")
        old, new = next(app.ids), next(app.ids)
        await app.write("a", [old])
        with cluster.writer("a", exclusive=True):
            assert await app.commit(old, "a") is Outcome.COMMIT
            cluster.delete_topic("a")
        await noticed(engine, "a")
        await app.session.register("a")
        app.forget_writers()
        await app.write("a", [new], b"new")
        ask_visible(app, new, "a")
        assert await answer(app) is Outcome.COMMIT
        await eventually(lambda: engine.coordinator.low_water_mark >= new)
        assert visible(cluster, "a") == {b"new": 1}
        assert engine.effects.damaged == 0


async def test_a_reader_that_is_opened_again_does_not_read_another_topic_as_its_own(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a")
        await app.write("a", [next(app.ids)])
        first = engine.topics.get("a")
        away = ServiceUnavailable("the broker is away")
        with cluster.log.changed:  # the reader is opened again only after the topic was re-created
            broker.faults.fail_read(away, topic="a")
            cluster.log.changed.notify_all()
            recreate(cluster, "a")
        await followed_again(engine, cluster, "a")
        assert isinstance(first.problem, TopicNotFound)


async def test_the_broker_is_queried_until_a_missing_topic_is_resolved(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a", "b")
        txn = next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [txn])
        asked = []

        def away():
            asked.append(1)
            if len(asked) < 3:
                raise ServiceUnavailable("the broker is away")
            return cluster.topics()

        monkeypatch.setattr(broker, "topics", away)
        with cluster.writer("b", exclusive=True):
            ask_visible(app, txn, "a", "b")
            await eventually(lambda: engine.topics.get("b").write_problem is not None)
            cluster.delete_topic("b")
            assert await answer(app) is Outcome.COMMIT
        assert len(asked) >= 3


async def test_an_error_of_registering_again_is_reported_until_it_passes(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a")
        txn, later = next(app.ids), next(app.ids)
        unsafe = UnsafePolicy("its messages expire")

        def refuse(name):
            raise unsafe

        engine.topics.get("a").reader.paused += 1
        recreate(cluster, "a")
        await app.write("a", [txn])
        with monkeypatch.context() as patched, cluster.writer("a", exclusive=True):
            patched.setattr(broker, "create_topic", refuse)
            ask_visible(app, txn, "a")
            await eventually(lambda: engine.topics.get("a").write_problem is not None)
            engine.topics.get("a").reader.paused -= 1
            engine.topics.readers.wake()
            told = await answer(app)
            assert isinstance(told, NotVisible)
            assert "its messages expire" in str(told)
            await eventually(lambda: "its messages expire" in str(engine.topics.get("a").obstacle))
        await followed_again(engine, cluster, "a")
        app.forget_writers()
        await app.write("a", [later])
        ask_visible(app, later, "a")
        assert await answer(app) is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 2})


async def test_a_topic_recreated_while_no_service_ran_is_followed(cluster):
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "a", "gone")
        txn = next(app.ids)
        engine.fail(CoordinatorStopped("as if it had crashed"))
    recreate(cluster, "a")
    cluster.delete_topic("gone")
    await app.write("a", [txn])
    async with cluster_engine(cluster) as (engine, _):
        again = RawSession(InProcess(engine))
        await again.hello(app.session.session, [TxnId(0, txn)])
        app.session = again
        await followed_again(engine, cluster, "a")
        await eventually(lambda: "gone" not in engine.coordinator.topics())
        ask_visible(app, txn, "a")
        assert await answer(app) is Outcome.COMMIT
        assert visible(cluster, "a") == {b"v": 1}


async def test_a_topic_that_only_seemed_to_be_gone_continues_where_it_was(cluster):
    async with cluster_engine(cluster) as (engine, broker):
        app = await app_on(engine, cluster, "a")
        txn, later = next(app.ids), next(app.ids)
        await app.write("a", [txn])
        ask_visible(app, txn, "a")
        assert await answer(app) is Outcome.COMMIT
        first = engine.topics.get("a").followed
        await eventually(lambda: first.numbered.next_seqno == 2)
        broker.faults.fail_read(TopicNotFound("the broker is confused"), topic="a")
        await eventually(lambda: engine.topics.get("a").followed not in (None, first))
        await followed_again(engine, cluster, "a")
        await app.write("a", [later])
        ask_visible(app, later, "a")
        assert await answer(app) is Outcome.COMMIT
        followed = engine.topics.get("a").followed
        await eventually(lambda: followed.numbered.next_seqno == 3)
        assert followed.failover.versions == first.failover.versions
