"""The connections for the change streams of a client

A `StreamSession` has one connection to a service and reconnects after it is lost. With several shards there is one
session for each service, created when first needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from snapshots.shards import shard_of
from txnbuffer.client.links import StreamConnector, StreamLink
from txnbuffer.errors import CallerError, ClientBroken, Error, ForeignToken, InvalidRequest, ServiceUnavailable
from txnbuffer.streams.client import ClientConfig, StreamClient
from txnbuffer.streams.messages import NO_END, ClientEvent, EndConnection, RequestFlag
from txnbuffer.streams.token import ResumeToken

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to connect."""

_STARTS = {"beginning": RequestFlag.FROM_OLDEST, "now": RequestFlag.FROM_NOW}


class StreamParameters(NamedTuple):
    """The parameters of a stream. `start`: the token, with the topic, to start from. `end`: the last seqno."""

    start: ResumeToken
    flags: RequestFlag
    end: int

    @classmethod
    def of(cls, topic: str, from_: str | ResumeToken, to: int | str | None) -> Self:
        """Return the parameters for the arguments of `Client.stream`. Raises the same errors."""
        start, flags = parse_start(topic, from_)
        end = NO_END
        if to == "now":
            flags |= RequestFlag.TO_NOW
        elif isinstance(to, int) and not isinstance(to, bool) and to >= 0:
            end = to
        elif to is not None:
            raise InvalidRequest(f"to must be a seqno, 'now' or None, got {to!r}")
        return cls(start, flags, end)

    def resumed(self, token: str) -> Self:
        """Return the parameters with a stored token as the start. Raises UnreadableToken, ForeignToken."""
        start, flags = parse_start(self.start.topic, token)
        return self._replace(start=start, flags=flags | (self.flags & RequestFlag.TO_NOW))


class StreamListener(Protocol):
    """The interface with which a session reports events to a stream."""

    def take(self, event: ClientEvent) -> None:
        """Handle an event of the stream."""

    def report_unavailable(self, error: Error | None) -> None:
        """Raise this error in the calls that wait; None: the service is available again."""

    async def close(self) -> None: ...


class StreamSession:
    """The streams of one service, over one connection, which opens with the first stream.

    Calls that wait fail after `max_unavailable` seconds without a connection.
    """

    def __init__(self, connector: StreamConnector, max_unavailable: float, config: ClientConfig | None = None) -> None:
        self.core = StreamClient(config or ClientConfig())
        self._connector = connector
        self._max_unavailable = max_unavailable
        self._streams: dict[int, StreamListener] = {}
        self._wake_writer = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_at = 0.0
        self._end_error: Error | None = None
        self.broken: Error | None = None
        """The error because of which all streams have ended."""

    async def close(self) -> None:
        """Close all streams and the connection. Streams that are opened later fail."""
        self.broken = self.broken or ServiceUnavailable("the client was closed")
        for stream in [*self._streams.values()]:
            await stream.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # For streams

    def open(self, request: StreamParameters) -> int:
        """Request a stream; return its handle."""
        if self._task is None:
            self._lost_at = time.monotonic()
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self.core.open(request.start, time.monotonic(), end=request.end, flags=request.flags)

    def add(self, handle: int, stream: StreamListener) -> None:
        """Pass the events of a stream to its listener."""
        self._streams[handle] = stream
        if self.broken is not None:
            stream.report_unavailable(self.broken)
        self._poke()

    def close_stream(self, handle: int) -> None:
        self._streams.pop(handle, None)
        self.core.close(handle)
        self._poke()

    def consumed(self, handle: int, items: int, size: int) -> None:
        self.core.consumed(handle, items, size)
        self._poke()

    def rolled_back(self, handle: int, seqno: int) -> None:
        self.core.rolled_back(handle, seqno, time.monotonic())
        self._poke()

    # Staying connected

    def _poke(self) -> None:
        self._deliver()
        self._wake_writer.set()

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            error: Error
            try:
                link = await self._connector()
                pause = FIRST_PAUSE
                error = await self._talk(link)
            except Error as refused:
                error = refused
            except Exception as unexpected:
                error = ClientBroken(
                    f"internal error in change streams: {unexpected!r}; open a new client, and report this"
                )
            self.core.disconnected()
            self._deliver()
            waited = time.monotonic() - self._lost_at
            if isinstance(error, CallerError | ClientBroken) or waited >= self._max_unavailable:
                reported = (
                    error if not error.retryable else ServiceUnavailable(f"no service for {waited:.0f} s: {error}")
                )
                for stream in self._streams.values():
                    stream.report_unavailable(reported)
            if isinstance(error, ClientBroken):
                self.broken = error
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _talk(self, link: StreamLink) -> Error:
        """Use a connection until it ends; return the error that ended it."""
        self._end_error = None
        self.core.connected(time.monotonic())
        self._deliver()
        reading = asyncio.ensure_future(self._read(link))
        writing = asyncio.ensure_future(self._write(link))
        try:
            await asyncio.wait([reading, writing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            found = await asyncio.gather(reading, writing, return_exceptions=True)
            await link.close()
            self._lost_at = time.monotonic()
        for outcome in found:
            if isinstance(outcome, Exception) and not isinstance(outcome, Error):
                raise outcome
        errors = [outcome for outcome in found if isinstance(outcome, Error)]
        return self._end_error or (errors[0] if errors else ServiceUnavailable("the service ended the connection"))

    async def _read(self, link: StreamLink) -> None:
        while (messages := await link.receive()) is not None:
            self.core.receive(messages, time.monotonic())
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
                async with asyncio.timeout(None if due is None else max(due - time.monotonic(), 0.0)):
                    await self._wake_writer.wait()
            except TimeoutError:
                self.core.tick(time.monotonic())
                self._deliver()

    def _deliver(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, EndConnection):
                self._end_error = event.error
            elif (stream := self._streams.get(event.stream)) is not None:
                stream.take(event)


def parse_start(topic: str, from_: str | ResumeToken) -> tuple[ResumeToken, RequestFlag]:
    """Return the start of a request for the argument `from_`.

    Raises InvalidRequest, UnreadableToken, and ForeignToken for the token of another topic.
    """
    if isinstance(from_, str) and from_ in _STARTS:
        return ResumeToken(topic), _STARTS[from_]
    token = ResumeToken.parse(from_) if isinstance(from_, str) else from_
    if not isinstance(token, ResumeToken):
        raise InvalidRequest(f"from_ must be 'beginning', 'now' or a resume token, got {from_!r}")
    if token.topic != topic:
        raise ForeignToken(f"the resume token belongs to topic {token.topic!r}, not to {topic!r}")
    return token, RequestFlag.NONE


class ShardStreams:
    """The stream sessions of all shards. `connectors`: one for the service of each shard."""

    def __init__(self, connectors: Sequence[StreamConnector], max_unavailable: float) -> None:
        self._connectors = connectors
        self._max_unavailable = max_unavailable
        self._open: dict[int, StreamSession] = {}

    def of(self, topic: str) -> StreamSession:
        """Return the session of the service that owns a topic."""
        number = shard_of(topic, len(self._connectors))
        found = self._open.get(number)
        if found is None:
            found = self._open[number] = StreamSession(self._connectors[number], self._max_unavailable)
        return found

    async def close(self) -> None:
        """Close all streams and connections."""
        for session in self._open.values():
            await session.close()
