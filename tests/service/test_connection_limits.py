"""Connections, calls and pings of strangers are limited at both ports, and end when nothing comes."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from access_world import accessed
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_answers import ask
from raw_session import OverGrpc, RawSession
from service_setup import engine_on, eventually, listening

from bench.floods import GOAWAY, HELLO, PING, TALK, WATCH, call, frame
from broker_io.environment import current
from broker_io.memory import MemoryBroker
from broker_io.system import _shut_down, client_address
from txnbuffer.service.door import connection_limits, health
from txnbuffer.service.door.connection_limits import NO_LIMITS, PortLimits, port_limits
from txnbuffer.service.door.tls import ServerTls
from txnbuffer.service.servers import grpc_server, http_server
from txnbuffer.service.servers.grpc_server import GrpcServer
from txnbuffer.service.servers.http_server import HttpServer

ELSEWHERE = "127.0.0.2"
"""Another address of this machine."""


@asynccontextmanager
async def served(connections: PortLimits = NO_LIMITS) -> AsyncIterator[GrpcServer]:
    options = {"max_clients": 100, "connections": connections}
    async with engine_on(MemoryBroker()) as engine, listening(engine, **options) as server:
        yield server


@asynccontextmanager
async def over_http(connections: PortLimits = NO_LIMITS) -> AsyncIterator[HttpServer]:
    server = HttpServer(connections=connections)
    await server.start("127.0.0.1:0")
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def idle(port: int, count: int, source: str = "127.0.0.1", first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections from an address that send the same first bytes, and then nothing."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30, (source, 0))) for _ in range(count)
        ]
        for connection in found:
            connection.sendall(first)
            connection.setblocking(False)
        yield found


def left(connections: list[socket.socket]) -> int:
    """How many connections the server has not ended."""
    return sum(not has_ended(connection) for connection in connections)


def has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


async def is_served(server: HttpServer) -> None:
    assert (await asyncio.to_thread(ask, server.port, "/health")).status == 200


async def test_the_http_port_refuses_connections_above_its_limits() -> None:
    async with over_http(PortLimits(6, 4)) as server:
        with idle(server.port, 9, ELSEWHERE) as others:
            await eventually(lambda: left(others) == 4)
            await is_served(server)
            with idle(server.port, 3) as own:
                await eventually(lambda: left(own) == 2)
                assert left(others) == 4
        while not await asyncio.to_thread(_can_connect, server.port):
            await asyncio.sleep(0.01)


def _can_connect(port: int) -> bool:
    with idle(port, 1, first=b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as (connection,):
        connection.settimeout(30)
        try:
            return connection.recv(9) == b"HTTP/1.1 "
        except OSError:
            return False


async def test_an_http_request_that_does_not_end_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.3)
    whole, part = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HT"

    def ends(requests: int, rest: bytes) -> bool:
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            for _ in range(requests):
                connection.sendall(whole)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += connection.recv(65536)
            connection.sendall(rest)
            return not connection.recv(65536)

    async with over_http() as server:
        for requests, rest in ((0, b""), (0, part), (1, part), (3, part)):
            assert await asyncio.to_thread(ends, requests, rest)


async def test_a_tls_handshake_that_does_not_begin_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(grpc_server, "HANDSHAKE_SECONDS", 0.3)
    tls = ServerTls(*map(str, Authority(tmp_path, "ours").sign("service")), "")
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path, tls=tls) as service:
        for port in (service.http.port, service.server.port):
            with idle(port, 3) as connections:
                await eventually(lambda connections=connections: left(connections) == 0)


async def test_the_grpc_port_refuses_connections_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_SECONDS", 600.0)
    monkeypatch.setattr(grpc_server, "PING_SECONDS", 600.0)
    async with served(PortLimits(5)) as server:
        session = RawSession(OverGrpc(server.port))
        await session.hello()
        with idle(server.port, 12, ELSEWHERE) as others:
            await eventually(lambda: left(others) <= 4)
            await session.register("a")
        late = RawSession(OverGrpc(server.port))
        await late.hello()
        for each in (session, late):
            await each.link.cut()


async def test_the_grpc_port_ends_connections_of_an_address_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "WATCH", 0.05)
    async with served(PortLimits(100, 4)) as server:
        session = RawSession(OverGrpc(server.port))
        await session.hello()
        with idle(server.port, 9, ELSEWHERE, HELLO) as others, idle(server.port, 2, first=HELLO) as own:
            await eventually(lambda: left(others) == 4)
            assert [has_ended(each) for each in others] == [False] * 4 + [True] * 5
            assert left(own) == 2
            await session.register("a")
        await session.link.cut()


async def test_a_grpc_connection_without_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "IDLE_SECONDS", 0.3)
    async with served() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):
            await stub.Check(health_pb2.HealthCheckRequest())
            async with asyncio.timeout(30):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Kind, stream and content of the frames of a server until it ends the connection."""
    with connection.makefile("rb") as file:
        while len(head := file.read(9)) == 9:
            yield head[3], struct.unpack(">I", head[5:])[0], file.read(int.from_bytes(head[:3]))


async def test_calls_of_one_connection_are_limited() -> None:
    def streams() -> int:
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(HELLO)
            settings = next(content for kind, _, content in frames(connection) if kind == 4 and content)
        found = dict(struct.iter_unpack(">HI", settings))
        return int(found[3])

    async with served() as server:
        assert await asyncio.to_thread(streams) == grpc_server.CALLS_OF_CONNECTION


async def test_calls_that_are_reset_are_no_work_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0
    monkeypatch.setattr(grpc_server, "CALLS_OF_CONNECTION", 10)
    async with served() as server:
        inner = server._not_yet

        async def counted(_: object, context: object) -> None:
            nonlocal begun
            begun += 1
            await inner(_, context)

        server._not_yet, server._engine = counted, None  # type: ignore[method-assign]  # of this server only

        def flood() -> None:
            with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
                connection.sendall(HELLO + b"".join(call(2 * number + 1, TALK, reset=True) for number in range(2000)))
                connection.sendall(frame(PING, 0, bytes(8)))
                next(content for kind, _, content in frames(connection) if kind == PING)

        await asyncio.to_thread(flood)
        assert begun < 1000


async def test_many_pings_end_the_connection() -> None:
    def goodbye() -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
            connection.sendall(HELLO + frame(PING, 0, bytes(8)) * 200)
            return next(content for kind, _, content in frames(connection) if kind == GOAWAY)

    async with served() as server:
        assert b"too_many_pings" in await asyncio.to_thread(goodbye)


async def test_open_health_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CALLS_OF_ADDRESS", 5)
    async with served() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(5)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for refused in (stub.Watch(request), stub.Watch(request)):
            with pytest.raises(grpc.aio.AioRpcError, match=r"5 health calls are open"):
                await refused.read()
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING  # has a limit of its own
        await server.drain()
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        await eventually(lambda: not any(server._health._open.values()))
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await stub.Check(health_pb2.HealthCheckRequest(service="x"))
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_calls_without_a_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.2)
    async with served() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for path in (WATCH, f"{health.PATH}Check"):
            silent = channel.stream_stream(path)()
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wrong = channel.unary_unary(WATCH)(b"\xff")
        assert await wrong.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not any(server._health._open.values())


def test_limits_leave_half_of_the_descriptors_to_the_log() -> None:
    assert port_limits(4096, 0, 65536) == ((3584, 1792), (512, 256))
    assert port_limits(4096, 0, 1024) == ((448, 224), (64, 32))
    assert port_limits(4096, 100, 65536) == ((3584, 100), (512, 100))
    assert port_limits(4096, 100, 1024) == ((448, 100), (64, 64))
    assert port_limits(1, 0, 1024) == ((7, 3), (1, 1))
    assert port_limits(4096, 0, 0) == (NO_LIMITS, NO_LIMITS)


def test_a_subnet_of_ipv6_counts_as_one_address() -> None:
    hosts = ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1", "fe80::1%eth0")
    assert [client_address(host) for host in hosts] == [
        "10.0.0.1", "10.0.0.1", "2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64", "fe80::/64",
    ]  # fmt: skip


def test_a_service_may_open_as_many_files_as_its_hard_limit_says() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
        "from broker_io.system import SystemNetwork\n"
        "print(SystemNetwork().descriptors(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["300", "300", "300"]


def test_a_number_that_now_belongs_to_another_file_is_not_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listening.accept()[0] as accepted:
            assert current().network.trim(port + 1, 0) == 0
            assert not _shut_down(accepted.fileno(), port, "127.0.0.3")
            assert not _shut_down(accepted.fileno(), port + 1, "127.0.0.1")
            assert not _shut_down(listening.fileno(), port, "127.0.0.1")
            client.setblocking(False)
            assert not has_ended(client)
            assert current().network.trim(port, 0) == 1
            accepted.setblocking(True)
            client.settimeout(30)
            assert client.recv(1) == b""
            assert client.fileno() >= 0
            assert accepted.fileno() >= 0
