"""Reads of the log for cursors that are behind memory: a bounded number at a time, each in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from broker_io.batch import Width
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Reader
from txnbuffer.errors import MutationsTrimmed, SeqnoGap
from txnbuffer.mutations import MutationBatch, ReadLog
from txnbuffer.recordset import pieces
from txnbuffer.service.limits import MIB
from txnbuffer.service.streaming.feed import Feed, Place, whole
from txnbuffer.service.topics import Topics
from txnbuffer.streams.errors import BackfillFailed

T = TypeVar("T")

ANSWER_BYTES = 4 * MIB
"""An answer holds about so much at most, so that readers take turns."""
READ_MESSAGES = 4096
READ_SECONDS = 30.0
"""In which a message that the log holds must be read."""


class Backfills:
    """`readers` reads go on at a time, the others wait. `done` is told of each feed that got an answer.

    `items` were read so far; `active` reads go on now.
    """

    def __init__(self, topics: Topics, readers: int, done: Callable[[Feed], None]) -> None:
        self.items = 0
        self.active = 0
        self._topics = topics
        self._done = done
        self._room = asyncio.Semaphore(readers)
        self._threads = ThreadPoolExecutor(readers, "txnbuffer-backfill")
        self._tasks: dict[tuple[Feed, int], asyncio.Task[None]] = {}

    def start(self, feed: Feed, request: ReadLog) -> None:
        key = feed, request.ticket
        task = self._tasks[key] = asyncio.get_running_loop().create_task(self._serve(feed, request))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def stop(self, feed: Feed, ticket: int) -> None:
        """Nobody wants the answer."""
        if (task := self._tasks.get((feed, ticket))) is not None:
            task.cancel()

    def close(self) -> None:
        for task in [*self._tasks.values()]:
            task.cancel()
        self._threads.shutdown(wait=False)

    @property
    def pending(self) -> int:
        """Reads that wait for their turn."""
        return len(self._tasks) - self.active

    async def _serve(self, feed: Feed, request: ReadLog) -> None:
        async with self._room:
            self.active += 1
            try:
                rows = await self._read(feed, request)
            except PositionTrimmed:
                first = feed.oldest(feed.tail.buffer.first_ledger)
                feed.manager.backfill_failed(request.ticket, MutationsTrimmed(request.first, first))
            except Error as error:
                feed.manager.backfill_failed(request.ticket, error)
            else:
                self.items += len(rows)
                feed.reached(request.cursor, rows)
                with contextlib.suppress(SeqnoGap):  # its cursor raises it
                    feed.manager.backfilled(request.ticket, rows)
            finally:
                self.active -= 1
        self._done(feed)

    async def _read(self, feed: Feed, request: ReadLog) -> MutationBatch:
        """The mutations that a request wants, or the first of them. Raises MutationsTrimmed and what reading raises."""
        place = feed.place(request)
        wanted = min(request.max_bytes, ANSWER_BYTES)
        found: list[MutationBatch] = []
        width = Width()
        start = whole(place.position)
        inclusive = place.inclusive or start != place.position
        reader: Reader = await self._in_thread(
            lambda: self._topics.broker.reader(feed.name, start, inclusive=inclusive)
        )
        try:
            while wanted > 0 and place.seqno <= request.last and not width.full:
                placed = await self._in_thread(lambda: reader.read(limit=READ_MESSAGES, timeout=READ_SECONDS))
                if placed is None:
                    raise BackfillFailed(f"topic {feed.name}: nothing was read behind {place.position}; try again")
                for piece in pieces(placed):
                    rows = await self._topics.apart([feed.name], feed.judged, piece, place)
                    place = Place(place.seqno, piece.positions.last, inclusive=False)
                    if rows is None:
                        continue
                    place = place._replace(seqno=rows.last + 1)
                    if (rows := _within(rows, request)) is not None:
                        found.append(rows)
                        width.add(rows.messages.properties, len(rows))
                        wanted -= rows.payload()
                    if wanted <= 0 or width.full:
                        break
        finally:
            self._threads.submit(reader.close)
        return MutationBatch.concat(found)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _within(rows: MutationBatch, request: ReadLog) -> MutationBatch | None:
    start, stop = max(request.first - rows.first, 0), min(request.last - rows.first + 1, len(rows))
    if start >= stop:
        return None
    return rows if (start, stop) == (0, len(rows)) else rows.take(slice(start, stop))
