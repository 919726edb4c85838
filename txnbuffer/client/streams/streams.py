"""Change streams as applications use them: batches with resume tokens, and rollbacks; and their connections

A `StreamSession` has one connection to a service and reconnects after it is lost. With several shards there is one
session for each service, created when first needed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias

from broker_io.environment import current
from broker_io.waits import Backoff, Wait
from snapshots.shards import shard_of
from txnbuffer.checks import check_wait
from txnbuffer.client.lifecycle import ClosedOnExit, cancel, ended_task
from txnbuffer.client.streams.cursors import CursorLease
from txnbuffer.client.streams.tokens import TokenStore
from txnbuffer.errors import (
    CallerError,
    ClientBroken,
    Error,
    ForeignToken,
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    retry_pause,
)
from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.failover import ResumeToken
from txnbuffer.streams.messages import (
    NO_END,
    CaughtUp,
    ClientEvent,
    ClientMessage,
    Completed,
    Delivered,
    EndConnection,
    Interrupted,
    RequestFlag,
    RollbackReceived,
    ServerMessage,
    StreamEnded,
    StreamOpened,
)


class StreamLink(Protocol):
    """The interface of a connection for change streams: messages in both directions."""

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        """Send messages. Raises ServiceUnavailable if the connection is lost."""

    async def receive(self) -> Sequence[ServerMessage] | None:
        """Return the next messages; None once the service has ended the connection. Raises ServiceUnavailable."""

    async def close(self) -> None:
        """Close the connection."""


StreamConnector: TypeAlias = Callable[[], Awaitable[StreamLink]]
"""Opens a connection. Raises ServiceUnavailable."""

_STARTS = {
    "beginning": RequestFlag.FROM_OLDEST,
    "earliest": RequestFlag.FROM_OLDEST,
    "now": RequestFlag.FROM_NOW,
    "latest": RequestFlag.FROM_NOW,
}


class StreamParameters(NamedTuple):
    """The parameters of a stream. `start`: the token, with the topic, to start from. `end`: the last seqno."""

    start: ResumeToken
    flags: RequestFlag
    end: int

    @classmethod
    def of(cls, topic: str, from_: str | ResumeToken, to: int | Literal["now"] | None) -> Self:
        """Return the parameters for the arguments of `Client.stream`.

        Raises InvalidRequest, UnreadableToken, and ForeignToken for the token of another topic.
        """
        end, flags = NO_END, RequestFlag.NONE
        if isinstance(from_, str) and from_ in _STARTS:
            start, flags = ResumeToken(topic), _STARTS[from_]
        else:
            start = ResumeToken.parse(from_) if isinstance(from_, str) else from_
            if not isinstance(start, ResumeToken):
                raise InvalidRequest(f"from_ must be 'beginning', 'now' or a resume token, got {from_!r}")
            if start.topic != topic:
                raise ForeignToken(f"the resume token belongs to topic {start.topic!r}, not to {topic!r}")
        if to == "now":
            flags |= RequestFlag.TO_NOW
        elif isinstance(to, int) and not isinstance(to, bool) and to >= 0:
            end = to
        elif to is not None:
            raise InvalidRequest(f"to must be a seqno, 'now' or None, got {to!r}")
        return cls(start, flags, end)


class StreamSession:
    """The streams of one service, over one connection, which opens with the first stream.

    Calls that wait fail after `max_unavailable` seconds without a connection.
    """

    def __init__(self, connector: StreamConnector, max_unavailable: float, config: ClientConfig | None = None) -> None:
        self.core = StreamClient(config or ClientConfig())
        self._connector = connector
        self._max_unavailable = max_unavailable
        self._streams: dict[int, ChangeStream] = {}
        self._wake_writer = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_at = 0.0
        self._monotonic = current().clock.monotonic
        self._end_error: Error | None = None
        self.broken: Error | None = None
        """The error because of which all streams have ended."""

    async def close(self) -> None:
        """Close all streams and the connection. Streams that are opened later fail."""
        self.broken = self.broken or ServiceUnavailable("the client was closed")
        for stream in [*self._streams.values()]:
            await stream.close()
        await cancel(self._task)

    # For streams

    def open(self, request: StreamParameters, stream: ChangeStream) -> int:
        """Request a stream, which gets its events from now on; return its handle."""
        if self._task is None:
            self._lost_at = self._monotonic()
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)
        handle = self.core.open(request.start, self._monotonic(), end=request.end, flags=request.flags)
        self._streams[handle] = stream
        if self.broken is not None:
            stream.report_unavailable(self.broken)
        self._poke()
        return handle

    def close_stream(self, handle: int) -> None:
        self._streams.pop(handle, None)
        self.core.close(handle)
        self._poke()

    def consumed(self, handle: int, items: int, size: int) -> None:
        self.core.consumed(handle, items, size)
        self._poke()

    def rolled_back(self, handle: int, seqno: int) -> None:
        self.core.rolled_back(handle, seqno, self._monotonic())
        self._poke()

    # Staying connected

    def _poke(self) -> None:
        self._deliver()
        self._wake_writer.set()

    async def _run(self) -> None:
        failures, backoff, wait = 0, Backoff(), Wait("the service of change streams")
        while True:
            error: Error
            try:
                link = await self._connector()
                failures = 0
                wait.pause()
                error = await self._talk(link)
                wait.resume()
            except Error as refused:
                error = refused
            except Exception as unexpected:
                error = ClientBroken(
                    f"internal error in change streams: {unexpected!r}; open a new client, and report this"
                )
            self.core.disconnected()
            self._deliver()
            waited = self._monotonic() - self._lost_at
            limited = isinstance(error, LimitExceeded)
            final = isinstance(error, CallerError | ClientBroken) and not limited
            if final or waited >= self._max_unavailable:
                unreachable = error.retryable and not limited
                reported = ServiceUnavailable(f"no service for {waited:.0f} s: {error}") if unreachable else error
                for stream in self._streams.values():
                    stream.report_unavailable(reported)
            if isinstance(error, ClientBroken):
                self.broken = error
                return
            wait.failed(error)
            failures += 1
            await asyncio.sleep(retry_pause(error, backoff.after(failures)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End all streams if something has ended the task that the session needs."""
        if self.broken is None:
            self.fail(ended_task(task))

    def fail(self, error: Error) -> None:
        """End all streams, now and later."""
        self.broken = self.broken or error
        for stream in self._streams.values():
            stream.report_unavailable(self.broken)

    async def _talk(self, link: StreamLink) -> Error:
        """Use a connection until it ends; return the error that ended it."""
        self._end_error = None
        self.core.connected(self._monotonic())
        self._deliver()
        reading = asyncio.ensure_future(self._read(link))
        writing = asyncio.ensure_future(self._write(link))
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            found = await cancel(reading, writing)
            await link.close()
            self._lost_at = self._monotonic()
        for outcome in found:
            if isinstance(outcome, Exception) and not isinstance(outcome, Error):
                raise outcome
        errors = [outcome for outcome in found if isinstance(outcome, Error)]
        return self._end_error or (errors[0] if errors else ServiceUnavailable("the service ended the connection"))

    async def _read(self, link: StreamLink) -> None:
        while (messages := await link.receive()) is not None:
            self.core.receive(messages, self._monotonic())
            self._poke()
            for stream in self._streams.values():
                stream.report_unavailable(None)
            if self._end_error is not None:
                return

    async def _write(self, link: StreamLink) -> None:
        while self._end_error is None:
            if frame := self.core.take_frame():
                await link.send(frame)
                continue
            due = self.core.next_tick()
            self._wake_writer.clear()
            try:
                async with asyncio.timeout(None if due is None else max(due - self._monotonic(), 0.0)):
                    await self._wake_writer.wait()
            except TimeoutError:
                self.core.tick(self._monotonic())
                self._deliver()

    def _deliver(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, EndConnection):
                self._end_error = event.error
            elif (stream := self._streams.get(event.stream)) is not None:
                stream.take(event)


@dataclass(eq=False)
class ShardStreams:
    """The stream sessions of all shards. `connectors`: one for the service of each shard."""

    connectors: Sequence[StreamConnector]
    _max_unavailable: float
    _config: ClientConfig | None = None
    _open: dict[int, StreamSession] = field(default_factory=dict)

    def of(self, topic: str) -> StreamSession:
        """Return the session of the service that owns a topic. Raises InvalidRequest if there are no connectors."""
        if not self.connectors:
            raise InvalidRequest("this client has no connector for change streams: create it with connect")
        number = shard_of(topic, len(self.connectors))
        if number not in self._open:
            self._open[number] = StreamSession(self.connectors[number], self._max_unavailable, self._config)
        return self._open[number]

    def fail(self, error: Error) -> None:
        """End all streams, now and later."""
        for session in self._open.values():
            session.fail(error)

    async def close(self) -> None:
        """Close all streams and connections."""
        for session in self._open.values():
            await session.close()


NOTHING = MutationBatch.of([])


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Mutations to apply in order; iterate it for single mutations. It is empty if only the token has changed.

    A mutation without a value deletes its key.

    - `token`: a stream from this token continues after the batch. Store it together with the result of the mutations.
    - `complete`: after this batch your data equals the topic at `token.seqno`. Otherwise the next batches may replace
      keys whose older values were not delivered.
    - `caught_up`: the batch is complete, and the topic had no newer mutation.
    - `bytes`: the size of the mutations.
    """

    topic: str
    mutations: MutationBatch
    token: ResumeToken
    complete: bool = False
    caught_up: bool = False
    bytes: int = 0

    def __len__(self) -> int:
        return len(self.mutations)

    def __iter__(self) -> Iterator[Mutation]:
        return iter(self.mutations)


class ChangeStatistics(NamedTuple):
    """Counters of a stream, since its creation.

    - `mutations`, `deletions`, `bytes`: delivered mutations, those of them without a value, and their size.
    - `rollbacks`, `interruptions`: delivered rollbacks, and how many times the connection was lost or the stream ended.
    - `seqno`, `snapshot_start`, `snapshot_end`: of the token of the last batch.
    - `stored_seqno`: of the last token that was saved in the store.
    - `high_seqno`: the newest mutation that the service has reported.
    - `lag`: `high_seqno - seqno`, at least 0.
    """

    mutations: int
    deletions: int
    bytes: int
    rollbacks: int
    interruptions: int
    seqno: int
    snapshot_start: int
    snapshot_end: int
    stored_seqno: int
    high_seqno: int
    lag: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """The history of the topic branched: undo all changes after `seqno`.

    Requesting the next batch confirms that this was done. If your data can only be restored as of a lower seqno at
    which it was complete, or is rebuilt from nothing (0), call `ChangeStream.rolled_back` with that seqno instead.
    """

    topic: str
    seqno: int
    token: ResumeToken


class ChangeStream(ClosedOnExit):
    """A stream of changes, created by `Client.stream`; iterate it with `async for`.

    Requesting the next batch acknowledges the previous one. After a connection is lost, the stream continues over a new
    one. `problem`: the error of the current interruption, or None. `token`: the token of the last batch. `caught_up`:
    the topic had no newer mutation than the last batch.
    """

    def __init__(
        self,
        session: StreamSession,
        topic: str,
        from_: str | ResumeToken,
        to: int | Literal["now"] | None,
        store: TokenStore | None,
        lease: CursorLease | None = None,
        check_loop: Callable[[], None] = lambda: None,
    ) -> None:
        """The stream opens when its first batch is requested. `lease`: the durable cursor that moves with it.

        `check_loop`: raises InvalidRequest on another event loop than that of the client.
        """
        self.topic = topic
        self.caught_up = False
        self.problem: Error | None = None
        self.token: ResumeToken | None = None
        self._session = session
        self._store = store
        self._request = StreamParameters.of(topic, from_, to)
        self._lease = lease
        self._check_loop = check_loop
        self._from, self._to = from_, to
        self._counts: Counter[str] = Counter()
        self._high = 0
        self._handle = 0
        self._waiting: deque[ChangeBatch | Rollback] = deque()
        self._delivered: ChangeBatch | Rollback | None = None
        self._ended: StreamEnded | None = None
        self._unavailable_error: Error | None = None
        self._closed = False
        self._something = asyncio.Event()
        self._next_lock, self._settle_lock = asyncio.Lock(), asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    def describe(self) -> str:
        """Its topic, position and state, for `repr`."""
        where = "not opened" if self.token is None else f"at seqno {self.token.seqno}"
        state = "closed" if self._closed else "ended" if self._ended is not None else "open"
        return f"of {self.topic!r}, {where}, {state}"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChangeBatch | Rollback:
        """Return the next batch or rollback. Raises the error that ended the stream.

        Raises ServiceUnavailable after `max_unavailable` seconds without a connection; the next call continues the
        stream.
        """
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def next(self, timeout: float | None = None) -> ChangeBatch | Rollback | None:
        """Return the next batch or rollback; None at the end. Raises TimeoutError after `timeout` seconds.

        Raises the error that ended the stream, and ServiceUnavailable after `max_unavailable` seconds without a
        connection; the next call continues the stream. Concurrent calls run one after the other.
        """
        self._check_loop()
        deadline = None if timeout is None else asyncio.get_running_loop().time() + check_wait(timeout)
        async with asyncio.timeout_at(deadline):
            await self._next_lock.acquire()
        try:
            return await self._next(deadline)
        finally:
            self._next_lock.release()

    async def _next(self, deadline: float | None) -> ChangeBatch | Rollback | None:
        if not self._handle and not self._closed:
            async with asyncio.timeout_at(deadline):
                await self._open()
        async with self._settle_lock:
            await self._settle()
        async with asyncio.timeout_at(deadline):
            while not self._waiting and not self._closed:
                if self._ended is not None:
                    if self._ended.error is not None:
                        raise self._ended.error.with_traceback(None)
                    return None
                if self._unavailable_error is not None:
                    error, self._unavailable_error = self._unavailable_error, None
                    raise error
                self._check()
                self._something.clear()
                await self._something.wait()
        if self._closed:
            return None
        self._delivered = item = self._waiting.popleft()
        self.caught_up = isinstance(item, ChangeBatch) and item.caught_up
        self.token = item.token
        return item

    def _check(self) -> None:
        if self._session.broken is not None:
            raise self._session.broken.with_traceback(None)

    async def rolled_back(self, seqno: int) -> None:
        """Confirm the last rollback: the data is now that of `seqno`, at which it was complete.

        `seqno` is at most that of the rollback. Raises InvalidRequest if no rollback was delivered.
        """
        self._session.rolled_back(self._handle, seqno)
        self._delivered = None
        await self._store_token(self._session.core.token(self._handle))

    async def done(self) -> None:
        """Acknowledge the last batch now: store its token, and move the durable cursor there.

        Raises the errors of the store, UnknownCursor, and ServiceUnavailable after `max_unavailable` seconds.
        """
        if self._delivered is not None and not self._closed:
            async with self._settle_lock:
                await self._settle()
        if self._lease is not None:
            await self._lease.moved()

    async def close(self) -> None:
        """Close the stream. The last batch is not acknowledged, so its token is not stored."""
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._something.set()
            self._session.close_stream(self._handle)
            if self._lease is not None:
                await self._lease.close()

    def statistics(self) -> ChangeStatistics:
        """Return the counters of the stream."""
        counts = self._counts
        token = self.token
        at = (0, 0, 0) if token is None else (token.seqno, token.snapshot_start, token.snapshot_end)
        return ChangeStatistics(
            *(counts["mutations"], counts["deletions"], counts["bytes"], counts["rollbacks"], counts["interruptions"]),
            *(*at, counts["stored"], self._high, max(self._high - at[0], 0)),
        )

    async def _open(self) -> None:
        """Open the stream, starting from the stored token if there is one."""
        self._check()
        stored = None if self._store is None else await asyncio.to_thread(self._store.load, self.topic)
        if self._lease is not None:
            await self._lease.begin(self._from if stored is None else stored)
        if not self._closed:
            request = self._request if stored is None else StreamParameters.of(self.topic, stored, self._to)
            self._handle = self._session.open(request, self)

    async def _settle(self) -> None:
        """Acknowledge the last batch or rollback."""
        delivered = self._delivered
        if isinstance(delivered, Rollback):
            await self.rolled_back(delivered.seqno)
        elif delivered is not None:
            await self._store_token(delivered.token)
            self._delivered = None
            self._session.consumed(self._handle, len(delivered), delivered.bytes)

    async def _store_token(self, token: ResumeToken | None) -> None:
        if token is not None:
            self.token = token
            if self._store is not None:
                await asyncio.to_thread(self._store.save, self.topic, str(token))
                self._counts["stored"] = token.seqno
            if self._lease is not None:
                self._lease.move(token)

    # Events of the connection

    def take(self, event: ClientEvent) -> None:
        """Handle an event of the stream."""
        match event:
            case Delivered(_, mutations, size, token):
                absent = mutations.messages.values.absent
                deletions = 0 if absent is None else int(absent.sum())
                self._counts.update(mutations=len(mutations), deletions=deletions, bytes=size)
                self._high = max(self._high, mutations.last)
                self._waiting.append(ChangeBatch(self.topic, mutations, token, bytes=size))
            case StreamOpened(_, token, high):
                self.problem = None
                self._moved(token, high)
            case Completed(_, token, high):
                self._moved(token, high)
            case RollbackReceived(_, seqno, token):
                self._counts["rollbacks"] += 1
                self._high = 0
                self._waiting.append(Rollback(self.topic, seqno, token))
            case Interrupted(_, error, _):
                self._counts["interruptions"] += 1
                self.problem = error
            case StreamEnded():
                self._ended = event
            case CaughtUp() | EndConnection():
                pass  # `Completed` reports the first as well; the session handles the second
        self._something.set()

    def report_unavailable(self, error: Error | None) -> None:
        """Raise this error in the calls that wait; None: the service is available again."""
        self._unavailable_error = error
        self._something.set()

    def _moved(self, token: ResumeToken, high: int) -> None:
        """Deliver a new token, with the last batch if that still waits. `high`: the seqno of the newest mutation."""
        self._high = max(self._high, high)
        caught_up = token.complete and token.seqno >= high
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, ChangeBatch):
            self._waiting[-1] = replace(last, token=token, complete=token.complete, caught_up=caught_up)
        else:
            self._waiting.append(ChangeBatch(self.topic, NOTHING, token, token.complete, caught_up))
