"""A cluster in memory with an engine in cluster mode, and an application that writes records to the cluster itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from raw_session import InProcess, RawSession, transactional
from service_setup import engine_on

from broker_io.memory import MemoryBroker
from broker_io.port import Broker
from broker_io.position import Positions
from txnbuffer.service.engine.engine import Engine


class App:
    """An application that writes records over its own connection; its transactions go through a session."""

    def __init__(self, broker: Broker, session: RawSession, ids: range) -> None:
        self.broker = broker
        self.session = session
        self.ids = iter(ids)
        self._writers: dict[str, Any] = {}

    async def write(
        self, topic: str, ids: Sequence[int], value: bytes = b"v", seq: int = 1, size: int = 1
    ) -> Positions:
        """Write `size` records of each transaction."""
        writer = self._writers.get(topic)
        if writer is None:
            writer = self._writers[topic] = self.broker.writer(topic)
        return await asyncio.wrap_future(writer.append(transactional(ids, value, seq, size)))

    def forget_writers(self) -> None:
        """Drop all writers: those of a deleted topic can't write to its successor."""
        self._writers.clear()

    async def commit(self, txn: int, *topics: str, size: int = 1) -> Any:
        return await self.session.commit(txn, topics, [size] * len(topics))


async def app_on(engine: Engine, broker: Broker, *topics: str, ids: int = 100) -> App:
    """An application with registered topics."""
    session = RawSession(InProcess(engine))
    await session.hello()
    await session.register(*topics)
    return App(broker, session, await session.lease(ids))


@asynccontextmanager
async def cluster_engine(cluster: MemoryBroker, **options: Any) -> AsyncIterator[tuple[Engine, MemoryBroker]]:
    """An engine in cluster mode, and its connection to the cluster for faults."""
    with cluster.connect() as broker:
        async with engine_on(broker, cluster_mode=True, **options) as engine:
            yield engine, broker
