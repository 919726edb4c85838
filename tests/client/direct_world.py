"""A cluster in memory, a service in cluster mode, and clients that write to the cluster themselves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from client_world import World, inside

from broker_io.memory import MemoryBroker
from txnbuffer import Outcome, Transaction
from txnbuffer.client.client import Client
from txnbuffer.client.connection import client_on
from txnbuffer.rpc.frames import ClientFrame


class DirectWorld(World):
    """`broker`: the service's handle; `handles`: one for each client. `frames`: those that were sent."""

    cluster_mode = True

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[MemoryBroker] = []

    async def client(self, max_unavailable: float = 60.0) -> Client:  # type: ignore[override]  # no other connector
        handle = self.broker.connect()
        self.handles.append(handle)
        resources = AsyncExitStack()
        client = await client_on(handle, [self._dial], None, max_unavailable, resources)
        client.resources = resources
        resources.push_async_callback(client.session.close)
        self.closers.append(resources.aclose)
        return client

    @property
    def frames(self) -> list[ClientFrame]:
        return [frame for link in self.links for frame in link.sent]


in_direct_world = inside(DirectWorld)


async def commit_one(client: Client, topic: str, value: bytes) -> Transaction:
    async with client.transaction() as txn:
        await txn.send(topic, value)
    return txn


async def ended(client: Client, txn: Transaction) -> Outcome:
    while (outcome := await client.outcome(txn.id)) is None:
        await asyncio.sleep(0.01)
    return outcome
