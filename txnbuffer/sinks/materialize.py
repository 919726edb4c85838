"""Topics as tables of a SQLite file, kept up to date."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from txnbuffer.client.client import Client
from txnbuffer.errors import InvalidRequest
from txnbuffer.sinks.filling import Filled, Tell, fill, in_thread
from txnbuffer.sinks.sqlite import SQLiteFile, SQLiteTable
from txnbuffer.streams.errors import StreamTrimmed


async def materialize(
    client: Client,
    topics: str | Sequence[str],
    path: str | os.PathLike[str],
    *,
    to: int | str | None = None,
    table: str | None = None,
    binary: bool = False,
    anew: bool = False,
    stop: asyncio.Event | None = None,
    tell: Tell | None = None,
    cursor: str | None = None,
) -> list[Filled]:
    """Keep the latest value of each key of topics in a SQLite file; `txnbuffer.sinks.sqlite` says what stands there.

    Until each topic has come to `to` (a seqno, "now"), or `stop` is set, else for ever. Killed and called again it
    goes on where it stood, each mutation once. `table` names the table of a single topic; `binary`: keys and values
    are blobs always; `anew`: the first write to new tables drops the old ones. `tell` hears how far a topic has come.
    `cursor` names a durable cursor of each topic that keeps in its log what the file does not hold yet. Raises what
    streams raise, ForeignSink, SinkLocked, SinkFailed, SinkFull, and StreamTrimmed where the log has lost what comes
    next.
    """
    names = [topics] if isinstance(topics, str) else [*topics]
    if len(set(names)) < len(names) or (table is not None and len(names) != 1):
        raise InvalidRequest("each topic has a table of its own: give each once, and a table's name for a single one")
    file = await in_thread(SQLiteFile, path)
    try:
        tables = [await in_thread(_table, file, name, table, binary, anew) for name in names]
        filling = [asyncio.ensure_future(_keep(client, one, cursor, to=to, stop=stop, tell=tell)) for one in tables]
        try:
            return await asyncio.gather(*filling)
        finally:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)
    finally:
        await in_thread(file.close)


def _table(file: SQLiteFile, topic: str, name: str | None, binary: bool, anew: bool) -> SQLiteTable:
    return file.table(topic, name, binary=binary, anew=anew)


async def _keep(
    client: Client,
    table: SQLiteTable,
    cursor: str | None,
    *,
    to: int | str | None,
    stop: asyncio.Event | None,
    tell: Tell | None,
) -> Filled:
    try:
        return await fill(client, table.topic, table, to=to, stop=stop, tell=tell, cursor=cursor)
    except StreamTrimmed as error:
        raise StreamTrimmed(f"{table.name} lacks what is gone ({error}): fill it anew") from None
