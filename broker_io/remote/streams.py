"""The service's side of `Append` and `Read` streams, on an event loop with worker threads.

A `ServedWriter` takes appends and sends outcomes in their order; a `ServedReader` answers one request after the other.
`run` and `open_in` wait on the loop for a thread even when the waiting task is cancelled. A `Budget` limits the bytes
that are pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from broker_io.batch import Batch, Labels, PlacedBatch
from broker_io.errors import Error, TopicNotFound, as_error
from broker_io.port import Broker, Reader, Writer
from broker_io.position import LATEST, NO_INDEX, Position, Positions
from broker_io.remote.messages import Answer, Ask, OpenReader, Outcome, ReaderOpened, decode_appends, encode_appended

T = TypeVar("T")


def _ignore() -> None: ...


async def run(
    executor: Executor, call: Callable[..., T], *arguments: Any, on_cancel: Callable[[], None] = _ignore
) -> T:
    """The result of a call in a thread. A cancelled task still waits for the call, so nothing is left running.

    `on_cancel` is called when the task is cancelled, to end the call soon.
    """
    return await _outlast(executor.submit(call, *arguments), on_cancel)


async def open_in(executor: Executor, opening: Callable[[], T], close: Callable[[T], None]) -> T:
    """As `run`, for calls that open something: if the task is cancelled, it is closed again."""
    future = executor.submit(opening)
    try:
        return await _outlast(future)
    except asyncio.CancelledError:
        if future.exception() is None:
            await run(executor, close, future.result())
        raise


async def _outlast(future: Future[T], on_cancel: Callable[[], None] = _ignore) -> T:
    wrapped = asyncio.wrap_future(future)
    cancelled = False
    while not wrapped.done():
        try:
            await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            cancelled = True
            on_cancel()
        except BaseException:  # noqa: S110 - it is the result, raised below
            pass
    if cancelled:
        wrapped.exception()
        raise asyncio.CancelledError
    return wrapped.result()


class Budget:
    """A limit of pending bytes, for one event loop. A request above the whole limit passes once nothing is pending."""

    def __init__(self, total: int) -> None:
        self.used = 0
        self._total = total
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, size: int) -> None:
        while self.used and self.used + size > self._total:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)


STREAM_BYTES = 8 * 1024 * 1024
"""Bytes of pending appends of one stream; above this limit no more is read from the client."""
OUTCOMES = 10_000
"""Outcomes in one answer, at most."""


class ServedWriter:
    """Belongs to the loop; appends themselves are made in threads, one message of the client at a time."""

    def __init__(self, writer: Writer, total: Budget) -> None:
        self._writer = writer
        self._budgets = (Budget(STREAM_BYTES), total)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[Future[Positions] | Error, int]] = deque()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._ended = False

    async def take(self, executor: Executor, data: bytes) -> None:
        """Append the batches of a message of the client, once there is room for them.

        Raises MalformedMessage, and nothing of the message is appended.
        """
        size = len(data)
        await self._budgets[0].take(size)
        try:
            await self._budgets[1].take(size)
        except BaseException:
            self._budgets[0].release(size)
            raise
        await run(executor, self._append_all, data)

    def end(self) -> None:
        """The client has no more appends."""
        self._ended = True
        self._wake.set()

    async def answer(self, context: Any) -> None:
        """Send outcomes until the client has ended and no append is pending; without a context, drop them."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._wake_scheduled = False
            while outcomes := self._done():
                if context is not None:
                    await context.write(encode_appended(outcomes))
            if self._ended and not self._pending:
                return

    def _append_all(self, data: bytes) -> None:
        try:
            batches = decode_appends(data)
        except Exception as error:
            self._pending.append((as_error(error), len(data)))
            raise
        sizes = [0] * (len(batches) - 1) + [len(data)]  # released with the last of them
        for batch, size in zip(batches, sizes, strict=True):
            self._pending.append((self._append(batch), size))
        self._wake_up(None)

    def _append(self, batch: Batch) -> Future[Positions] | Error:
        try:
            future = self._writer.append(batch)
        except Exception as error:
            return as_error(error)
        future.add_done_callback(self._wake_up)
        return future

    def _wake_up(self, _: object) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is the stream
                self._loop.call_soon_threadsafe(self._wake.set)

    def _done(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._pending and len(outcomes) < OUTCOMES:
            future, size = self._pending[0]
            if isinstance(future, Future):
                if not future.done():
                    break
                error = future.exception()
                outcomes.append(future.result() if error is None else as_error(error))
            else:
                outcomes.append(future)
            self._pending.popleft()
            self._release(size)
        return outcomes

    def _release(self, size: int) -> None:
        for budget in self._budgets:
            budget.release(size)


ANSWER_BYTES = 1024 * 1024
"""Approximate maximum bytes of one answer, which has at least one message."""
ROW_BYTES = 64
"""Approximate overhead of a message."""
SLICE = 0.2
"""Seconds of one wait; after each, the reader checks whether its client is gone."""
LONGEST_WAIT = 30.0


class ServedReader:
    """A reader and the unsent rest of its last batch. All calls may block, so call them in worker threads."""

    def __init__(self, broker: Broker, opening: OpenReader) -> None:
        self._stopped = False
        self._lock = threading.Lock()
        self._rest: PlacedBatch | None = None
        self._reader: Reader
        self._open(broker, opening)

    def _open(self, broker: Broker, opening: OpenReader) -> None:
        topic, start = opening.topic, opening.start
        behind = _end(broker, topic) if start >= LATEST else start
        incarnation = broker.incarnation(topic)
        if opening.incarnation not in ("", incarnation):
            raise _topic_recreated(topic)
        self._reader = broker.reader(topic, start, inclusive=opening.inclusive, compacted=opening.compacted)
        if broker.incarnation(topic) != incarnation:
            self._reader.close()
            raise _topic_recreated(topic)
        self.opened = ReaderOpened(incarnation, behind)

    def answer(self, ask: Ask) -> Answer:
        """The messages that the reader has now, or gets within the wait of the request."""
        with self._lock:
            try:
                return self._answer(max(ask.limit, 1), time.monotonic() + min(ask.wait_ms / 1000, LONGEST_WAIT))
            except Exception as error:
                return Answer(error=as_error(error))

    def _answer(self, limit: int, deadline: float) -> Answer:
        while self._rest is None:
            remaining = deadline - time.monotonic()
            self._rest = self._reader.read(limit=limit, timeout=min(max(remaining, 0.0), SLICE))
            if self._rest is None and (remaining <= 0 or self._stopped):
                return Answer()
        batch, self._rest = self._rest, None
        rows = _fitting(batch, limit)
        if rows < len(batch):
            self._rest = batch.take(slice(rows, None))
            batch = batch.take(slice(0, rows))
        return Answer(_without_unused_labels(batch), more=self._rest is not None or rows >= limit)

    def stop(self) -> None:
        """Stop waiting soon; safe from any thread."""
        self._stopped = True

    def close(self) -> None:
        self._stopped = True
        with self._lock:
            self._reader.close()


def _end(broker: Broker, topic: str) -> Position:
    """A position below all later messages that stays valid if messages are trimmed meanwhile."""
    last = broker.last_position(topic)
    return Position(broker.ledgers(topic)[0].ledger, -1, NO_INDEX) if last is None else last


def _topic_recreated(topic: str) -> TopicNotFound:
    return TopicNotFound(f"topic {topic!r} was deleted and re-created while it was read: open a reader of the new one")


def _without_unused_labels(batch: PlacedBatch) -> PlacedBatch:
    """The same messages without unused labels: a slice shares the labels of the whole batch."""
    properties = {
        name: _used(column) if isinstance(column, Labels) and len(column.values) > len(column) else column
        for name, column in batch.messages.properties.items()
    }
    return replace(batch, messages=replace(batch.messages, properties=properties))


def _used(labels: Labels) -> Labels:
    codes, renamed = np.unique(labels.codes, return_inverse=True)
    absent = int(codes[0] < 0)
    return Labels((renamed - absent).astype(np.int32), tuple(labels.values[code] for code in codes[absent:].tolist()))


def _fitting(batch: PlacedBatch, limit: int) -> int:
    """The number of messages of a batch that fit into one answer."""
    rows = min(len(batch), limit)
    messages = batch.messages
    if len(messages.keys.data) + len(messages.values.data) + ROW_BYTES * rows <= ANSWER_BYTES:
        return rows
    sizes = np.cumsum(messages.sizes()[:rows] + ROW_BYTES)
    return max(int(np.searchsorted(sizes, ANSWER_BYTES, side="right")), 1)
