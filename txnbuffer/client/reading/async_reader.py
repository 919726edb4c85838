"""The asyncio reader: a CommittedReader in a thread of its own"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from broker_io.environment import current
from broker_io.errors import Error
from broker_io.port import Broker
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.checks import check_limit, check_wait
from txnbuffer.client.lifecycle import ClosedOnExit, opened, retrieve_error, run_to_completion
from txnbuffer.client.reading.reader import CLOSED, ONE_BY_ONE, CommittedReader, EndsBy, Lag
from txnbuffer.client.reading.records import Record, RecordBatch, UnreadRecords
from txnbuffer.client.reading.starts import Isolation, Start, Until
from txnbuffer.client.serializers import Deserializers
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")

POLL = 0.5
"""Seconds of one wait in the thread; `close` waits no longer than this."""
IDLE_WAIT = 60.0
"""Seconds of one wait of an iteration without a timeout."""


class AsyncReader(ClosedOnExit):
    """A CommittedReader for asyncio, created by `Client.reader`.

    Records of a cancelled read are returned by the next one.
    """

    def __init__(self, reader: CommittedReader, thread: Executor) -> None:
        self._reader = reader
        self._thread = thread
        self._turn = asyncio.Lock()
        self._reading: asyncio.Future[RecordBatch | None] | None = None
        self._unread: UnreadRecords | None = None
        self._closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._reader.describe()}>"

    @classmethod
    async def open(
        cls,
        broker: Callable[[], Broker],
        topics: str | Sequence[str],
        start: Start | Mapping[str, Start],
        until: Until | Mapping[str, Until] | None,
        isolation: Isolation,
        deserializers: Deserializers | None = None,
        *,
        wait: bool = False,
    ) -> AsyncReader:
        """Open a CommittedReader in a thread of its own. Raises the errors of CommittedReader."""
        thread = current().threads.executor(1, "txnbuffer-reader")

        def opening() -> CommittedReader:
            return CommittedReader(
                broker(), topics, start=start, until=until, isolation=isolation, wait=wait, deserializers=deserializers
            )

        try:
            reader = await opened(thread, opening)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(reader, thread)

    def use(self, ends_by: EndsBy) -> None:
        """Internal: let `held_back` ask when transactions are aborted."""
        self._reader.ends_by = ends_by

    @property
    def finished(self) -> bool:
        """Whether all records up to `until` were read, as `CommittedReader.finished`."""
        return self._reader.finished and self._reading is None and not self._unread

    async def read(self, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        """Return the next 1 to `limit` visible records of one topic; None if there are none within `timeout` seconds.

        Concurrent reads run one after the other. Raises the errors of `CommittedReader.read`.
        """
        check_limit(limit)
        return await self._after_others(check_wait(timeout), partial(self._read, limit))

    async def _after_others(self, timeout: float, work: Callable[[float], Awaitable[Result | None]]) -> Result | None:
        """Return `await work(deadline)`, once all earlier calls have ended; None if they take too long."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            return None
        try:
            return await work(deadline)
        finally:
            self._turn.release()

    async def _next(self, deadline: float) -> Record | None:
        """Return the next record; None if there is none before the deadline."""
        if not self._unread:
            batch = await self._read(ONE_BY_ONE, deadline)
            self._unread = None if batch is None else UnreadRecords(batch)
        return self._unread.next() if self._unread else None

    async def _read(self, limit: int, deadline: float) -> RecordBatch | None:
        loop = asyncio.get_running_loop()
        if self._unread:
            return self._unread.take(limit)
        while True:
            left = deadline - loop.time()
            if self._reading is None:
                read = partial(self._reader.read, limit=limit, timeout=max(min(left, POLL), 0.0))
                self._reading = self._call(read)
                self._reading.add_done_callback(retrieve_error)
            try:
                batch = await asyncio.shield(self._reading)
            except Error as error:
                if error.retryable:
                    self._reading = None
                raise
            self._reading = None
            if batch is not None and len(batch) > limit:  # a cancelled call with a higher limit read it
                self._reading = loop.create_future()
                self._reading.set_result(batch.take(slice(limit, None)))
                batch = batch.take(slice(limit))
            if batch is not None or left <= 0 or self.finished:
                return batch

    async def records(self, *, timeout: float | None = None) -> AsyncIterator[Record]:
        """Yield the records one by one, as `CommittedReader.records`."""
        wait = IDLE_WAIT if timeout is None else check_wait(timeout)
        while True:
            record = self._unread.next() if self._unread else await self._after_others(wait, self._next)
            if record is not None:
                yield record
            elif timeout is not None or self.finished:
                await self._call(self._reader.warn_of_held_back)
                return

    async def batches(self, *, limit: int = 10_000, timeout: float | None = None) -> AsyncIterator[RecordBatch]:
        """Yield the records in batches, as `CommittedReader.batches`."""
        while True:
            if (batch := await self.read(limit=limit, timeout=IDLE_WAIT if timeout is None else timeout)) is not None:
                yield batch
            elif timeout is not None or self.finished:
                await self._call(self._reader.warn_of_held_back)
                return

    def __aiter__(self) -> AsyncIterator[RecordBatch]:
        """Yield batches up to `until`, or without end; leave the loop to stop."""
        return self.batches()

    async def seek(self, start: Start | Mapping[str, Start]) -> None:
        """Continue at another place, as `CommittedReader.seek`. Cancelling the caller does not stop this."""
        await run_to_completion(self._seek(start))

    async def _seek(self, start: Start | Mapping[str, Start]) -> None:
        async with self._turn:
            moved = await self._call(partial(self._reader.move, start))
            if self._unread and self._unread.topic in moved:
                self._unread = None
            if (reading := self._reading) is not None:  # of a cancelled call; the thread ended it before the move
                await asyncio.wait([reading])
                batch = None if reading.cancelled() or reading.exception() else reading.result()
                if batch is None or batch.topic in moved:
                    self._reading = None

    async def lag(self) -> dict[str, Lag]:
        """Return the lag of each topic and partition, by name."""
        return await self._call(self._reader.lag)

    async def held_back(self) -> list[HeldBack]:
        """Return what is read but not returned yet, as `CommittedReader.held_back`."""
        return await self._call(self._reader.held_back)

    async def close(self) -> None:
        """Close the reader once a running read has ended. Cancelling the caller does not stop this."""
        if self._closing is None:
            self._closing = self._call(self._reader.close)
            self._thread.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a function in the reader's thread. Raises InvalidRequest once the reader is closed."""
        if self._closing is not None:
            raise InvalidRequest(CLOSED)
        return asyncio.get_running_loop().run_in_executor(self._thread, function)
