"""Engines for tests: on any broker, with a session, and the records that readers see."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from raw_session import InProcess, RawSession, stop

from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer
from txnbuffer.service.standby.replication import Replication

QUICK = CoordinatorConfig(
    transaction_timeout=0.3, max_transaction_timeout=5.0, session_timeout=0.3, low_water_mark_interval=0.05
)


@asynccontextmanager
async def engine_on(broker: Broker, **options: Any) -> AsyncIterator[Engine]:
    engine = await Engine.start(broker, **options)
    try:
        yield engine
    finally:
        await stop(engine)


@asynccontextmanager
async def starting_service(port: int = 0) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """The address of a listening service, and the function that admits clients."""
    async with engine_on(MemoryBroker()) as engine:
        server = GrpcServer(engine.limits, max_clients=10, methods=Replication().methods())
        await server.start(f"127.0.0.1:{port}")
        try:
            yield f"txnbuf://127.0.0.1:{server.port}", functools.partial(server.serve, engine, ServiceAdmin(engine))
        finally:
            await server.stop()


@asynccontextmanager
async def listening(engine: Engine, **options: Any) -> AsyncIterator[GrpcServer]:
    """A gRPC server of an engine; the options are those of GrpcServer."""
    server = GrpcServer(engine.limits, **options)
    await server.start("127.0.0.1:0")
    await server.serve(engine, ServiceAdmin(engine))
    try:
        yield server
    finally:
        for connection in engine.connections:
            connection.close()
        await server.stop()


async def session_on(engine: Engine, *topics: str, ids: int = 100) -> tuple[RawSession, range]:
    """A session with registered topics, and its leased ids."""
    session = RawSession(InProcess(engine))
    await session.hello()
    await session.register(*topics)
    return session, await session.lease(ids)


def visible(broker: Broker, topic: str) -> Counter[bytes | None]:
    """The values of committed records, with counts."""
    found: Counter[bytes | None] = Counter()
    with CommittedReader(broker, topic) as reader:
        while (batch := reader.read()) is not None:
            found.update(batch.messages.values)
    return found


async def eventually(reached: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.005)
