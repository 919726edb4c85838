"""A client meets the service of another log, at an address that was given wrongly or is used again: nothing is done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from client_world import until, values

from broker_io.memory import MemoryBroker
from broker_io.rpc.channel import VERSION_METADATA, Endpoint, LogIdentity
from txnbuffer import Error, ServiceUnavailable
from txnbuffer.client.client import Client
from txnbuffer.client.connection import client_on, connect_to_owner, open_admin, open_session, open_streams
from txnbuffer.client.session.session import ClientSession, Connector, Link
from txnbuffer.client.streams.streams import ShardStreams, StreamLink
from txnbuffer.coordinator.decisions import TOPIC
from txnbuffer.rpc.discovery import ServiceDiscovery, log_identity_of
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

CONNECTING = 20.0
SHORT = 0.3
"""Seconds of patience of a client that is to lose it."""


class Served:
    """A log and its service; `address` is where it listens, `told` what its owner entry tells instead."""

    def __init__(self, *, cluster_mode: bool = True) -> None:
        self.broker = MemoryBroker()
        self.address = ""
        self.engine: Engine
        self._cluster_mode = cluster_mode

    @asynccontextmanager
    async def running(self, told: str | None = None) -> AsyncIterator[Served]:
        server = GrpcServer(Limits(), max_clients=10)
        await server.start("127.0.0.1:0")
        self.address = f"127.0.0.1:{server.port}"
        self.engine = await Engine.start(self.broker, cluster_mode=self._cluster_mode, address=told or self.address)
        await server.serve(self.engine, ServiceAdmin(self.engine))
        try:
            yield self
        finally:
            self.engine.streams.close()
            for connection in self.engine.connections:
                connection.close()
            await server.stop()
            await self.engine.stop()

    @property
    def log(self) -> LogIdentity:
        return log_identity_of(self.broker, "n", TOPIC)

    @property
    def untouched(self) -> bool:
        """Whether no client came to anything here."""
        return not [*self.engine.coordinator.sessions()] and not seen(self)


def dialling(log: LogIdentity) -> Callable[[str], Awaitable[Link]]:
    async def dial(target: str) -> Link:
        return await open_session(Endpoint(target), CONNECTING, log)

    return dial


@asynccontextmanager
async def client_of(log: Served, dial: Connector, max_unavailable: float) -> AsyncIterator[Client]:
    async with AsyncExitStack() as resources:
        client = await client_on(log.broker.connect(), [dial], None, max_unavailable, resources)
        resources.push_async_callback(client.session.close)
        yield client


def seen(log: Served) -> list[bytes | None]:
    """What is committed there."""
    return values(log.broker, "d") if "d" in log.broker.topics() else []


async def commit(client: Client, value: bytes) -> None:
    async with client.transaction() as txn:
        await txn.send("d", value)


async def test_a_service_that_was_given_is_of_another_log() -> None:
    ours, other = Served(), Served()
    async with ours.running(), other.running():
        dial = partial(dialling(ours.log), other.address)
        async with client_of(ours, dial, SHORT) as client:
            with pytest.raises(ServiceUnavailable, match="this service serves another log"):
                await commit(client, b"lost")
        assert other.untouched
        assert not seen(ours)


async def test_the_next_owner_is_found_while_another_logs_service_answers_at_the_address_of_the_one_before() -> None:
    ours, other = Served(), Served()
    async with other.running(), AsyncExitStack() as owner:
        await owner.enter_async_context(ours.running(told=other.address))
        refused = 0
        log = ours.log

        async def dial(target: str) -> Link:
            nonlocal refused
            refused += target == other.address
            return await open_session(Endpoint(target), CONNECTING, log)

        async with client_of(ours, partial(connect_to_owner, ServiceDiscovery(ours.broker, "n"), dial), 60.0) as client:
            await until(lambda: refused == 2)
            assert other.untouched
            await owner.aclose()
            async with ours.running():
                await commit(client, b"one")
                await until(lambda: seen(ours) == [b"one"])
        assert other.untouched


async def test_a_client_of_a_service_stays_with_the_log_that_it_began_with() -> None:
    first, second = Served(cluster_mode=False), Served(cluster_mode=False)
    async with first.running(), second.running():
        target, log = first, LogIdentity()

        async def dial() -> Link:
            return await open_session(Endpoint(target.address), CONNECTING, log)

        session = ClientSession(dial, SHORT)
        await session.open()
        client = Client(session, lambda: target.broker, None)
        await commit(client, b"one")
        target = second
        for connection in first.engine.connections:
            connection.close(ServiceUnavailable("goes"))
        with pytest.raises(Error, match="this service serves another log"):
            while True:
                await commit(client, b"two")
        assert second.untouched
        target = first
        await until(lambda: session.core.welcomed)
        await commit(client, b"three")
        await client.close()
        assert seen(first)[-1] == b"three"
        assert not seen(second)


class Silent(LogIdentity):
    """Does not say which log it wants, as if the service took no notice."""

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        await super().metadata()
        return VERSION_METADATA


async def test_what_a_service_says_of_its_log_is_looked_at_too() -> None:
    ours, other = Served(), Served()
    async with ours.running(), other.running():
        silent = Silent(lambda: ours.engine.log)
        async with client_of(ours, partial(dialling(silent), other.address), SHORT) as client:
            with pytest.raises(ServiceUnavailable, match="serves another log than this client's"):
                await commit(client, b"lost")
        async with client_of(ours, partial(dialling(silent), ours.address), 60.0) as client:
            await commit(client, b"kept")
        assert not seen(other)


@pytest.mark.parametrize("kind", [LogIdentity, Silent], ids=["the service refuses", "the client refuses"])
async def test_streams_are_not_of_another_log(kind: type[LogIdentity]) -> None:
    ours, other = Served(), Served()
    async with ours.running(), other.running():
        log = kind(lambda: ours.engine.log)
        way = partial(dialling(ours.log), ours.address)
        async with (
            client_of(ours, way, SHORT) as client,
            client_of(other, partial(dialling(other.log), other.address), 60.0) as writer,
        ):
            await commit(writer, b"theirs")

            async def stream_connector() -> StreamLink:
                return await open_streams(Endpoint(other.address), CONNECTING, log)

            client.streams = ShardStreams([stream_connector], client.session.max_unavailable)
            async with client.stream("d") as stream:
                with pytest.raises(ServiceUnavailable, match="another log"):
                    await stream.next()


async def test_operators_questions_are_not_asked_of_another_log() -> None:
    ours, other = Served(), Served()
    async with ours.running(), other.running():
        for served in (ours, other):
            link = await open_admin(Endpoint(served.address), CONNECTING, ours.log)
            if served is ours:
                assert await link.ask("Cursors", {}) == []
            else:
                with pytest.raises(ServiceUnavailable, match="this service serves another log"):
                    await link.ask("Cursors", {})
            await link.close()


async def test_a_namespace_that_was_never_served_has_no_log() -> None:
    log = log_identity_of(MemoryBroker(), "public/n", TOPIC)
    with pytest.raises(ServiceUnavailable, match="no service has ever taken over namespace public/n: run"):
        await log.metadata()


async def test_a_log_that_cant_be_asked_for_is_asked_for_again() -> None:
    answers = iter([RuntimeError("what is this"), None])

    class Odd(MemoryBroker):
        def incarnation(self, topic: str) -> str:
            if (error := next(answers)) is not None:
                raise error
            return "i"

    log = log_identity_of(Odd(), "n", TOPIC)
    with pytest.raises(ServiceUnavailable, match="what is this"):
        await log.metadata()
    assert await log.metadata() == (*VERSION_METADATA, ("txnbuffer-log", "i"))
