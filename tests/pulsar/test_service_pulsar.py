"""The service in cluster mode on a real broker: recovery, and a standby that takes over many topics."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial

import pytest
from cluster_app import App, app_on
from pulsar_cluster import Cluster
from raw_session import OverGrpc, RawSession
from service_process import ServiceProcess
from service_setup import eventually, visible

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.frames import Abort
from txnbuffer.service.engine.engine import Engine


@pytest.fixture
def address(cluster: Cluster, namespace: str) -> str:
    return f"{cluster.url}/{namespace}"


@pytest.fixture
def broker(cluster: Cluster, address: str) -> Iterator[Broker]:
    """The connection of the application."""
    with open_broker(address, admin_url=cluster.admin) as opened:
        yield opened


@pytest.fixture
def serving(cluster: Cluster, address: str) -> Iterator[list[ServiceProcess]]:
    """Service processes that are ended after the test."""
    started: list[ServiceProcess] = []
    yield started
    for process in started:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGCONT)
            process.process.kill()
        process.finish()


def start(serving: list[ServiceProcess], cluster: Cluster, address: str, *flags: str) -> ServiceProcess:
    serving.append(ServiceProcess(address, "--admin-url", cluster.admin, *flags))
    return serving[-1]


async def session_at(port: int, *topics: str) -> RawSession:
    session = RawSession(OverGrpc(port))
    await session.hello()
    await session.register(*topics)
    return session


def has_come(tail: FollowedTopic, aborts: int, seqno: int) -> bool:
    return len(tail.buffer.aborted) == aborts and tail.numbered.next_seqno == seqno


async def app_at(service: ServiceProcess, broker: Broker, *topics: str) -> App:
    session = await session_at(service.port, *topics)
    return App(broker, session, await session.lease(100))


async def test_the_next_owner_recovers_everything_from_the_cluster(
    cluster: Cluster, address: str, broker: Broker
) -> None:
    for epoch in (1, 2, 3):
        with open_broker(address, admin_url=cluster.admin) as own:
            engine = await Engine.start(own, cluster_mode=True)
            assert engine.coordinator.epoch == epoch
            app = await app_on(engine, broker, "a")
            for _ in range(5):
                kept, gone = next(app.ids), next(app.ids)
                await app.write("a", [kept, gone], size=2)
                assert await app.commit(kept, "a", size=2) is Outcome.COMMIT
                await app.session.ask(aborts=lambda r, gone=gone: (Abort(r, TxnId(0, gone), ("a",)),))
            tail = engine.topics.get("a").followed
            await eventually(partial(has_come, tail, aborts=5 * epoch, seqno=10 * epoch + 1))
            await engine.stop()
    assert await asyncio.to_thread(visible, broker, "a") == {b"v": 30}


MANY = 50


async def test_a_standby_takes_over_many_warm_topics(
    cluster: Cluster, address: str, broker: Broker, serving: list[ServiceProcess]
) -> None:
    topics = [f"topic-{number}" for number in range(MANY)]
    active = await asyncio.to_thread(start(serving, cluster, address).wait_serving)
    app = await app_at(active, broker, *topics)
    standby = start(serving, cluster, address, "--standby")
    await asyncio.to_thread(standby.wait_event, "warm")
    warm = standby.event("warm")
    assert warm is not None
    assert (warm["topics"], warm["no_room"]) == (MANY, 0)
    used = topics[:8]
    done, opened = next(app.ids), next(app.ids)
    for topic in used:
        await app.write(topic, [done, opened])
    assert await app.commit(done, *used) is Outcome.COMMIT
    active.kill()
    await asyncio.to_thread(standby.wait_serving)
    taken = standby.event("took over")
    assert taken is not None
    assert (taken["topics"], taken["warm"] + taken["cold"]) == (MANY, MANY)
    assert taken["warm"] >= MANY - len(used)
    again = RawSession(OverGrpc(standby.port))
    await again.hello(app.session.session, [TxnId(0, done), TxnId(0, opened)])
    assert await again.commit(opened, used, [1] * len(used)) is Outcome.COMMIT
    for topic in used:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(visible, broker, topic) != {b"v": 2}:
                await asyncio.sleep(0.2)
    standby.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(standby.finish)
    assert [found for found in await asyncio.to_thread(verify, broker) if found.level is Level.ERROR] == []
