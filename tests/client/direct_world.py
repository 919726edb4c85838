"""A cluster in memory, a service in cluster mode, and clients that write to the cluster themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from client_world import BreakingLink, never, run

from broker_io.memory import MemoryBroker
from snapshots.errors import OwnershipLost
from txnbuffer import Outcome, Transaction
from txnbuffer.client.client import Client
from txnbuffer.client.connection import client_on
from txnbuffer.client.embedded import EngineLink
from txnbuffer.client.session import Link
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.service.engine import Engine


class DirectWorld:
    """`broker`: the service's handle; `handles`: one for each client. `frames`: those that were sent.

    `before`, `after` and `late` as in `client_world.World`.
    """

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.engine: Engine
        self.links: list[BreakingLink] = []
        self.handles: list[MemoryBroker] = []
        self.before: Callable[[ClientFrame], bool] = never
        self.after: Callable[[ClientFrame], bool] = never
        self.late = 0.0
        self.reachable = True
        self._clients: list[AsyncExitStack] = []

    async def client(self, max_unavailable: float = 60.0) -> Client:
        handle = self.broker.connect()
        self.handles.append(handle)
        resources = AsyncExitStack()
        client = await client_on(handle, [self._dial], None, max_unavailable, resources)
        client.resources = resources
        resources.push_async_callback(client.session.close)
        self._clients.append(resources)
        return client

    @property
    def frames(self) -> list[ClientFrame]:
        return [frame for link in self.links for frame in link.sent]

    def cut(self) -> None:
        for link in self.links:
            link.cut()

    async def restart(self) -> None:
        """Another owner takes over."""
        old = self.engine
        self.engine = await Engine.start(self.broker, cluster_mode=True)
        self.cut()
        with contextlib.suppress(OwnershipLost):
            await old.stop()

    async def _dial(self) -> Link:
        if not self.reachable:
            raise ServiceUnavailable("nobody there")
        self.links.append(BreakingLink(EngineLink(self.engine), self))
        return self.links[-1]

    async def __aenter__(self) -> DirectWorld:
        self.engine = await Engine.start(self.broker, cluster_mode=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.before = self.after = never
        for resources in self._clients:
            await resources.aclose()
        await self.engine.stop()
        self.broker.close()


def in_direct_world(test: Callable[[DirectWorld], Awaitable[None]]) -> None:
    """Run a test in a new world."""

    async def inside() -> None:
        async with DirectWorld() as world:
            await test(world)

    run(inside())


async def commit_one(client: Client, topic: str, value: bytes) -> Transaction:
    async with client.transaction() as txn:
        await txn.send(topic, value)
    return txn


async def ended(client: Client, txn: Transaction) -> Outcome:
    while (outcome := await client.outcome(txn.id)) is None:
        await asyncio.sleep(0.01)
    return outcome
