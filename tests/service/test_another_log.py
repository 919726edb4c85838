"""The service of another log takes the address of the one before: no call of a client or a broker handle reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from service_process import kept_port
from service_setup import engine_on

from broker_io import open_broker
from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer import ServiceUnavailable, connect
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

ANOTHER = "another log"


@asynccontextmanager
async def service(broker: MemoryBroker, port: int) -> AsyncIterator[None]:
    async with engine_on(broker) as engine:
        server = GrpcServer(engine.limits, max_clients=10)
        await server.start(f"127.0.0.1:{port}")
        await server.serve(engine, ServiceAdmin(engine))
        try:
            yield
        finally:
            engine.streams.close()
            for connection in engine.connections:
                connection.close()
            await server.stop()


async def two_logs(port: int) -> tuple[MemoryBroker, MemoryBroker]:
    """Two logs with a topic "a"; the values of each are its name."""
    logs = MemoryBroker(), MemoryBroker()
    for log, value in zip(logs, (b"one", b"two"), strict=True):
        async with service(log, port), connect(f"txnbuf://127.0.0.1:{port}") as client, client.transaction() as txn:
            await txn.send("a", value)
    return logs


async def test_a_client_does_nothing_in_another_log():
    port = kept_port()
    one, two = await two_logs(port)
    async with AsyncExitStack() as first:
        await first.enter_async_context(service(one, port))
        async with connect(f"txnbuf://127.0.0.1:{port}", max_unavailable=0.5) as client:
            used, unread = await client.reader("a"), await client.reader("a")
            assert [record.value for record in await used.read(timeout=60) or ()] == [b"one"]
            await first.aclose()
            async with service(two, port):
                for call in (
                    lambda: client.reader("a"),
                    lambda: unread.read(timeout=0.1),
                    lambda: used.read(timeout=0.1),
                    lambda: client.send("a", b"lost"),
                    lambda: client.stream("a").next(),
                    lambda: client.cursors.add("a", "cursor"),
                ):
                    with pytest.raises(ServiceUnavailable, match=ANOTHER):
                        await call()
            async with service(one, port):  # the log of this client is back
                assert await used.read(timeout=0.1) is None
                assert [record.value for record in await unread.read(timeout=60) or ()] == [b"one"]


async def test_a_client_that_opens_its_first_reader_late_does_not_read_another_log():
    port = kept_port()
    one, two = await two_logs(port)
    async with AsyncExitStack() as first:
        await first.enter_async_context(service(one, port))
        async with connect(f"txnbuf://127.0.0.1:{port}", max_unavailable=0.5) as client:
            await first.aclose()
            async with service(two, port):
                with pytest.raises(ServiceUnavailable, match=ANOTHER):
                    await client.reader("a")


async def test_a_broker_handle_changes_nothing_in_another_log():
    port = kept_port()
    one, two = await two_logs(port)
    two.create_topic("free")
    topics = two.topics()

    def changes(broker: Broker) -> list[Callable[[], Any]]:
        return [
            broker.topics,
            lambda: broker.create_topic("made"),
            lambda: broker.delete_topic("free"),
            lambda: broker.last_position("a"),
            lambda: broker.roll("free"),
            lambda: broker.writer("free"),
            lambda: broker.reader("a"),
        ]

    async with service(one, port):
        broker = await asyncio.to_thread(open_broker, f"txnbuf://127.0.0.1:{port}", max_unavailable=0.5)
    async with service(two, port):
        for change in changes(broker):
            with pytest.raises(ServiceUnavailable, match=ANOTHER):
                await asyncio.to_thread(change)
    await asyncio.to_thread(broker.close)
    assert two.topics() == topics
