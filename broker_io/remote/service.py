"""The log service: a broker for other processes, as handlers of a grpc.aio server.

Calls of the broker wait for locks and disks, so they run in threads: requests and appends in a few, changes of
structure, which may take minutes, in others, and each open reader has its own thread while it waits.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import grpc

from broker_io.errors import ERROR_TRAILER, Error, ServiceUnavailable, TooManyStreams, as_error
from broker_io.port import MAX_MESSAGE_BYTES, Broker
from broker_io.position import Position
from broker_io.remote import messages
from broker_io.remote.messages import Reply, TopicRequest
from broker_io.remote.streams import Budget, ServedReader, ServedWriter, open_in, run

MIB = 1024 * 1024
APPEND_BYTES = 8 * MIB
TOTAL_BYTES = 64 * MIB
"""Bytes of pending appends of all streams together."""
MAX_READERS = 128
MAX_WRITERS = 128
CLOSE_TIMEOUT = 5.0
"""Seconds for which a stopping service waits for pending appends."""
CALL_THREADS, CHANGE_THREADS = 8, 2

Change = Literal["create", "delete", "write", "own", "roll", "trim", "compact"]
"""A change of a topic that a client requests; "own" is to open an exclusive writer."""

Guard = Callable[[str, Change], None]
"""Raises an error for a change that is not allowed; it is called on the loop."""


class LogService:
    """Serves a broker that the caller owns: add `handler` to a grpc.aio server, and `close` before that stops.

    The server has to accept messages slightly above `max_append_bytes`; `max_message_bytes` is the broker's limit.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        guard: Guard | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_append_bytes: int | None = None,
    ) -> None:
        self._broker = broker
        self._guard = guard
        self._limits = max_message_bytes, max_append_bytes or max_message_bytes + APPEND_BYTES
        self._budget = Budget(TOTAL_BYTES)
        self._calls = ThreadPoolExecutor(CALL_THREADS, "log-call")
        self._changes = ThreadPoolExecutor(CHANGE_THREADS, "log-change")
        self._waits = ThreadPoolExecutor(MAX_READERS, "log-reader")
        self._readings: set[ServedReader] = set()
        self._streams: dict[str, int] = {"readers": 0, "writers": 0}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: set[asyncio.Task[Any]] = set()
        self._drains: set[asyncio.Task[Any]] = set()
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
        loop = asyncio.get_running_loop()
        for executor in (self._waits, self._calls, self._changes):
            await loop.run_in_executor(None, executor.shutdown)

    # --- one request, one reply ---

    async def _hello(self, _: TopicRequest) -> Reply:
        return Reply((), (messages.VERSION, *self._limits))

    async def _query(self, call: Callable[[Broker, TopicRequest], Reply], request: TopicRequest) -> Reply:
        return await run(self._calls, call, self._broker, request)

    async def _change(
        self, change: Change, call: Callable[[Broker, TopicRequest], None], request: TopicRequest
    ) -> Reply:
        self._check(request.topic, change)
        await run(self._changes, call, self._broker, request)
        return Reply()

    def _unary(self, method: Callable[[TopicRequest], Awaitable[Reply]]) -> Any:
        async def answer(data: bytes, context: Any) -> bytes:
            async with self._errors_as_status(context):
                return messages.encode_reply(await method(messages.decode_request(data)))
            raise AssertionError("a call that failed was not ended")

        return grpc.unary_unary_rpc_method_handler(answer)

    # --- streams ---

    async def _append(self, _: Any, context: Any) -> None:
        async with self._errors_as_status(context), self._slot("writers", MAX_WRITERS):
            if (data := await self._next(context)) is grpc.aio.EOF:
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
            if (data := await self._next(context)) is grpc.aio.EOF:
                return
            opening = messages.decode_open_reader(data)
            reading = await open_in(self._waits, lambda: ServedReader(self._broker, opening), ServedReader.close)
            self._readings.add(reading)
            try:
                await context.write(messages.encode_opened(reading.opened))
                while (data := await self._next(context)) is not grpc.aio.EOF:
                    ask = messages.decode_ask(data)
                    await context.write(await run(self._waits, _answer, reading, ask, on_cancel=reading.stop))
            finally:
                self._readings.discard(reading)
                await run(self._waits, reading.close)

    async def _next(self, context: Any) -> Any:
        """The next message of a client. `close` ends a stream only while it waits here, so that no write is cut."""
        task = asyncio.current_task()
        if self._closed or task is None:
            raise _stopping()
        self._idle.add(task)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if self._closed:
                raise _stopping() from None
            raise
        finally:
            self._idle.discard(task)

    def _check(self, topic: str, change: Change) -> None:
        if self._guard is not None:
            self._guard(topic, change)

    @asynccontextmanager
    async def _slot(self, kind: str, most: int) -> AsyncIterator[None]:
        if self._streams[kind] >= most:
            raise TooManyStreams(f"the service has reached its limit of {most} open {kind}: close some")
        self._streams[kind] += 1
        try:
            yield
        finally:
            self._streams[kind] -= 1

    @asynccontextmanager
    async def _errors_as_status(self, context: Any) -> AsyncIterator[None]:
        """End a failed call with the status and the trailer of its error."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            if self._closed:
                raise _stopping()
            yield
        except Error as error:
            await _abort(context, error)
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            await _abort(context, as_error(error))
        finally:
            if task is not None:
                self._tasks.discard(task)


def _task(work: Any, among: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)
    return task


def _stopping() -> ServiceUnavailable:
    return ServiceUnavailable("the service is stopping: connect again later")


async def _abort(context: Any, error: Error) -> None:
    trailer = ((ERROR_TRAILER, messages.encode_error(error)),)
    details = messages.decode_error(trailer[0][1])
    with suppress(asyncio.InvalidStateError):
        await context.abort(grpc.StatusCode[error.grpc_status], str(details), trailer)


def _answer(reading: ServedReader, ask: messages.Ask) -> bytes:
    return messages.encode_answer(reading.answer(ask))


def _position(position: Position | None) -> Reply:
    return Reply((), () if position is None else position)


def _ledgers(broker: Broker, request: TopicRequest) -> Reply:
    numbers: list[int] = []
    for row in broker.ledgers(request.topic):
        numbers += (row.ledger, row.entries, row.bytes, row.closed + 2 * (not row.lasting))
    return Reply((), numbers)


QUERIES: dict[str, Callable[[Broker, TopicRequest], Reply]] = {
    "Topics": lambda broker, _: Reply(broker.topics()),
    "Incarnation": lambda broker, request: Reply([broker.incarnation(request.topic)]),
    "Ledgers": _ledgers,
    "FirstPosition": lambda broker, request: _position(broker.first_position(request.topic)),
    "LastPosition": lambda broker, request: _position(broker.last_position(request.topic)),
    "PositionAt": lambda broker, request: _position(broker.position_at(request.topic, request.number)),
}

CHANGES: dict[str, tuple[Change, Callable[[Broker, TopicRequest], None]]] = {
    "CreateTopic": ("create", lambda broker, request: broker.create_topic(request.topic)),
    "DeleteTopic": ("delete", lambda broker, request: broker.delete_topic(request.topic)),
    "Roll": ("roll", lambda broker, request: broker.roll(request.topic)),
    "Trim": ("trim", lambda broker, request: broker.trim(request.topic, request.number)),
    "Compact": ("compact", lambda broker, request: broker.compact(request.topic)),
}
