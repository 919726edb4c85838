"""A committed reader for asyncio: reading goes on in a thread, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from broker_io.port import Broker
from txnbuffer.client.closing import ClosedOnExit
from txnbuffer.client.read_topics import Start
from txnbuffer.client.reader import CommittedReader, Lag
from txnbuffer.client.records import RecordBatch

Result = TypeVar("Result")

POLL = 0.5
"""Seconds of one wait in the thread, so that closing is prompt."""


class AsyncReader(ClosedOnExit):
    """Hands out batches of visible records; a read that was cancelled loses none of them."""

    def __init__(self, reader: CommittedReader, thread: ThreadPoolExecutor) -> None:
        self._reader = reader
        self._thread = thread
        self._reading: asyncio.Future[RecordBatch | None] | None = None

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
        loop = asyncio.get_running_loop()
        try:
            reader = await loop.run_in_executor(
                thread, lambda: CommittedReader(broker(), topics, start=start, isolation=isolation)
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(reader, thread)

    async def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """The next visible records of one topic; None if there were none for `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            left = deadline - loop.time()
            if self._reading is None:
                read = partial(self._reader.read, limit=limit, timeout=max(min(left, POLL), 0.0))
                self._reading = loop.run_in_executor(self._thread, read)
            batch = await asyncio.shield(self._reading)
            self._reading = None
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
        await self._call(self._reader.close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
