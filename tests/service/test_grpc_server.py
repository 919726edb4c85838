"""The service over real sockets: sessions, health, admin requests, metrics."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import commands
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_answers import get
from raw_session import OverGrpc, RawSession, transactional
from service_setup import engine_on, eventually, visible

from broker_io.batch import Batch, Message
from broker_io.errors import EnvironmentFault, InvalidAddress, VersionMismatch
from broker_io.memory import MemoryBroker
from broker_io.rpc import channel
from broker_io.rpc.channel import VERSION, VERSION_KEY
from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.errors import InvalidConfiguration, InvalidRequest, LimitExceeded, MalformedFrame
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame, SessionHello
from txnbuffer.service.door.connection import MIB, Limits
from txnbuffer.service.engine import engine as engine_module
from txnbuffer.service.servers import grpc_server
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer, check_listening
from txnbuffer.service.servers.http_server import HttpServer


@asynccontextmanager
async def served(broker=None, max_clients=100, **options):
    async with engine_on(broker or MemoryBroker(), **options) as engine:
        server = GrpcServer(engine.limits, max_clients=max_clients)
        await server.start("127.0.0.1:0")
        await server.serve(engine, ServiceAdmin(engine))
        try:
            yield engine, server
        finally:
            for connection in engine.connections:
                connection.close()
            await server.stop()


async def session_at(server, *topics, ids=10):
    session = RawSession(OverGrpc(server.port))
    await session.hello()
    await session.register(*topics)
    return session, await session.lease(ids)


async def test_a_session_over_a_socket():
    broker = MemoryBroker()
    async with served(broker) as (_, server):
        session, ids = await session_at(server, "a")
        assert await session.write(("a", transactional(ids, size=3))) == []
        for one in ids[:5]:
            assert await session.commit(one, ["a"], [3]) is Outcome.COMMIT
        session.link.send(ClientFrame(bye=True))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        await session.link.cut()
    assert visible(broker, "a") in ({b"v": 15}, {})  # the others may still be open at the end


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n"])
async def test_bytes_that_are_no_frame_end_the_connection_and_nothing_else(data):
    async with served() as (_, server):
        other, ids = await session_at(server, "a")
        for prelude in ([], [ClientFrame(hello=SessionHello(""))]):
            session = RawSession(OverGrpc(server.port))
            for frame in prelude:
                session.link.send(frame)
            session.link.send_bytes(data)
            with pytest.raises(EOFError):
                await session.until(lambda: False)
            assert isinstance(session.goodbye, MalformedFrame)
            await session.link.cut()
        assert await other.write(("a", transactional(ids[:1]))) == []
        await other.link.cut()


@pytest.mark.parametrize(
    ("metadata", "upgrade"),
    [
        ((), "upgrade the client"),
        (((VERSION_KEY, str(VERSION - 1)),), "upgrade the client"),
        (((VERSION_KEY, str(VERSION + 1)),), "upgrade the service"),
    ],
)
async def test_a_client_of_another_version_gets_a_status_that_says_so(metadata, upgrade):
    async with served() as (_, server):
        session = RawSession(OverGrpc(server.port, metadata))  # it sends nothing: a write would race with the status
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert session.link.status.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert upgrade in session.link.status.details()
        await session.link.cut()


async def test_a_client_fails_at_once_if_the_service_has_another_version(monkeypatch):
    async with served() as (_, server):
        monkeypatch.setattr(channel, "VERSION_METADATA", ((VERSION_KEY, str(VERSION + 1)),))
        with pytest.raises(
            VersionMismatch, match=f"127.0.0.1:{server.port} rejected this client: .* upgrade the service"
        ):
            await connect(f"txnbuf://127.0.0.1:{server.port}", max_unavailable=10_000)


async def test_too_long_a_frame_ends_its_connection_only():
    async with served(limits=Limits(client_bytes=MIB, max_message_bytes=4096)) as (_, server):
        other, ids = await session_at(server, "a")
        session = RawSession(OverGrpc(server.port))
        await session.hello()
        session.send(("a", Batch.of([Message(None, b"x" * (14 * MIB))])))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert session.link.status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await session.link.cut()
        assert await other.write(("a", transactional(ids[:1]))) == []
        await other.link.cut()


async def test_a_client_that_vanishes_is_noticed():
    async with served() as (engine, server):
        session, _ = await session_at(server)
        assert len(engine.connections) == 1
        await session.link.cut()
        await eventually(lambda: not engine.connections)
        (known,) = engine.coordinator.sessions()
        assert known.disconnected_since is not None


async def test_too_many_clients_get_an_error(monkeypatch):
    monkeypatch.setattr(grpc_server, "LAST_WORDS", 0.05)
    async with served(max_clients=1) as (_, server):
        session, _ = await session_at(server)
        late = RawSession(OverGrpc(server.port))
        with pytest.raises(EOFError):
            await late.hello()
        assert isinstance(late.goodbye, LimitExceeded)
        assert late.goodbye.limit == "service.max_clients"
        assert len(await session.lease(1)) == 1
        await session.link.cut()
        await late.link.cut()


async def test_a_client_that_sends_without_end_waits_for_the_log():
    broker = MemoryBroker()
    limits = Limits(client_bytes=MIB, total_bytes=2 * MIB)
    async with served(broker, limits=limits) as (engine, server):
        session, _ = await session_at(server)
        quiet, ids = await session_at(server, "a")
        broker.faults.hold(topic="plain")
        for _ in range(100):
            session.send(("plain", Batch.of([Message(None, b"x" * (MIB // 4))])))
        await eventually(lambda: engine.requests.unsettled_bytes > MIB)
        quiet.send(("a", transactional(ids)))
        await eventually(lambda: engine.requests.connections[quiet.session[:32]].unsettled)  # which was not held up
        assert engine.requests.unsettled_bytes < 3 * MIB
        broker.faults.release()
        await quiet.until(lambda: quiet.acknowledged == 1)
        await session.until(lambda: session.acknowledged == 100)
        assert engine.requests.unsettled_bytes == 0
        await session.link.cut()
        await quiet.link.cut()


async def test_health_reports_serving_and_then_not():
    async with served() as (_, server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "txnbuffer.v1.Session"):
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.drain()
        answer = await check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_in_use_is_an_error():
    async with served() as (engine, server):
        with pytest.raises(EnvironmentFault, match=r"can't listen at .*check whether another process uses"):
            await GrpcServer(engine.limits, max_clients=1).start(f"127.0.0.1:{server.port}")
        with pytest.raises(EnvironmentFault, match="can't listen at") as elsewhere:
            await GrpcServer(engine.limits, max_clients=1).start("192.0.2.1:0")
        assert "another service" not in str(elsewhere.value)
        assert "assign requested address" in str(elsewhere.value)
        http = HttpServer()
        with pytest.raises(EnvironmentFault, match="can't listen at"):
            await http.start(f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.5.5.5:0"])
def test_loopback_needs_no_tls(address):
    check_listening(address, tls=False, authenticated=False, insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "192.168.0.1:1", "example.org:1"])
def test_anything_else_does(address):
    with pytest.raises(InvalidConfiguration, match="without protection"):
        check_listening(address, tls=False, authenticated=False, insecure=False)
    check_listening(address, tls=True, authenticated=True, insecure=False)
    check_listening(address, tls=False, authenticated=False, insecure=True)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:many", "host:70000", "::1:1", "[]:1", "[::1:1"])
def test_invalid_addresses(address):
    with pytest.raises(InvalidConfiguration, match="write HOST:PORT"):
        check_listening(address, tls=True, authenticated=True, insecure=True)


async def txnbuf(server, *words):
    """Run the command line against a server: exit code, standard output, standard error."""
    import asyncio

    environment = {"TXNBUFFER_ADDRESS": f"txnbuf://127.0.0.1:{server.port}"}
    done = await asyncio.to_thread(commands.txnbuf, *words, environ=environment)
    return done.returncode, done.stdout, done.stderr


async def test_operators_see_who_holds_readers_back_and_end_it(monkeypatch):
    monkeypatch.setattr(engine_module, "TICK", 0.02)
    async with served() as (engine, server):
        session, ids = await session_at(server, "a", "b")
        await session.write(("a", transactional(ids[:2])), ("b", transactional(ids[:1])))
        await session.commit(ids[1], ["a"], [1])
        hanging = f"0:{ids[0]}"
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, ids[0])) is not None)

        code, out, _ = await txnbuf(server, "list", "--output", "json")
        rows = {row["topic"]: row for row in json.loads(out)}
        assert (code, rows["a"]["open"], rows["b"]["open"], rows["a"]["problem"]) == (0, 1, 1, None)

        code, out, _ = await txnbuf(server, "describe", "a", "--output", "json")
        waits = json.loads(out)["waits_for"]
        assert f"transaction {hanging}: open since 1:0" in waits or f"transaction {hanging}: open since" in waits
        named = session.session.partition("x")[0]  # after it comes the owner's id
        assert named in waits
        assert "127.0.0.1" in waits
        assert "it is aborted in" in waits
        assert f"txnbuf abort {hanging}" in waits

        code, out, _ = await txnbuf(server, "find-hanging", "--older-than", "0", "--output", "json")
        (row,) = json.loads(out)
        assert (row["txn"], sorted(row["topics"]), row["session"]) == (hanging, ["a", "b"], named)
        code, out, _ = await txnbuf(server, "find-hanging", "--older-than", "1000", "--output", "json")
        assert json.loads(out) == []

        code, out, _ = await txnbuf(server, "abort", hanging, "--output", "json")
        assert (code, json.loads(out)) == (0, {"txn": hanging, "outcome": "ABORT"})
        code, out, _ = await txnbuf(server, "abort", f"0:{ids[1]}", "--output", "json")
        assert json.loads(out)["outcome"] == "COMMIT"
        await eventually(lambda: not engine.topics.get("b").followed.buffer.ongoing)
        code, out, _ = await txnbuf(server, "describe", "b")
        assert "every transaction is decided" in out
        await session.link.cut()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["describe", "none"], 2, "has no topic 'none' open"),
        (["abort", "0:99999"], 2, "never leased"),
        (["abort", "nonsense"], 2, "is not a transaction id"),
    ],
)
async def test_a_wrong_question_is_one_clear_error(words, code, message):
    async with served() as (_, server):
        found, out, err = await txnbuf(server, *words)
        assert (found, out) == (code, "")
        assert message in err
        assert "Traceback" not in err


@pytest.mark.parametrize("topic", [5, None, ["a"], True])
async def test_a_topic_that_is_no_text_is_no_topic(topic):
    async with engine_on(MemoryBroker()) as engine:
        with pytest.raises(InvalidRequest, match="is not a topic name: give text"):
            await ServiceAdmin(engine).describe({"topic": topic})


def test_an_unreachable_service_is_an_error():
    done = commands.txnbuf("list", "txnbuf://127.0.0.1:1")
    assert done.returncode == 3
    assert "no service answers at 127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    "address",
    ["pulsar://127.0.0.1:6650/public/default", "here", "here:", ":7711", "a:1/b", "a:65536", "a:73247", "a:0", "a:٧"],
)
def test_an_address_of_no_service_is_an_error(address):
    with pytest.raises(InvalidAddress, match="of the service"):
        call(ServiceAddress(address), "List")


async def test_metrics_and_health_over_http():
    import asyncio

    async with served() as (engine, server):
        http = HttpServer()
        await http.start("127.0.0.1:0")
        status, text = await asyncio.to_thread(get, http.port, "/ready")
        assert (status, json.loads(text)["waits_for"]) == (503, ["the service is starting"])
        status, text = await asyncio.to_thread(get, http.port, "/metrics")
        assert "txnbuffer_serving 0.0" in text
        http.engine = engine
        session, ids = await session_at(server, "a")
        await session.write(("a", transactional(ids[:3])))
        await session.commit(ids[0], ["a"], [1])
        status, text = await asyncio.to_thread(get, http.port, "/metrics")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert status == 200
        assert float(values["txnbuffer_records_total"]) == 3
        assert float(values["txnbuffer_ongoing"]) == 2
        assert float(values["txnbuffer_ends_committed_total"]) == 1
        assert "process_resident_memory_bytes" in values
        assert (await asyncio.to_thread(get, http.port, "/health"))[0] == 200
        assert (await asyncio.to_thread(get, http.port, "/ready"))[0] == 200
        engine.requests.draining = True
        status, text = await asyncio.to_thread(get, http.port, "/ready")
        assert (status, json.loads(text)["waits_for"]) == (503, ["the service is draining"])
        assert (await asyncio.to_thread(get, http.port, "/none"))[0] == 404
        await session.link.cut()
        await http.stop()
