"""A committed reader for asyncio: reading goes on in a thread, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from broker_io.errors import Error
from broker_io.port import Broker
from txnbuffer.checks import check_limit
from txnbuffer.client.closing import ClosedOnExit, opened
from txnbuffer.client.read_topics import Start
from txnbuffer.client.reader import CommittedReader, Lag
from txnbuffer.client.records import RecordBatch
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")

POLL = 0.5
"""Seconds of one wait in the thread, so that closing is prompt."""


class AsyncReader(ClosedOnExit):
    """Hands out batches of visible records, each to one task; a read that was cancelled loses none of them."""

    def __init__(self, reader: CommittedReader, thread: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._thread = thread
        self._turn = asyncio.Lock()
        self._reading: asyncio.Future[RecordBatch | None] | None = None
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        broker: Callable[[], Broker],
        topics: str | Sequence[str],
        start: Start | Mapping[str, Start],
        isolation: str,
    ) -> AsyncReader:
        """Open a reader in a thread of its own. Raises what CommittedReader raises."""
        thread = ThreadPoolExecutor(1, "txnbuffer-reader")
        try:
            reader = await opened(thread, lambda: CommittedReader(broker(), topics, start=start, isolation=isolation))
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(reader, thread)

    async def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """The next visible records of one topic, at most `limit`; None if there were none for `timeout` seconds.

        Tasks that read at the same time take turns.
        """
        check_limit(limit)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return None
        try:
            return await self._read(limit, deadline)
        finally:
            self._turn.release()

    async def _read(self, limit: int, deadline: float) -> RecordBatch | None:
        loop = asyncio.get_running_loop()
        while True:
            left = deadline - loop.time()
            if self._reading is None:
                read = partial(self._reader.read, limit=limit, timeout=max(min(left, POLL), 0.0))
                self._reading = self._call(read)
            try:
                batch = await asyncio.shield(self._reading)
            except Error as error:
                if error.retryable:
                    self._reading = None
                raise
            self._reading = None
            if batch is not None and len(batch) > limit:  # it was read for somebody who wanted more, and was cancelled
                self._reading = loop.create_future()
                self._reading.set_result(batch.take(slice(limit, None)))
                batch = batch.take(slice(limit))
            if batch is not None or left <= 0:
                return batch

    async def __aiter__(self) -> AsyncIterator[RecordBatch]:
        """Batches without end; stop by leaving the loop."""
        while True:
            if (batch := await self.read(timeout=60.0)) is not None:
                yield batch

    async def lag(self) -> dict[str, Lag]:
        """How far each topic is behind the end of its log at this moment."""
        return await self._call(self._reader.lag)

    async def close(self) -> None:
        """End it, behind a read that goes on; who is cancelled meanwhile need not close it again."""
        if self._closing is None:
            self._closing = self._call(self._reader.close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Raises InvalidRequest."""
        if self._closing is not None:
            raise InvalidRequest("the reader was closed: open another one")
        return asyncio.get_running_loop().run_in_executor(self._thread, function)
