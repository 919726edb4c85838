"""Sink runner: writes change streams to a sink, exactly once; and `materialize`, which does so for a SQLite file

A sink stores its rows together with the resume token, so it always equals the topic at that token, and each mutation is
applied once, also after kills. One write takes all waiting batches up to the end of a complete snapshot; a snapshot
that is too large for one write is written in several.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeVar

from txnbuffer.client.client import Client
from txnbuffer.client.streams.cursors import CursorLease
from txnbuffer.client.streams.streams import ChangeBatch, ChangeStream, Rollback
from txnbuffer.errors import ForeignSink, ForeignToken, InvalidRequest, StreamTrimmed
from txnbuffer.progress import ProgressReporter, report
from txnbuffer.sinks.sqlite import SQLiteFile, SQLiteTable
from txnbuffer.streams.failover import ResumeToken

Result = TypeVar("Result")

MAX_ROWS = 50_000
MAX_BYTES = 16 * 1024 * 1024
MAX_WAIT = 1.0
"""Limits of one write: mutations, bytes, and seconds of waiting for the end of a snapshot."""

POLL = 0.25
"""Seconds of one wait, after which the runner checks whether it is to stop."""


class Sink(Protocol):
    """A destination of change streams. Calls come from threads, one at a time; after one that raised there are no more.

    `name` is used in error messages.
    """

    name: str

    def begin(self) -> ResumeToken | None:
        """The token of the stored rows, or None if the sink is empty. Called first; may be called again."""

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        """Store the mutations of the batches and the token of the last one, durably and atomically.

        There is at least one batch; the last one is complete, or none is.
        """

    def roll_back(self, rollback: Rollback) -> int:
        """Undo all mutations after the highest seqno up to `rollback.seqno` at which the sink was complete.

        Returns that seqno; 0 if all rows were discarded, after which the runner starts from the oldest mutation.
        """


@dataclass(slots=True)
class SinkProgress:
    """Progress of a sink: `mutations` and `rollbacks` of this run; `token` is None while the sink is empty.

    `caught_up`: the last write included the newest mutation of the topic.
    """

    topic: str
    mutations: int = 0
    rollbacks: int = 0
    token: ResumeToken | None = None
    caught_up: bool = False


OnProgress = Callable[[SinkProgress], None]


async def run_sink(
    client: Client,
    topic: str,
    sink: Sink,
    *,
    to: int | Literal["now"] | None = None,
    stop: asyncio.Event | None = None,
    on_progress: OnProgress | None = None,
    cursor: str | None = None,
) -> SinkProgress:
    """Write a topic to a sink from the sink's token on, until `to` (a seqno or "now") is reached or `stop` is set.

    `on_progress` is called after every write and rollback. `cursor` names a durable cursor, added if it is missing: it
    keeps in the log what the sink has not stored, and moves after each write. Raises what the stream and the sink
    raise, and ForeignSink for a sink with rows of another cluster; after any error another call resumes.
    """
    runner = SinkRunner(sink, SinkProgress(topic), stop or asyncio.Event(), on_progress or (lambda _: None))
    start = runner.progress.token = await in_thread(sink.begin)
    runner.cluster = "" if start is None else start.cluster
    lease = runner.lease = None if cursor is None else CursorLease(client.cursors, topic, cursor)
    try:
        if lease is not None:
            await lease.begin("beginning" if start is None or start.seqno == 0 else start)
        with report(f"{topic} to {sink.name}", "mutations") as runner.reporter:
            while True:
                from_ = "beginning" if start is None or start.seqno == 0 else start
                async with client.stream(topic, from_=from_, to=to) as stream:
                    if await runner.run(stream):
                        return runner.progress
                start = None  # all rows were discarded
    except ForeignToken as error:
        raise ForeignSink(f"{sink.name} has data of another log ({error}): use another sink") from None
    finally:
        if lease is not None:
            await lease.close()


@dataclass(eq=False)
class SinkRunner:
    """Runs one sink; `cluster` is the cluster of the stored topic, "" while the sink is empty."""

    _sink: Sink
    progress: SinkProgress
    _stop: asyncio.Event
    _on_progress: OnProgress
    cluster: str = ""
    lease: CursorLease | None = None
    reporter: ProgressReporter | None = None
    _pending: list[ChangeBatch] = field(default_factory=list)
    _ended: bool = False
    _rollback: Rollback | None = None

    async def run(self, stream: ChangeStream) -> bool:
        """Write batches until the end of the stream; False if the stream must start over."""
        while not (self._ended or self._stop.is_set()):
            if batches := await self._gather(stream):
                await self._write(batches)
                if self.reporter is not None:
                    self.reporter.update(batches[-1].token.seqno, stream.statistics().high_seqno)
            if self._rollback is not None:
                seqno = await self._roll_back(self._rollback)
                if seqno == 0:
                    return False
                await stream.rolled_back(seqno)
        return True

    async def _gather(self, stream: ChangeStream) -> list[ChangeBatch]:
        """The batches of one write. Batches of an incomplete snapshot wait for the next write, if there are others."""
        batches, self._pending = self._pending, []
        rows, size = sum(map(len, batches)), sum(batch.bytes for batch in batches)
        now = asyncio.get_running_loop().time
        deadline = now() + MAX_WAIT
        while rows < MAX_ROWS and size < MAX_BYTES:
            timeout = POLL if not batches else 0.0 if batches[-1].complete else max(deadline - now(), 0.0)
            try:
                item = await stream.next(timeout=timeout)
            except TimeoutError:
                break
            if not isinstance(item, ChangeBatch):
                self._ended, self._rollback = item is None, item
                break
            batches.append(item)
            rows, size = rows + len(item), size + item.bytes
        complete = max((at for at, batch in enumerate(batches, 1) if batch.complete), default=0)
        if self._rollback is not None:
            return batches[:complete]
        if complete:
            batches, self._pending = batches[:complete], batches[complete:]
        return batches

    async def _write(self, batches: list[ChangeBatch]) -> None:
        last = batches[-1]
        if self.cluster not in ("", last.token.cluster):
            where = f"topic {last.topic!r} of cluster {self.cluster}, not {last.token.cluster}"
            raise ForeignSink(f"{self._sink.name} holds {where}: use another sink")
        self.cluster = last.token.cluster
        await in_thread(self._sink.write, batches)
        self.progress.mutations += sum(map(len, batches))
        self.progress.token, self.progress.caught_up = last.token, last.caught_up
        self._on_progress(self.progress)
        if self.lease is not None:
            self.lease.move(last.token)

    async def _roll_back(self, rollback: Rollback) -> int:
        self._rollback = None
        seqno = await in_thread(self._sink.roll_back, rollback)
        self.progress.rollbacks += 1
        self.progress.token, self.progress.caught_up = rollback.token.rolled_back(seqno), False
        self._on_progress(self.progress)
        return seqno


async def in_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a thread; a cancelled caller still waits until the function has returned."""
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
    to: int | Literal["now"] | None = None,
    table: str | None = None,
    binary: bool = False,
    replace: bool = False,
    stop: asyncio.Event | None = None,
    on_progress: OnProgress | None = None,
    cursor: str | None = None,
) -> list[SinkProgress]:
    """Keep the latest value of each key of topics in a SQLite file; `txnbuffer.sinks.sqlite` describes the file.

    Runs until each topic has reached `to` (a seqno or "now") or `stop` is set, else for ever. Another call, also after
    a kill, resumes and applies each mutation once. `table` names the table of a single topic; `binary` stores all keys
    and values as BLOB; `replace` drops the old tables with the first write to the new ones. `on_progress` is called
    after every write and rollback. `cursor` names a durable cursor of each topic that keeps in its log what the file
    has not stored yet. Raises what streams raise, ForeignSink, SinkLocked, SinkFailed, SinkFull, and StreamTrimmed if
    the log no longer has the next mutations.
    """
    names = [topics] if isinstance(topics, str) else [*topics]
    if len(set(names)) < len(names) or (table is not None and len(names) != 1):
        raise InvalidRequest("give each topic once, and the name of a table only for a single topic")

    async def follow(sink: SQLiteTable) -> SinkProgress:
        try:
            return await run_sink(client, sink.topic, sink, to=to, stop=stop, on_progress=on_progress, cursor=cursor)
        except StreamTrimmed as error:
            raise StreamTrimmed(
                f"the log no longer has the next mutations of {sink.name} ({error}): build it again"
            ) from None

    file = await in_thread(SQLiteFile, path)
    try:
        open_table = partial(file.table, name=table, binary=binary, replace=replace)
        sinks = [await in_thread(open_table, name) for name in names]
        tasks = [asyncio.ensure_future(follow(sink)) for sink in sinks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await in_thread(file.close)
