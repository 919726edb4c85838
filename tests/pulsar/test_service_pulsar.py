"""The service in cluster mode on a real broker: commits, recovery, takeover, zombies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from cluster_app import App, app_on
from pulsar_cluster import Cluster
from raw_session import OverGrpc, RawSession
from service_process import ServiceProcess
from service_setup import engine_on, eventually, on_a_loop_for, visible

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.testing.contract.base import read_all
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.decisions import Owner, decode
from txnbuffer.coordinator.messages import Commit, State
from txnbuffer.errors import TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.frames import Abort, ClientFrame
from txnbuffer.service.cluster.cluster import CLUSTER_CONFIG
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


def owners(broker: Broker) -> list[Owner]:
    entries = [decode(placed.message) for placed in read_all(broker, DECISIONS)]
    return [entry for entry in entries if isinstance(entry, Owner)]


async def app_at(service: ServiceProcess, broker: Broker, *topics: str) -> App:
    session = await session_at(service.port, *topics)
    return App(broker, session, await session.lease(100))


@on_a_loop_for(300.0)
async def test_commits_are_seen_and_aborts_are_not(cluster: Cluster, address: str, broker: Broker) -> None:
    with open_broker(address, admin_url=cluster.admin) as own:
        async with engine_on(own, cluster_mode=True) as engine:
            app = await app_on(engine, broker, "a", "b")
            both, gone, dup = next(app.ids), next(app.ids), next(app.ids)
            await app.write("a", [both, gone, dup], size=2)
            await app.write("b", [both, gone])
            await app.write("a", [dup], b"again", size=2)
            commits = (
                Commit(1000, TxnId(0, both), ("a", "b"), (2, 1), True),
                Commit(1001, TxnId(0, dup), ("a",), (2,)),
            )
            app.session.link.send(ClientFrame(commits=commits))
            await app.session.until(lambda: len(app.session.answers) == 2)
            assert set(app.session.answers.values()) == {Outcome.COMMIT}
            aborted = await app.session.ask(aborts=lambda r: (Abort(r, TxnId(0, gone), ("a", "b")),))
            assert aborted is Outcome.ABORT
            await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
            assert await asyncio.to_thread(visible, broker, "a") == {b"v": 4}
            assert await asyncio.to_thread(visible, broker, "b") == {b"v": 1}


@on_a_loop_for(300.0)
async def test_record_counts_are_verified_on_request(cluster: Cluster, address: str, broker: Broker) -> None:
    config = replace(CLUSTER_CONFIG, verify_counts=True)
    with open_broker(address, admin_url=cluster.admin) as own:
        async with engine_on(own, cluster_mode=True, config=config) as engine:
            app = await app_on(engine, broker, "a")
            right, wrong = next(app.ids), next(app.ids)
            await app.write("a", [right, wrong], size=3)
            assert await app.commit(right, "a", size=3) is Outcome.COMMIT
            assert isinstance(await app.commit(wrong, "a", size=2), TransactionAborted)


@on_a_loop_for(300.0)
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


@on_a_loop_for(300.0)
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


@on_a_loop_for(300.0)
async def test_the_standby_takes_over_when_the_active_is_killed(
    cluster: Cluster, address: str, broker: Broker, serving: list[ServiceProcess]
) -> None:
    active = await asyncio.to_thread(start(serving, cluster, address).wait_serving)
    app = await app_at(active, broker, "a", "b")
    standby = start(serving, cluster, address, "--standby")
    await asyncio.to_thread(standby.wait_event, "standing by")
    done, opened = next(app.ids), next(app.ids)
    for topic in ("a", "b"):
        await app.write(topic, [done, opened])
    assert await app.commit(done, "a", "b") is Outcome.COMMIT
    assert standby.event("took over") is None
    active.kill()
    await asyncio.to_thread(standby.wait_serving)
    events = [event["event"] for event in standby.events if event["event"] != "warm"]
    assert events == ["standing by", "recovering", "took over", "serving"]
    found = await asyncio.to_thread(owners, broker)
    assert [(owner.epoch, owner.address) for owner in found] == [
        (1, f"127.0.0.1:{active.port}"),
        (2, f"127.0.0.1:{standby.port}"),
    ]
    again = RawSession(OverGrpc(standby.port))
    welcome = await again.hello(app.session.session, [TxnId(0, done), TxnId(0, opened)])
    assert dict(welcome.states) == {TxnId(0, done): State.COMMITTED, TxnId(0, opened): State.OPEN}
    assert await again.commit(opened, ["a", "b"], [1, 1]) is Outcome.COMMIT
    for topic in ("a", "b"):
        async with asyncio.timeout(120):
            while await asyncio.to_thread(visible, broker, topic) != {b"v": 2}:
                await asyncio.sleep(0.05)
    await again.link.cut()
    await app.session.link.cut()


@on_a_loop_for(300.0)
async def test_zombie_changes_nothing_and_ends(
    cluster: Cluster, address: str, broker: Broker, serving: list[ServiceProcess]
) -> None:
    zombie = await asyncio.to_thread(start(serving, cluster, address).wait_serving)
    app = await app_at(zombie, broker, "a")
    first, second = next(app.ids), next(app.ids)
    await app.write("a", [first, second])
    assert await app.commit(first, "a") is Outcome.COMMIT
    zombie.process.send_signal(signal.SIGSTOP)
    app.session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, second), ("a",), (1,)),)))
    successor = await asyncio.to_thread(start(serving, cluster, address, "--fence").wait_serving)
    again = RawSession(OverGrpc(successor.port))
    await again.hello(app.session.session, [TxnId(0, second)])
    assert await again.ask(aborts=lambda r: (Abort(r, TxnId(0, second), ("a",)),)) is Outcome.ABORT
    zombie.process.send_signal(signal.SIGCONT)
    with pytest.raises(EOFError):
        await app.session.until(lambda: 1000 in app.session.answers)
    assert await asyncio.to_thread(zombie.finish) == 3
    assert [event["kind"] for event in zombie.events if event["event"] == "failed"] == ["CoordinatorStopped"]
    third = (await again.lease(1))[0]
    await app.write("a", [third])
    assert await again.commit(third, ["a"], [1]) is Outcome.COMMIT
    async with asyncio.timeout(120):
        while await asyncio.to_thread(visible, broker, "a") != {b"v": 2}:
            await asyncio.sleep(0.05)
    await again.link.cut()
    await app.session.link.cut()


@on_a_loop_for(300.0)
async def test_one_of_a_standby_and_another_service_becomes_active(
    cluster: Cluster, address: str, broker: Broker, serving: list[ServiceProcess]
) -> None:
    active = await asyncio.to_thread(start(serving, cluster, address).wait_serving)
    standby = start(serving, cluster, address, "--standby")
    await asyncio.to_thread(standby.wait_event, "standing by")
    early = start(serving, cluster, address)
    assert await asyncio.to_thread(early.finish) == 3
    assert f"another service owns this log, which serves at 127.0.0.1:{active.port}: " in early.lines[-1]
    active.kill()
    direct = start(serving, cluster, address)
    await eventually(lambda: any(one.event("serving") or one.process.poll() for one in (standby, direct)))
    loser, winner = (direct, standby) if standby.event("took over") or direct.process.poll() else (standby, direct)
    await asyncio.to_thread(winner.wait_serving)
    if loser is direct:
        assert await asyncio.to_thread(direct.finish) == 3
        assert f"which serves at 127.0.0.1:{standby.port}: " in direct.lines[-1]
    await asyncio.sleep(3)
    assert winner.process.poll() is None
    if loser is standby:
        assert [event["event"] for event in standby.events] == ["standing by"]
    found = await asyncio.to_thread(owners, broker)
    assert [owner.address for owner in found] == [f"127.0.0.1:{active.port}", f"127.0.0.1:{winner.port}"]
