"""The loop between a change stream and a sink: what a sink holds is always what the topic was at its token.

A sink keeps rows and resume token together, so each mutation is there once, whoever is killed when. What waits goes
into one write that ends with a complete snapshot; a snapshot that is large goes in parts.

Topics as tables of a SQLite file, kept up to date.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from txnbuffer.client.client import Client
from txnbuffer.client.cursors import CursorLease
from txnbuffer.client.streams import ChangeBatch, ChangeStream, Rollback
from txnbuffer.errors import ForeignSink, ForeignToken, InvalidRequest, StreamTrimmed
from txnbuffer.sinks.sqlite import SQLiteFile, SQLiteTable
from txnbuffer.streams.token import ResumeToken

Result = TypeVar("Result")

MAX_ROWS = 50_000
MAX_BYTES = 16 * 1024 * 1024
MAX_WAIT = 1.0
"""One write takes so many mutations or bytes, and waits so many seconds for the end of a snapshot."""

POLL = 0.25
"""Seconds of one wait, so that whoever asks the loop to stop is heard."""


class Sink(Protocol):
    """What a topic can be poured into. Calls come from threads, one at a time; none follows one that raised.

    `name`: what messages call it.
    """

    name: str

    def begin(self) -> ResumeToken | None:
        """Where the sink stands; None if it holds nothing yet. Called first, and may be called again."""

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        """Keep what the batches hold and the token of the last one: all of it durably, or nothing.

        At least one batch; either the last one is complete, or none is.
        """

    def roll_back(self, rollback: Rollback) -> int:
        """Undo all behind a seqno at which the sink was complete, the highest it can, at or below `rollback.seqno`.

        That seqno; 0 after discarding all, whereupon it is filled anew from the oldest mutation there is.
        """


@dataclass(slots=True)
class SinkProgress:
    """How far a sink has come: `mutations` and `rollbacks` in this run, `token` None while the sink holds nothing.

    `caught_up`: with the last write there was nothing newer.
    """

    topic: str
    mutations: int = 0
    rollbacks: int = 0
    token: ResumeToken | None = None
    caught_up: bool = False


Tell = Callable[[SinkProgress], None]


async def fill(
    client: Client,
    topic: str,
    sink: Sink,
    *,
    to: int | str | None = None,
    stop: asyncio.Event | None = None,
    tell: Tell | None = None,
    cursor: str | None = None,
) -> SinkProgress:
    """Pour a topic into a sink from where that stands, until `to` (a seqno, "now") is reached or `stop` is set.

    `tell` hears of every write and rollback. `cursor` names a durable cursor, made if there is none: it keeps in the
    log what the sink does not hold yet, and follows once that is written. Raises what the stream and the sink raise,
    and ForeignSink for a sink that was filled from another cluster; whatever is raised, calling it again goes on.
    """
    filling = SinkRunner(sink, SinkProgress(topic), stop or asyncio.Event(), tell or _tell_nobody)
    start = filling.filled.token = await in_thread(sink.begin)
    filling.cluster = "" if start is None else start.cluster
    hold = filling.hold = None if cursor is None else CursorLease(client.cursors, topic, cursor)
    try:
        if hold is not None:
            await hold.begin("beginning" if start is None or start.seqno == 0 else start)
        while True:
            from_ = "beginning" if start is None or start.seqno == 0 else start
            async with client.stream(topic, from_=from_, to=to) as stream:
                if await filling.run(stream):
                    return filling.filled
            start = None  # all was discarded
    except ForeignToken as error:
        raise ForeignSink(f"{sink.name} was filled from elsewhere ({error}): fill another one") from None
    finally:
        if hold is not None:
            await hold.close()


class SinkRunner:
    """One sink that is being filled; `cluster` is the one whose topic it holds, "" while it holds nothing."""

    def __init__(self, sink: Sink, filled: SinkProgress, stop: asyncio.Event, tell: Tell) -> None:
        self.filled = filled
        self.cluster = ""
        self.hold: CursorLease | None = None
        self._sink = sink
        self._stop = stop
        self._tell = tell
        self._held: list[ChangeBatch] = []
        self._ended = False
        self._rollback: Rollback | None = None

    async def run(self, stream: ChangeStream) -> bool:
        """Write what comes until the end; False where the stream has to begin anew."""
        while not (self._ended or self._stop.is_set()):
            if batches := await self._gather(stream):
                await self._write(batches)
            if self._rollback is not None:
                seqno = await self._roll_back(self._rollback)
                if seqno == 0:
                    return False
                await stream.rolled_back(seqno)
        return True

    async def _gather(self, stream: ChangeStream) -> list[ChangeBatch]:
        """What to write at once. What began a snapshot that goes on is held for the next write, if there is more."""
        batches, self._held = self._held, []
        rows, size = sum(map(len, batches)), sum(batch.bytes for batch in batches)
        now = asyncio.get_running_loop().time
        deadline = now() + MAX_WAIT
        while rows < MAX_ROWS and size < MAX_BYTES:
            waits = POLL if not batches else 0.0 if batches[-1].complete else max(deadline - now(), 0.0)
            try:
                item = await stream.next(timeout=waits)
            except TimeoutError:
                break
            if not isinstance(item, ChangeBatch):
                self._ended, self._rollback = item is None, item
                break
            batches.append(item)
            rows, size = rows + len(item), size + item.bytes
        whole = max((at for at, batch in enumerate(batches, 1) if batch.complete), default=0)
        if self._rollback is not None:
            return batches[:whole]
        if whole:
            batches, self._held = batches[:whole], batches[whole:]
        return batches

    async def _write(self, batches: list[ChangeBatch]) -> None:
        last = batches[-1]
        if self.cluster not in ("", last.token.cluster):
            where = f"topic {last.topic!r} of cluster {self.cluster}, not {last.token.cluster}"
            raise ForeignSink(f"{self._sink.name} holds {where}: fill another one")
        self.cluster = last.token.cluster
        await in_thread(self._sink.write, batches)
        self.filled.mutations += sum(map(len, batches))
        self.filled.token, self.filled.caught_up = last.token, last.caught_up
        self._tell(self.filled)
        if self.hold is not None:
            self.hold.move(last.token)

    async def _roll_back(self, rollback: Rollback) -> int:
        self._rollback = None
        seqno = await in_thread(self._sink.roll_back, rollback)
        self.filled.rollbacks += 1
        self.filled.token, self.filled.caught_up = rollback.token.rolled_back(seqno), False
        self._tell(self.filled)
        return seqno


def _tell_nobody(filled: SinkProgress) -> None:
    pass


async def in_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Call it in a thread; whoever is cancelled meanwhile still waits for its end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


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
) -> list[SinkProgress]:
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
) -> SinkProgress:
    try:
        return await fill(client, table.topic, table, to=to, stop=stop, tell=tell, cursor=cursor)
    except StreamTrimmed as error:
        raise StreamTrimmed(f"{table.name} lacks what is gone ({error}): fill it anew") from None
