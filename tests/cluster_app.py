"""A cluster in memory with an engine beside it, and an application that writes records to it straight."""

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
from txnbuffer.service.engine import Engine


class App:
    """Writes to topics through a connection of its own; its transactions go through a session."""

    def __init__(self, broker: Broker, session: RawSession, ids: range) -> None:
        self.broker = broker
        self.session = session
        self.ids = iter(ids)
        self._writers: dict[str, Any] = {}

    async def write(
        self, topic: str, ids: Sequence[int], value: bytes = b"v", seq: int = 1, size: int = 1
    ) -> Positions:
        """`size` records for each transaction."""
        writer = self._writers.get(topic)
        if writer is None:
            writer = self._writers[topic] = self.broker.writer(topic)
        return await asyncio.wrap_future(writer.append(transactional(ids, value, seq, size)))

    def forget_writers(self) -> None:
        """Those of a topic that was deleted are of no use for another one."""
        self._writers.clear()

    async def commit(self, txn: int, *topics: str, size: int = 1) -> Any:
        return await self.session.commit(txn, topics, [size] * len(topics))


async def app_on(engine: Engine, broker: Broker, *topics: str, ids: int = 100) -> App:
    """An application that may write to topics."""
    session = RawSession(InProcess(engine))
    await session.hello()
    await session.register(*topics)
    return App(broker, session, await session.lease(ids))


@asynccontextmanager
async def cluster_engine(cluster: MemoryBroker, **options: Any) -> AsyncIterator[tuple[Engine, MemoryBroker]]:
    """An engine in cluster mode, and its connection to the cluster, to inject faults."""
    with cluster.connect() as broker:
        async with engine_on(broker, shared=True, **options) as engine:
            yield engine, broker
