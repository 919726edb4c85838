"""Standby: reading the log while an owner serves, and taking over only when the cluster says that it is gone."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from cluster_app import app_on, cluster_engine
from cut_readers import cut_short
from http_answers import get
from raw_session import InProcess, OverGrpc, RawSession
from service.running_services import Running, owners, service
from service_setup import engine_on, eventually, visible

from broker_io.batch import Batch
from broker_io.errors import DiskFailed, PositionTrimmed, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST
from txnbuffer.config import ServiceConfig
from txnbuffer.coordinator.decisions import TOPIC, Lease, Owner, encode, tombstone
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort
from txnbuffer.service.process import advertised, check
from txnbuffer.service.standby import takeover as standing_module
from txnbuffer.service.standby.decision_log import DecisionLog, newest_owner
from txnbuffer.service.standby.takeover import Standby, StandbyState


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(standing_module, "SLICE", 0.1)
    monkeypatch.setattr(standing_module, "READ_SECONDS", 0.02)
    monkeypatch.setattr(standing_module, "PAUSE", 0.02)
    with MemoryBroker() as opened:
        yield opened


def waiting(cluster: MemoryBroker) -> tuple[Standby, asyncio.Event, asyncio.Task[StandbyState | None]]:
    standby, stop = Standby(cluster.connect()), asyncio.Event()
    return standby, stop, asyncio.ensure_future(standby.wait(stop))


async def test_it_waits_for_the_owner_to_go_and_continues_with_what_it_left(cluster):
    async with cluster_engine(cluster) as (active, its):
        app = await app_on(active, cluster, "a", "b")
        standby, _, turn = waiting(cluster)
        decided, opened = next(app.ids), next(app.ids)
        for topic in ("a", "b"):
            await app.write(topic, [decided, opened])
        its.faults.hold(topic="a", written=False)
        its.faults.hold(topic="b", written=False)
        assert await app.commit(decided, "a", "b") is Outcome.COMMIT
        await eventually(lambda: standby._log is not None and standby._log.at == cluster.last_position(TOPIC))
        assert standby._log.history.groups
        assert not turn.done()
        assert [owner.epoch for owner in owners(cluster)] == [1]
        its.close()  # the cluster loses the connection, as if the process had died
        standing = await turn
        async with cluster_engine(cluster, standby_state=standing) as (engine, _):
            assert engine.coordinator.epoch == 2
            again = RawSession(InProcess(engine))
            await again.hello(app.session.session, [TxnId(0, opened)])
            assert await again.commit(opened, ["a", "b"], [1, 1]) is Outcome.COMMIT
            await eventually(lambda: visible(cluster, "a") == visible(cluster, "b") == {b"v": 2})
        active.fail(ServiceUnavailable("its process is gone"))


async def test_topics_whose_snapshots_cover_their_logs_are_served_before_their_readers_are_open(cluster):
    """A cluster takes long to open the readers of a thousand topics."""
    async with cluster_engine(cluster) as (active, _):
        app = await app_on(active, cluster, "a")
        txn = next(app.ids)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: visible(cluster, "a") == {b"v": 1})
    with cluster.connect() as broker:
        opening, may_open = broker.reader, threading.Event()

        def reader(topic, *arguments, **options):
            if topic == "a":
                may_open.wait()
            return opening(topic, *arguments, **options)

        broker.reader = reader
        async with engine_on(broker, cluster_mode=True) as engine:
            put = await app_on(engine, cluster, "a")
            txn = next(put.ids)
            await put.write("a", [txn])
            assert await put.commit(txn, "a") is Outcome.COMMIT
            may_open.set()
            await eventually(lambda: visible(cluster, "a") == {b"v": 2})
            await eventually(lambda: engine.topics.manager.buffer("a").applied == cluster.last_position("a"))


async def test_it_stops_on_request_without_fencing(cluster):
    async with cluster_engine(cluster) as (active, _):
        app = await app_on(active, cluster, "a")
        _, stop, turn = waiting(cluster)
        await asyncio.sleep(0.05)
        stop.set()
        assert await turn is None
        txn = next(app.ids)
        await app.write("a", [txn])
        assert await app.commit(txn, "a") is Outcome.COMMIT
        assert not active.ended.done()


async def test_a_cluster_that_is_away_is_named_and_waited_for(cluster):
    with cluster.connect() as broker:
        standby, stop = Standby(broker), asyncio.Event()
        refusals = iter([ServiceUnavailable("the cluster is away")] * 3)
        opened = broker.writer

        def writer(topic, **options):
            for refusal in refusals:
                raise refusal
            return opened(topic, **options)

        broker.writer = writer
        broker.faults.fail_read(ServiceUnavailable("the cluster is away"), topic=TOPIC)
        turn = asyncio.ensure_future(standby.wait(stop))
        await eventually(lambda: "away" in str(standby.problem) or turn.done())
        standing = await turn
        standing.log.close()
        standing.decisions.close()


async def test_a_topic_without_an_owner_is_waited_for_from_the_first_question_on(cluster):
    with cluster.connect() as broker:
        refusals = iter([ServiceUnavailable("the topic moves")] * 2)
        make = broker.create_topic

        def create_topic(topic):
            for refusal in refusals:
                raise refusal
            make(topic)

        broker.create_topic = create_topic
        standing = await Standby(broker).wait(asyncio.Event())
        standing.log.close()
        standing.decisions.close()


async def test_it_stops_though_the_cluster_does_not_answer(cluster):
    with cluster.connect() as broker:

        def create_topic(topic):
            raise ServiceUnavailable("the topic moves")

        broker.create_topic = create_topic
        standby, stop = Standby(broker), asyncio.Event()
        turn = asyncio.ensure_future(standby.wait(stop))
        await eventually(lambda: "moves" in str(standby.problem))
        stop.set()
        assert await turn is None


async def test_a_read_that_a_slow_cluster_keeps_delays_no_takeover(cluster, monkeypatch):
    monkeypatch.setattr(standing_module, "LAST_READ", 0.05)
    answered, kept, closed = threading.Event(), threading.Event(), threading.Event()

    class Kept(DecisionLog):
        def read(self, timeout):
            kept.set()
            answered.wait()
            return False

        def close(self):
            super().close()
            closed.set()

    async with cluster_engine(cluster) as (active, its):
        monkeypatch.setattr(standing_module, "DecisionLog", Kept)
        _, _, turn = waiting(cluster)
        await asyncio.to_thread(kept.wait)
        its.close()
        standing = await turn
        assert not answered.is_set()
        assert standing.log.history.epoch == 1
        answered.set()
        await asyncio.to_thread(closed.wait)
        assert standing.log.read_to(standing.log.at) == 0  # another log was closed
        standing.log.close()
        standing.decisions.close()
        active.fail(ServiceUnavailable("its process is gone"))


async def test_an_error_that_waiting_can_not_fix_ends_it(cluster):
    with cluster.connect() as broker:

        def refuse(topic, **options):
            raise DiskFailed("no")

        broker.writer = refuse
        with pytest.raises(DiskFailed):
            await Standby(broker).wait(asyncio.Event())


def test_a_delete_that_compaction_took_away_is_not_missed(cluster):
    """The standby has read an entry; its delete is written, and both are compacted away before it reads more."""
    cluster.create_topic(TOPIC)
    with cluster.writer(TOPIC) as writer:
        lease = encode(Lease(1, 100, "s", 0))
        writer.append(Batch.of([lease, encode(Owner(1, "a"))])).result()
        log = DecisionLog(cluster)
        assert log.history.leases
        writer.append(Batch.of([tombstone("lease-1"), encode(Owner(1, "a"))])).result()
        cluster.compact(TOPIC)
        while log.read(0.0):
            pass
        assert not log.history.leases
        log.close()


def test_a_standby_too_late_for_the_raw_log_reads_it_again(cluster):
    cluster.create_topic(TOPIC)
    with cluster.writer(TOPIC) as writer:
        writer.append(Batch.of([encode(Lease(1, 100, "s", 0))])).result()
        log = DecisionLog(cluster)
        writer.append(Batch.of([tombstone("lease-1")])).result()
        cluster.roll(TOPIC)
        writer.append(Batch.of([encode(Owner(1, "a"))])).result()
        cluster.compact(TOPIC)
        cluster.trim(TOPIC, cluster.ledgers(TOPIC)[-1].ledger)
        with pytest.raises(PositionTrimmed):
            log.read(0.0)
        log.close()
        again = DecisionLog(cluster)
        assert not again.history.leases
        assert again.history.epoch == 1
        again.close()


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_silence_that_was_taken_for_the_end_is_found_out(cluster, monkeypatch, given, compacted):
    """Otherwise the next owner would abort transactions that are decided but have no marker yet."""
    cluster.create_topic(TOPIC)
    leases = [encode(Lease(first, 100, "s", 0)) for first in (1, 101)]
    with cluster.writer(TOPIC) as writer:
        writer.append(Batch.of([encode(Owner(1, "a")), *leases, tombstone("lease-7")])).result()
        if not compacted:
            writer.append(Batch.of([encode(Owner(5, "b"))])).result()
        if compacted:
            cluster.compact(TOPIC)
        cut_short(monkeypatch, cluster, given, 0, honest=True)
        log = DecisionLog(cluster)
        assert len(log.history.leases) == max(given - 1, 0)
        own = writer.append(Batch.of([encode(Owner(2, "own"))])).result().first
        highest = log.read_to(own)
        assert (given == 3 and compacted) or highest == (1 if compacted else 5)
        assert sorted(log.history.leases) == [1, 101]
        log.close()


def test_owners_are_found_among_other_entries(cluster):
    cluster.create_topic(TOPIC)
    with cluster.writer(TOPIC) as writer, cluster.reader(TOPIC, EARLIEST) as reader:
        writer.append(Batch.of([encode(Lease(1, 100, "__owner", 0))])).result()
        assert newest_owner(reader.read()) is None
        writer.append(Batch.of([encode(Owner(7, "a")), encode(Lease(200, 1, "s", 0)), encode(Owner(5, "b"))])).result()
        assert newest_owner(reader.read()) == 7


# The process


def ready(port: int) -> tuple[int, list[str]]:
    status, text = get(port, "/ready")
    return status, json.loads(text)["waits_for"]


async def test_a_standby_service_says_so_and_takes_over(cluster):
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    active = Running(cluster, advertise="first:0")
    first = await active.event("serving")
    standby = Running(cluster, standby=True)
    told = await standby.event("standing by")
    assert await asyncio.to_thread(ready, told["http"]) == (503, ["standing by: another service serves"])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{told['port']}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    refused = RawSession(OverGrpc(told["port"]))
    assert await refused.link.receive() is None
    assert refused.link.status.code() is grpc.StatusCode.UNAVAILABLE
    await refused.link.cut()
    assert [owner.address for owner in owners(cluster)] == [f"first:{first['port']}"]
    active.broker.close()
    serving = await standby.event("serving")
    assert serving["port"] == told["port"]
    assert [event for event, _ in standby.events] == ["standing by", "recovering", "took over", "serving"]
    assert await asyncio.to_thread(ready, told["http"]) == (200, [])
    assert [owner.address for owner in owners(cluster)][1:] == [f"127.0.0.1:{told['port']}"]
    session = RawSession(OverGrpc(serving["port"]))
    await session.hello()
    await session.register("a")
    (txn,) = await session.lease(1)
    assert await session.ask(aborts=lambda r: (Abort(r, TxnId(0, txn), ()),)) is Outcome.ABORT
    await session.link.cut()
    await standby.end()
    await active.end()


def role(port: int) -> tuple[int, str]:
    status, text = get(port, "/role")
    return status, json.loads(text)["role"]


async def test_role_is_none_until_a_service_follows_or_owns_the_log(cluster):
    active = Running(cluster)
    first = await active.event("serving")
    assert await asyncio.to_thread(role, first["http"]) == (200, "active")
    standby = Running(cluster, standby=True)
    make, away = standby.broker.create_topic, True

    def create_topic(topic):
        if away:
            raise ServiceUnavailable("the cluster is away")
        make(topic)

    standby.broker.create_topic = create_topic
    port = (await standby.event("standing by"))["http"]
    assert await asyncio.to_thread(role, port) == (503, "none")
    assert (await asyncio.to_thread(get, port, "/health"))[0] == 200
    away = False
    while await asyncio.to_thread(role, port) != (200, "standby"):
        await asyncio.sleep(0.02)
    active.broker.close()
    await standby.event("serving")
    assert await asyncio.to_thread(role, port) == (200, "active")
    await standby.end()
    await active.end()


async def test_a_fenced_service_ends_with_its_error(cluster):
    active = Running(cluster)
    await active.event("serving")
    other = Running(cluster, fence=True)
    error = await asyncio.wait_for(active.task, 30)
    await other.end()
    assert error is not None
    assert (error.exit_code, type(error).__name__) == (3, "CoordinatorStopped")
    assert [event for event, _ in active.events][-2:] == ["failed", "stopped"]


async def test_a_fenced_service_with_standby_is_a_standby_again(cluster):
    """It continues to listen, waits for the end of the other one, and serves again."""
    active = Running(cluster, standby=True)
    port = (await active.event("serving"))["port"]
    other = Running(cluster, fence=True)
    await other.event("serving")
    await eventually(lambda: [event for event, _ in active.events].count("standing by") == 2 or active.task.done())
    other.broker.close()
    await eventually(lambda: [event for event, _ in active.events].count("serving") == 2 or active.task.done())
    assert not active.task.done()
    assert [owner.epoch for owner in owners(cluster)] == [1, 2, 3]
    session = RawSession(OverGrpc(port))
    await session.hello()
    await session.link.cut()
    await other.end()
    await active.end()


@pytest.mark.parametrize(
    ("service_config", "address"),
    [
        (ServiceConfig(listen="127.0.0.1:0"), "127.0.0.1:77"),
        (ServiceConfig(listen="[::1]:0"), "[::1]:77"),
        (ServiceConfig(listen="0.0.0.0:77"), "me:77"),
        (ServiceConfig(listen="[::]:77"), "me:77"),
        (ServiceConfig(listen="0.0.0.0:77", advertise="other:1"), "other:1"),
        (ServiceConfig(listen="0.0.0.0:77", advertise="other:0"), "other:77"),
    ],
)
def test_the_address_that_clients_connect_to(monkeypatch, service_config, address):
    monkeypatch.setattr("socket.gethostname", lambda: "me")
    assert advertised(service_config, 77) == address


def test_a_log_for_one_process_has_no_standby():
    with pytest.raises(InvalidConfiguration, match="requires a cluster"):
        check(service(standby=True))
    with pytest.raises(InvalidConfiguration, match="HOST:PORT"):
        check(service(advertise="nowhere"), cluster_mode=True)
    check(replace(service(standby=True)), cluster_mode=True)
