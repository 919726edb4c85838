"""The client's side of change streams: streams that go on over connections, and the connection of now.

Streams are opened and closed at any time; they are asked for once there is a connection, and again after each
unexpected end. Call `take_events` and `take_frame` after anything was told to it. A stream whose reader does
not tell `consumed` runs dry by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from broker_io.errors import Error
from txnbuffer.errors import InvalidRequest
from txnbuffer.streams.consumer import Consumer, StreamMessage
from txnbuffer.streams.credits import Window
from txnbuffer.streams.effects import ClientEvent, Ended, HangUp
from txnbuffer.streams.errors import ConnectionSilent, ForeignToken, StreamViolation
from txnbuffer.streams.liveness import ClientPulse
from txnbuffer.streams.messages import (
    NO_END,
    STREAM_VERSION,
    ClientMessage,
    CloseStream,
    Goodbye,
    Grant,
    Hello,
    Noop,
    NoopAnswer,
    RequestFlag,
    ServerMessage,
)
from txnbuffer.streams.states import Consuming, Event, consumed
from txnbuffer.streams.token import ResumeToken


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`name` of the connection, "" for none; windows of a stream in mutations and bytes; seconds between noops, and
    before an interrupted stream is asked for again, the first time and at most.
    """

    name: str = ""
    window_items: int = 65_536
    window_bytes: int = 8 * 1024 * 1024
    noop_interval: float = 20.0
    first_retry: float = 0.05
    last_retry: float = 10.0


class StreamClient:
    """All streams of a client and its one connection at a time."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._pulse: ClientPulse | None = None
        self._handles = 0
        self._last_stream = 0
        self._consumers: dict[int, Consumer] = {}
        self._streams: dict[int, Consumer] = {}
        self._out: list[ClientMessage] = []
        self._events: list[ClientEvent] = []

    # --- from the user ---

    def open(
        self,
        start: ResumeToken,
        now: float,
        *,
        end: int = NO_END,
        flags: RequestFlag = RequestFlag.NONE,
        reopen: bool = True,
    ) -> int:
        """A new stream from a token on, that of a mere topic for its beginning; its handle.

        It ends with the snapshot that holds `end`. Without `reopen` its first interruption ends it.
        """
        if not 0 <= end <= NO_END:
            raise InvalidRequest(f"a stream of topic {start.topic} can't end at seqno {end}")
        window = Window(self._config.window_items, self._config.window_bytes)
        self._handles += 1
        self._consumers[self._handles] = Consumer(self._handles, start, window, end, flags, reopen=reopen)
        self._request_due(now)
        return self._handles

    def close(self, handle: int) -> None:
        """No event of the stream comes any more."""
        consumer = self._consumers.pop(handle, None)
        if consumer is not None:
            consumer.state = consumed(consumer.state, Event.CLOSED)
            self._leave(consumer)
        self._events = [event for event in self._events if isinstance(event, HangUp) or event.stream != handle]

    def consumed(self, handle: int, items: int, size: int) -> None:
        """The reader is done with mutations that were delivered, each once, also with those before a rollback."""
        if consumer := self._consumers.get(handle):
            consumer.window.consumed(items, size)
            if consumer.stream in self._streams and (grant := consumer.window.due()):
                self._out.append(Grant(consumer.stream, *grant))

    def rolled_back(self, handle: int, seqno: int, now: float) -> None:
        """The answer to RollBack. Raises InvalidRequest where that was not asked for, or is not far enough."""
        consumer = self._consumers.get(handle)
        if consumer is None:
            raise InvalidRequest(f"there is no stream {handle}; it was closed or has ended")
        consumer.rolled_back(seqno)
        self._request_due(now)

    def token(self, handle: int) -> ResumeToken | None:
        """Where the deliveries of a stream stand; the reader may be behind."""
        consumer = self._consumers.get(handle)
        return None if consumer is None else consumer.token

    # --- from the connection ---

    def connected(self, now: float) -> None:
        """A new connection stands; nothing of an older one is to be told any more."""
        self.disconnected()
        self._last_stream = 0
        self._pulse = ClientPulse(self._config.noop_interval, now)
        self._out = [Hello(STREAM_VERSION, self._config.name, self._config.noop_interval)]
        self._request_due(now)

    def disconnected(self) -> None:
        """The connection is lost, or was given up."""
        self._pulse = None
        self._out, self._streams = [], {}
        for consumer in [*self._consumers.values()]:
            consumer.retry_at = 0.0
            self._tell(consumer.disconnected())

    def receive(self, messages: Iterable[ServerMessage], now: float) -> None:
        """Messages of the server, in order; those that come after the connection was given up are not looked at."""
        for message in messages:
            if self._pulse is None:
                return
            self._pulse.heard(now)
            if isinstance(message, Noop):
                self._out.append(NoopAnswer())
            elif isinstance(message, Goodbye):
                self._hang_up(message.error)
            elif (consumer := self._streams.get(message.stream)) is not None:
                self._receive(consumer, message, now)
            elif not 0 < message.stream <= self._last_stream:
                self._hang_up(StreamViolation(f"a message for stream {message.stream}, which was never asked for"))

    def tick(self, now: float) -> None:
        """Give up a silent connection, ask again for interrupted streams whose time has come."""
        if self._pulse is not None and self._pulse.silent(now):
            self._hang_up(ConnectionSilent("nothing was heard from the service for too long; connect again"))
        self._request_due(now)

    def next_tick(self) -> float | None:
        """When `tick` has something to do at the latest; None while there is no connection."""
        if self._pulse is None:
            return None
        waiting = [one.retry_at for one in self._consumers.values() if one.state is Consuming.WAITING]
        return min([self._pulse.next_time(), *waiting])

    def take_frame(self) -> tuple[ClientMessage, ...]:
        frame, self._out = tuple(self._out), []
        return frame

    def take_events(self) -> list[ClientEvent]:
        events, self._events = self._events, []
        return events

    # --- inside ---

    def _receive(self, consumer: Consumer, message: StreamMessage, now: float) -> None:
        stream = consumer.stream
        try:
            self._tell(consumer.receive(message))
        except (StreamViolation, ForeignToken) as error:
            self._out.append(CloseStream(stream))
            self._tell(consumer.fail(error))
        if consumer.stream != stream:
            del self._streams[stream]
            if consumer.state is Consuming.WAITING:
                first, last = self._config.first_retry, self._config.last_retry
                consumer.delay = min(last, 2 * consumer.delay or first)
                consumer.retry_at = now + consumer.delay

    def _request_due(self, now: float) -> None:
        if self._pulse is None:
            return
        for consumer in [*self._consumers.values()]:
            if consumer.state is Consuming.WAITING and consumer.retry_at <= now:
                asked = consumer.request(self._last_stream + 1)
                if isinstance(asked, Ended):
                    self._tell([asked])
                    continue
                self._last_stream += 1
                self._streams[self._last_stream] = consumer
                self._out += asked

    def _tell(self, events: list[ClientEvent]) -> None:
        self._events += events
        for event in events:
            if isinstance(event, Ended):
                self._consumers.pop(event.stream, None)

    def _leave(self, consumer: Consumer) -> None:
        if self._streams.pop(consumer.stream, None):
            self._out.append(CloseStream(consumer.stream))

    def _hang_up(self, error: Error) -> None:
        self.disconnected()
        self._events.append(HangUp(error))
