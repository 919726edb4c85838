"""Shards of one cluster in memory: their engines, applications with transactions across shards, and readers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from raw_session import InProcess, RawSession, transactional
from service_setup import visible

from broker_io.errors import ServiceUnavailable
from broker_io.memory import MemoryBroker
from snapshots.shards import Shard, shard_of
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.client.client import Client
from txnbuffer.client.connection import client_on
from txnbuffer.client.session.embedded import EngineLink
from txnbuffer.client.session.session import Link
from txnbuffer.coordinator.messages import Commit
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import Abort
from txnbuffer.service.cluster.remote_shards import ShardMessages
from txnbuffer.service.engine.engine import Engine


def topics_of(shards: int, each: int = 1) -> list[list[str]]:
    """`each` topic names for each shard."""
    found: list[list[str]] = [[] for _ in range(shards)]
    number = 0
    while any(len(names) < each for names in found):
        name = f"topic-{number}"
        number += 1
        names = found[shard_of(name, shards)]
        if len(names) < each:
            names.append(name)
    return found


class Shards:
    """`engines` by shard; a killed one is None. `options` are those of every engine."""

    def __init__(self, count: int, cluster: MemoryBroker | None = None, **options: Any) -> None:
        self.count = count
        self.cluster = cluster or MemoryBroker()
        self.engines: list[Engine | None] = [None] * count
        self.brokers: list[MemoryBroker | None] = [None] * count
        self._options = options

    async def start(self, number: int) -> Engine:
        """Start an engine of a shard, which fences its predecessor."""
        broker = self.cluster.connect()
        engine = await Engine.start(broker, shard=Shard(number, self.count), cluster_mode=True, **self._options)
        self.engines[number], self.brokers[number] = engine, broker
        return engine

    async def kill(self, number: int) -> None:
        """End an engine as a crash does: its pending appends are lost."""
        engine, broker = self.engine(number), self.broker(number)
        self.engines[number] = self.brokers[number] = None
        broker.close()
        engine.fail(RuntimeError("killed"))
        await engine.stop()

    def engine(self, number: int) -> Engine:
        engine = self.engines[number]
        assert engine is not None, f"shard {number} is away"
        return engine

    def buffer(self, number: int, topic: str) -> TransactionBuffer:
        """The buffer of a topic in the engine of its shard."""
        tail = self.engine(number).topics.by_name[topic].followed
        assert tail is not None, f"{topic} is not followed"
        return tail.buffer

    def shard_messages(self, number: int) -> ShardMessages:
        return self.engine(number).effects.shard_messages

    def broker(self, number: int) -> MemoryBroker:
        """The broker handle of an engine, for faults."""
        broker = self.brokers[number]
        assert broker is not None, f"shard {number} is away"
        return broker

    async def close(self) -> None:
        for number, engine in enumerate(self.engines):
            if engine is not None:
                await engine.stop()
                self.broker(number).close()

    def visible(self, *topics: str) -> list[Counter[bytes | None]]:
        return [visible(self.cluster, topic) for topic in topics]

    async def client(self, home: int, max_unavailable: float = 60.0) -> Client:
        """A client whose transactions begin at a shard."""
        handle, resources = self.cluster.connect(), AsyncExitStack()
        resources.callback(handle.close)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random, "randrange", lambda _: home)
            client = await client_on(
                handle, [partial(self._dial, one) for one in range(self.count)], None, max_unavailable, resources
            )
        client.resources = resources
        return client

    async def _dial(self, number: int) -> Link:
        engine = self.engines[number]
        if engine is None:
            raise ServiceUnavailable(f"shard {number} is away")
        return EngineLink(engine)


@asynccontextmanager
async def shards_on(count: int = 2, **options: Any) -> AsyncIterator[Shards]:
    world = Shards(count, **options)
    try:
        for number in range(count):
            await world.start(number)
        yield world
    finally:
        await world.close()


class App:
    """An application whose transactions coordinator `most` decides."""

    def __init__(self, world: Shards, most: int, session: RawSession, ids: range) -> None:
        self.world = world
        self.most = most
        self.session = session
        self.ids = iter(ids)

    @classmethod
    async def on(cls, world: Shards, most: int, *topics: str, ids: int = 100) -> App:
        session = RawSession(InProcess(world.engine(most)))
        await session.hello()
        await session.register(*topics)
        return cls(world, most, session, await session.lease(ids))

    async def write(self, topic: str, ids: Sequence[int], value: bytes = b"v", seq: int = 1) -> None:
        writer = self.world.cluster.writer(topic)
        await asyncio.wrap_future(writer.append(transactional(ids, value, seq, most=self.most)))
        writer.close()

    async def commit(self, txn: int, *topics: str, wait_visible: bool = False) -> Any:
        plan = (TxnId(self.most, txn), topics, (1,) * len(topics), wait_visible)
        return await self.session.ask(commits=lambda request: (Commit(request, *plan),))

    async def abort(self, txn: int, *topics: str) -> Any:
        return await self.session.ask(aborts=lambda request: (Abort(request, TxnId(self.most, txn), topics),))
