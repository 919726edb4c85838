"""The log service: a broker for other processes, as handlers of a grpc.aio server.

Calls of the broker wait for locks and disks, so they run in threads: requests and appends in a few, changes of
structure, which may take minutes, in others, and each open reader has its own thread while it waits.

A `ServedWriter` takes appends and sends outcomes in their order; a `ServedReader` answers one request after the other.
`run` and `open_in` wait on the loop for a thread even when the waiting task is cancelled. A `Budget` limits the bytes
that are pending.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import grpc
import numpy as np

from broker_io.batch import ROW_BYTES, Batch, Labels, PlacedBatch
from broker_io.compaction import CompactionState, CompactionStateBroker
from broker_io.environment import current
from broker_io.errors import (
    CallerError,
    Error,
    LimitExceeded,
    ServiceUnavailable,
    TooManyStreams,
    TopicNotFound,
    as_error,
)
from broker_io.port import MAX_MESSAGE_BYTES, Broker, Reader, Writer
from broker_io.position import LATEST, NO_INDEX, Position, Positions
from broker_io.remote import messages
from broker_io.remote.messages import (
    Answer,
    Ask,
    OpenReader,
    Outcome,
    ReaderOpened,
    decode_appends,
    encode_appended,
)
from broker_io.rpc import log_pb2
from broker_io.rpc.channel import LOG_KEY, end_call
from broker_io.rpc.log_pb2 import TopicRequest
from broker_io.waits import Waker

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


@dataclass(eq=False)
class Budget:
    """A limit of pending bytes, for one event loop. A request above the whole limit passes once nothing is pending."""

    _total: int
    used: int = 0
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

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
        self._pending: deque[tuple[Future[Positions] | Error, int]] = deque()
        self._wake = asyncio.Event()
        self._waker = Waker(asyncio.get_running_loop(), self._wake.set)
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
        self._waker.wake()

    def _append(self, batch: Batch) -> Future[Positions] | Error:
        try:
            future = self._writer.append(batch)
        except Exception as error:
            return as_error(error)
        future.add_done_callback(self._waker.wake)
        return future

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
SLICE = 0.2
"""Seconds of one wait; after each, the reader checks whether its client is gone."""
LONGEST_WAIT = 30.0


class ServedReader:
    """A reader and the unsent rest of its last batch. All calls may block, so call them in worker threads."""

    def __init__(self, broker: Broker, opening: OpenReader) -> None:
        self._stopped = False
        environment = current()
        self._monotonic = environment.clock.monotonic
        self._lock = environment.threads.lock()
        self._rest: PlacedBatch | None = None
        self._reader: Reader
        self._open(broker, opening)

    def _open(self, broker: Broker, opening: OpenReader) -> None:
        topic, start = opening.topic, opening.start
        after = _end(broker, topic) if start >= LATEST else start
        incarnation = broker.incarnation(topic)
        if opening.incarnation not in ("", incarnation):
            raise _topic_recreated(topic)
        self._reader = broker.reader(topic, start, inclusive=opening.inclusive, compacted=opening.compacted)
        if broker.incarnation(topic) != incarnation:
            self._reader.close()
            raise _topic_recreated(topic)
        self.opened = ReaderOpened(incarnation, after)

    def answer(self, ask: Ask) -> Answer:
        """The messages that the reader has now, or gets within the wait of the request."""
        with self._lock:
            try:
                return self._answer(max(ask.limit, 1), self._monotonic() + min(ask.wait_ms / 1000, LONGEST_WAIT))
            except Exception as error:
                return Answer(error=as_error(error))

    def _answer(self, limit: int, deadline: float) -> Answer:
        while self._rest is None:
            remaining = deadline - self._monotonic()
            self._rest = self._reader.read(limit=limit, timeout=min(max(remaining, 0.0), SLICE))
            if self._rest is None and (remaining <= 0 or self._stopped):
                return Answer()
        rows = _fitting(self._rest, limit)
        batch, self._rest = self._rest.split(rows)
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
        name: column.fitted() if isinstance(column, Labels) and len(column.values) > len(column) else column
        for name, column in batch.messages.properties.items()
    }
    return replace(batch, messages=replace(batch.messages, properties=properties))


def _fitting(batch: PlacedBatch, limit: int) -> int:
    """The number of messages of a batch that fit into one answer."""
    rows = min(len(batch), limit)
    messages = batch.messages
    if messages.weight <= ANSWER_BYTES:
        return rows
    sizes = np.cumsum(messages.sizes()[:rows] + ROW_BYTES)
    return max(int(np.searchsorted(sizes, ANSWER_BYTES, side="right")), 1)


MIB = 1024 * 1024
APPEND_BYTES = 8 * MIB
TOTAL_BYTES = 64 * MIB
"""Bytes of pending appends of all streams together."""
MAX_READERS = 128
MAX_WRITERS = 128
"""Open at once; a caller that is known has half of them at most."""
FIRST_MESSAGE = 10.0
"""Seconds in which a client says what it reads or writes."""
CLOSE_TIMEOUT = 5.0
"""Seconds for which a stopping service waits for pending appends."""
CALL_THREADS, CHANGE_THREADS = 8, 2

Change = Literal["read", "append", "create", "delete", "write", "own", "roll", "trim", "compact"]
"""What a client requests to do with a topic.

"write" is to open a writer, "own" an exclusive one, and "append" to append with one that is open.
"""

Query = Callable[[Broker, TopicRequest], Any]
"""Answers a request with a message."""

Guard = Callable[[str, Change], None]
"""Raises an error for what is not allowed; it is called on the loop, in the task of the call."""

Listed = Callable[[str], bool]
"""Whether a client may see the name of a topic; it is called as a guard is."""

Caller = Callable[[], str]
"""Who calls, or "" if that is not known; it is called as a guard is."""

Refused = Callable[[LimitExceeded], LimitExceeded]
"""Counts a refusal, and returns it."""

Gate = Callable[[], None]
"""Raises an error if answers from before this call must not be sent; it is called on the loop."""


class LogService:
    """Serves a broker that the caller owns: add `handler` to a grpc.aio server, and `close` before that stops.

    The server has to accept messages slightly above `max_append_bytes`; `max_message_bytes` is the broker's limit.
    Answers name the log by `identity`; the server must reject calls for another log, see `rejection` of
    `broker_io.rpc.channel`.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        guard: Guard | None = None,
        gate: Gate = lambda: None,
        listed: Listed = lambda _: True,
        caller: Caller = lambda: "",
        refused: Refused = lambda refusal: refusal,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_append_bytes: int | None = None,
        identity: str | None = None,
    ) -> None:
        self._broker = broker
        self._identity = () if identity is None else ((LOG_KEY, identity),)
        self._guard = guard
        self._gate = gate
        self._listed = listed
        self._caller = caller
        self._refused = refused
        self._limits = max_message_bytes, max_append_bytes or max_message_bytes + APPEND_BYTES
        self._budget = Budget(TOTAL_BYTES)
        threads = current().threads
        self._calls = threads.executor(CALL_THREADS, "log-call")
        self._changes = threads.executor(CHANGE_THREADS, "log-change")
        self._waits = threads.executor(MAX_READERS, "log-reader")
        self._readings: dict[ServedReader, None] = {}
        self._streams = Counter[tuple[str, str]]()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._idle: dict[asyncio.Task[Any], None] = {}
        self._drains: dict[asyncio.Task[Any], None] = {}
        self._closed = False

    @property
    def handler(self) -> Any:
        """The generic handler of all methods."""
        methods = {"Hello": self._unary(self._hello)}
        for name, query in QUERIES.items():
            methods[name] = self._unary(functools.partial(self._query, query))
        for name, (change, call) in CHANGES.items():
            methods[name] = self._unary(functools.partial(self._change, change, call))
        methods["Append"] = grpc.stream_stream_rpc_method_handler(self._append)
        methods["Read"] = grpc.stream_stream_rpc_method_handler(self._read)
        return grpc.method_handlers_generic_handler(messages.SERVICE, methods)

    async def close(self) -> None:
        """End all streams and wait for pending appends."""
        self._closed = True
        for reading in self._readings:
            reading.stop()
        for task in [*self._idle, *self._drains]:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        for executor in (self._waits, self._calls, self._changes):
            await asyncio.to_thread(executor.shutdown)

    # --- one request, one reply ---

    async def _hello(self, _: TopicRequest) -> log_pb2.LogLimits:
        return log_pb2.LogLimits(max_message_bytes=self._limits[0], max_append_bytes=self._limits[1])

    async def _query(self, call: Query, request: TopicRequest) -> Any:
        if call is _topics:
            names = (await run(self._calls, call, self._broker, request)).names
            return log_pb2.TopicNames(names=filter(self._listed, names))
        self._check(request.topic, "read")
        return await run(self._calls, call, self._broker, request)

    async def _change(
        self, change: Change, call: Callable[[Broker, TopicRequest], None], request: TopicRequest
    ) -> log_pb2.Empty:
        self._check(request.topic, change)
        await run(self._changes, call, self._broker, request)
        return log_pb2.Empty()

    def _unary(self, method: Callable[[TopicRequest], Awaitable[Any]]) -> Any:
        async def answer(data: bytes, context: Any) -> bytes:
            async with self._errors_as_status(context):
                reply: bytes = (await method(messages.parse(TopicRequest, data))).SerializeToString()
                self._gate()
                return reply
            raise AssertionError("a call that failed was not ended")

        return grpc.unary_unary_rpc_method_handler(answer)

    # --- streams ---

    async def _append(self, _: Any, context: Any) -> None:
        async with self._errors_as_status(context), self._slot("writers", MAX_WRITERS):
            if (data := await self._first(context)) is grpc.aio.EOF:
                return
            opening = messages.decode_open_writer(data)
            self._check(opening.topic, "own" if opening.exclusive else "write")
            writer = await open_in(
                self._calls,
                lambda: self._broker.writer(opening.topic, exclusive=opening.exclusive),
                lambda opened: opened.close(),
            )
            appending = ServedWriter(writer, self._budget)
            answering = _task(appending.answer(context), self._tasks)
            try:
                await context.write(messages.encode_appended([]))
                while (data := await self._next(context)) is not grpc.aio.EOF:
                    self._check(opening.topic, "append")
                    await appending.take(self._calls, data)
                appending.end()
                await answering
            except BaseException:
                answering.cancel()
                appending.end()
                if not self._closed:
                    _task(appending.answer(None), self._drains)
                raise
            finally:
                await run(self._calls, writer.close)

    async def _read(self, _: Any, context: Any) -> None:
        async with self._errors_as_status(context), self._slot("readers", MAX_READERS):
            if (data := await self._first(context)) is grpc.aio.EOF:
                return
            opening = messages.decode_open_reader(data)
            self._check(opening.topic, "read")
            reading = await open_in(self._waits, lambda: ServedReader(self._broker, opening), ServedReader.close)
            self._readings[reading] = None
            try:
                await context.write(messages.encode_opened(reading.opened))
                while (data := await self._next(context)) is not grpc.aio.EOF:
                    ask = messages.decode_ask(data)
                    self._check(opening.topic, "read")
                    answer = await run(self._waits, _answer, reading, ask, on_cancel=reading.stop)
                    self._check(opening.topic, "read")  # again: this may have changed while it waited
                    self._gate()
                    await context.write(answer)
            finally:
                self._readings.pop(reading, None)
                await run(self._waits, reading.close)

    async def _first(self, context: Any) -> Any:
        """The first message of a client. Raises CallerError if none comes."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE):
                return await self._next(context)
        except TimeoutError:
            raise CallerError(f"the client sent nothing for {FIRST_MESSAGE:g} s: name a topic") from None

    async def _next(self, context: Any) -> Any:
        """The next message of a client. `close` ends a stream only while it waits here, so that no write is cut."""
        task = asyncio.current_task()
        if self._closed or task is None:
            raise _stopping()
        self._idle[task] = None
        try:
            return await context.read()
        except asyncio.CancelledError:
            if self._closed:
                raise _stopping() from None
            raise
        finally:
            self._idle.pop(task, None)

    def _check(self, topic: str, change: Change) -> None:
        if self._guard is not None:
            self._guard(topic, change)

    @asynccontextmanager
    async def _slot(self, kind: str, most: int) -> AsyncIterator[None]:
        caller = self._caller()
        total, own = (kind, ""), (kind, caller)
        if self._streams[total] >= most:
            text = f"{most} {kind} of the log are open, as many as the service has: try again later"
            raise self._refused(TooManyStreams(text, kind))
        if caller and self._streams[own] >= most // 2:
            text = (
                f"principal {caller!r} has {most // 2} open {kind} of the log, half of all that there are: close some"
            )
            raise self._refused(TooManyStreams(text, kind))
        counted = {total, own}
        self._streams.update(counted)
        try:
            yield
        finally:
            self._streams.subtract(counted)
            for key in counted:
                if not self._streams[key]:
                    del self._streams[key]

    @asynccontextmanager
    async def _errors_as_status(self, context: Any) -> AsyncIterator[None]:
        """End a failed call with the status and the trailer of its error."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks[task] = None
        try:
            if self._closed:
                raise _stopping()
            await context.send_initial_metadata(self._identity)
            yield
        except Error as error:
            await end_call(context, error)
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            await end_call(context, as_error(error))
        finally:
            if task is not None:
                self._tasks.pop(task, None)


def _task(work: Any, among: dict[asyncio.Task[Any], None]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    among[task] = None
    task.add_done_callback(among.pop)
    return task


def _stopping() -> ServiceUnavailable:
    return ServiceUnavailable("the service is stopping: connect again later")


def _answer(reading: ServedReader, ask: messages.Ask) -> bytes:
    return messages.encode_answer(reading.answer(ask))


def _position(position: Position | None) -> log_pb2.FoundPosition:
    return log_pb2.FoundPosition(position=None if position is None else position._asdict())


def _ledgers(broker: Broker, request: TopicRequest) -> log_pb2.LedgerList:
    return log_pb2.LedgerList(ledgers=[asdict(row) for row in broker.ledgers(request.topic)])


def _compaction(broker: Broker, request: TopicRequest) -> log_pb2.TopicCompaction:
    state = broker.compaction(request.topic) if isinstance(broker, CompactionStateBroker) else CompactionState()
    return log_pb2.TopicCompaction(cleaned=state.cleaned, purged=state.purged)


def _topics(broker: Broker, _: TopicRequest) -> log_pb2.TopicNames:
    return log_pb2.TopicNames(names=broker.topics())


QUERIES: dict[str, Query] = {
    "Topics": _topics,
    "Incarnation": lambda broker, request: log_pb2.TopicIncarnation(incarnation=broker.incarnation(request.topic)),
    "Ledgers": _ledgers,
    "FirstPosition": lambda broker, request: _position(broker.first_position(request.topic)),
    "LastPosition": lambda broker, request: _position(broker.last_position(request.topic)),
    "Compaction": _compaction,
    "PositionAt": lambda broker, request: _position(broker.position_at(request.topic, request.number)),
}

CHANGES: dict[str, tuple[Change, Callable[[Broker, TopicRequest], None]]] = {
    "CreateTopic": ("create", lambda broker, request: broker.create_topic(request.topic)),
    "DeleteTopic": ("delete", lambda broker, request: broker.delete_topic(request.topic)),
    "Roll": ("roll", lambda broker, request: broker.roll(request.topic)),
    "Trim": ("trim", lambda broker, request: broker.trim(request.topic, request.number)),
    "Compact": ("compact", lambda broker, request: broker.compact(request.topic)),
}
