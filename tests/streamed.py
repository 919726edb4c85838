"""Change streams in tests: clients of an engine in this process, and tables built by readers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from txnbuffer import ChangeBatch, ChangeStream, Client, Rollback
from txnbuffer.client.admin_clients import AdminClients, AdminLink
from txnbuffer.client.session.embedded import EngineAdminLink, EngineLink, EngineStreamLink
from txnbuffer.client.session.session import ClientSession, Link
from txnbuffer.client.streams.streams import ShardStreams, StreamLink
from txnbuffer.model import TxnId
from txnbuffer.service.engine.engine import Engine

Table = dict[bytes | None, bytes]


@asynccontextmanager
async def client_of(engine: Engine, broker: Any) -> AsyncIterator[Client]:
    async def dial() -> Link:
        return EngineLink(engine)

    async def stream_connector() -> StreamLink:
        return EngineStreamLink(engine)

    session = ClientSession(dial, 10.0)
    await session.open()
    client = Client(session, lambda: broker, None)

    async def dial_admin() -> AdminLink:
        return EngineAdminLink(engine)

    client.streams = ShardStreams([stream_connector], client.session.max_unavailable)
    client.admin = AdminClients([dial_admin], client.session.max_unavailable)
    try:
        yield client
    finally:
        await client.close()


async def write(client: Client, topic: str, rows: dict[str, str | None]) -> TxnId:
    """Write one transaction, where None deletes a key; its id."""
    async with client.transaction() as txn:
        for key, value in rows.items():
            if value is None:
                await txn.delete(topic, key)
            else:
                await txn.send(topic, value, key=key)
        await txn.commit(wait_visible=True)
        return txn.id


class Follower:
    """A reader of a stream that builds a table; `history` has each complete table by its seqno."""

    def __init__(self, stream: ChangeStream) -> None:
        self.stream = stream
        self.table: Table = {}
        self.history: dict[int, Table] = {0: {}}
        self.seqnos: list[int] = []
        self.rollbacks: list[int] = []

    async def read(self) -> ChangeBatch | Rollback | None:
        item = await self.stream.next(timeout=120.0)
        if isinstance(item, Rollback):
            self.rollbacks.append(item.seqno)
            point = max(seqno for seqno in self.history if seqno <= item.seqno)
            self.table = dict(self.history[point])
            self.history = {seqno: table for seqno, table in self.history.items() if seqno <= point}
            await self.stream.rolled_back(point)
        elif item is not None:
            for row in item:
                self.seqnos.append(row.seqno)
                if row.value is None:
                    self.table.pop(row.key, None)
                else:
                    self.table[row.key] = row.value
            if item.complete:
                self.history[item.token.seqno] = dict(self.table)
        return item

    async def until(self, seqno: int) -> None:
        """Read until the table is complete up to a seqno."""
        while True:
            item = await self.read()
            assert item is not None
            if isinstance(item, ChangeBatch) and item.complete and item.token.seqno >= seqno:
                return

    async def to_end(self) -> None:
        while await self.read() is not None:
            pass
