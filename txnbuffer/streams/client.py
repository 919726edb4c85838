"""The client's side of change streams: streams that outlive connections, and the current connection.

Streams are opened and closed at any time. They are requested once there is a connection, and again after each
unexpected end. Call `take_events` and `take_frame` after each input. A stream whose reader does not call `consumed`
uses up its window and pauses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from broker_io.errors import Error
from txnbuffer.errors import (
    BackfillFailed,
    ConnectionSilent,
    ForeignToken,
    InvalidRequest,
    StreamBranched,
    StreamClosed,
    StreamFenced,
    StreamTooSlow,
    StreamTopicDeleted,
    StreamTrimmed,
    StreamViolation,
)
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.failover import ResumeToken
from txnbuffer.streams.messages import (
    NO_END,
    CaughtUp,
    ClientEvent,
    ClientMessage,
    CloseStream,
    Completed,
    Delivered,
    EndConnection,
    EndReason,
    Goodbye,
    Grant,
    Interrupted,
    Noop,
    NoopAnswer,
    Ok,
    Refused,
    RequestFlag,
    RollbackReceived,
    RollbackRequired,
    ServerMessage,
    SnapshotBegin,
    SnapshotEnd,
    StreamEnd,
    StreamEnded,
    StreamHello,
    StreamMutations,
    StreamOpened,
    StreamRequest,
)
from txnbuffer.streams.states import Consuming, Event, Window, next_state

StreamMessage = Ok | RollbackRequired | Refused | SnapshotBegin | StreamMutations | SnapshotEnd | StreamEnd

ERRORS: dict[EndReason, tuple[type[Error], str]] = {
    EndReason.CLOSED: (StreamClosed, "the service closed it; open it again"),
    EndReason.STATE_CHANGED: (StreamFenced, "the service no longer owns the topic; open it again at the new owner"),
    EndReason.DISCONNECTED: (StreamClosed, "the connection is lost; open it again"),
    EndReason.TOO_SLOW: (
        StreamTooSlow,
        "its reader did not keep up; open it again, and read faster or with a larger window",
    ),
    EndReason.BACKFILL_FAILED: (
        BackfillFailed,
        "the log could not be read; check the service's log output, then open it again",
    ),
    EndReason.ROLLBACK: (StreamBranched, "the topic's history branched; open it again to get the rollback seqno"),
    EndReason.TRIMMED: (StreamTrimmed, "its next mutations were trimmed; start from the oldest mutation"),
    EndReason.DELETED: (StreamTopicDeleted, "the topic was deleted; read a new one of its name from the beginning"),
}
"""The error for each reason, and what to do."""


def end_error(topic: str, reason: EndReason) -> Error | None:
    """The error for the reader of a stream that ended with `reason`; None if it reached its end."""
    if reason is EndReason.OK:
        return None
    error, advice = ERRORS[reason]
    return error(f"the stream of topic {topic} ended: {advice}")


_ONCE = RequestFlag.FROM_NOW | RequestFlag.FROM_OLDEST | RequestFlag.TO_NOW
"""Flags that only the first request of a stream has, until it is answered."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One stream over all its connections.

    `handle` identifies it for the user; `stream` is its number on the connection, 0 while it has none. `high`: newest
    seqno known.
    """

    handle: int
    token: ResumeToken
    high: int
    window: Window
    end: int
    flags: RequestFlag
    reopen: bool
    state: Consuming = Consuming.WAITING
    stream: int = 0
    caught_up: bool = False
    rollback_to: int = 0
    retry_at: float = 0.0
    delay: float = 0.0

    def request(self, stream: int) -> tuple[StreamRequest, Grant] | StreamEnded:
        """Request it under a number, unless it has reached its end."""
        token = self.token
        if token.complete and token.seqno >= self.end and not self.flags & _ONCE:
            self.state = next_state(self.state, Event.REACHED_END)
            return StreamEnded(self.handle, None, token)
        self.state = next_state(self.state, Event.REQUEST)
        self.stream = stream
        end = self.end if token.complete else max(self.end, token.snapshot_end)
        request = StreamRequest(
            *(stream, token.topic, token.seqno, end, token.versions, token.snapshot_start, token.snapshot_end),
            *(self.flags, token.cluster, token.incarnation, token.purge_seqno),
        )
        return request, Grant(stream, *self.window.opened())

    def receive(self, message: StreamMessage) -> list[ClientEvent]:
        """Process a message of the server. Raises StreamViolation if it violates the protocol."""
        match message:
            case StreamMutations(_, mutations):
                return self._mutations(mutations)
            case SnapshotBegin():
                return self._snapshot_begins(message)
            case SnapshotEnd():
                return self._snapshot_ends(message)
            case Ok():
                return self._opened(message)
            case RollbackRequired(_, seqno):
                return self._rollback(seqno)
            case Refused(_, error):
                return self._stopped(Event.REFUSED_NOW, error)
            case StreamEnd(_, reason):
                return self._ended(reason)

    def rolled_back(self, seqno: int) -> None:
        """The reader's data was rolled back to `seqno`. Raises InvalidRequest if this was not requested."""
        if self.state is not Consuming.ROLLING_BACK or not 0 <= seqno <= self.rollback_to:
            allowed = f"the seqno must be 0 to {self.rollback_to}"
            why = allowed if self.state is Consuming.ROLLING_BACK else "no rollback was requested"
            raise InvalidRequest(f"topic {self.token.topic} was rolled back to seqno {seqno}, but {why}")
        self.state = next_state(self.state, Event.ROLLED_BACK)
        self.token = self.token.rolled_back(seqno)

    def disconnected(self) -> list[ClientEvent]:
        """The connection is lost; later messages of it are ignored."""
        on_the_wire = self.state in (Consuming.REQUESTED, Consuming.BETWEEN, Consuming.INSIDE)
        self.state = next_state(self.state, Event.DISCONNECTED)
        self.stream = 0
        error = end_error(self.token.topic, EndReason.DISCONNECTED)
        return self.fail(error) if on_the_wire and error and not self.reopen else []

    def fail(self, error: Error) -> list[ClientEvent]:
        """The stream has failed for good."""
        self.state = next_state(self.state, Event.FAILED)
        self.stream = 0
        return [StreamEnded(self.handle, error, self.token)]

    # --- messages ---

    def _opened(self, ok: Ok) -> list[ClientEvent]:
        self.state = next_state(self.state, Event.OK)
        before, token = self.token, self.token
        if token.cluster not in ("", ok.cluster):
            raise ForeignToken(
                f"topic {token.topic} belongs to cluster {ok.cluster}, its resume token to {token.cluster}"
            )
        repositioned = self.flags & (RequestFlag.FROM_NOW | RequestFlag.FROM_OLDEST)
        if not repositioned and (
            ok.start != token.seqno or (token.seqno and token.incarnation not in ("", ok.incarnation))
        ):
            raise StreamViolation(f"a stream of topic {token.topic} starts at another seqno than requested; report it")
        self.token = token = ResumeToken(
            *(token.topic, ok.cluster, ok.incarnation, ok.log.versions),
            *(ok.start, ok.snapshot_start, ok.snapshot_end, ok.purge_seqno),
        )
        self.end = ok.end if self.flags & RequestFlag.TO_NOW else self.end
        self.flags &= ~_ONCE
        self.high = ok.high_seqno
        self.caught_up = False
        events: list[ClientEvent] = [StreamOpened(self.handle, token, self.high)]
        if before.seqno > before.snapshot_start and token.complete and not repositioned:
            events.append(Completed(self.handle, token, self.high))
        return events + self._perhaps_caught_up()

    def _snapshot_begins(self, begin: SnapshotBegin) -> list[ClientEvent]:
        self.state = next_state(self.state, Event.SNAPSHOT_BEGIN)
        token = self.token
        if begin.start > token.seqno + 1 or begin.end < (token.seqno + 1 if token.complete else token.snapshot_end):
            raise StreamViolation(f"the snapshot [{begin.start}, {begin.end}] does not follow {token}; report it")
        self.token = token.entered(begin.end)
        self.high = max(self.high, begin.end)
        return []

    def _mutations(self, mutations: MutationBatch) -> list[ClientEvent]:
        self.state = next_state(self.state, Event.MUTATIONS)
        seqnos, token = mutations.seqnos, self.token
        first, last = int(seqnos[0]), int(seqnos[-1])
        ascending = len(seqnos) == 1 or bool((np.diff(seqnos) > 0).all())
        if not (ascending and token.seqno < first <= last <= token.snapshot_end):
            raise StreamViolation(f"mutations {first} to {last} do not follow {token}; report it")
        size = mutations.payload()
        self.window.received(len(mutations), size)
        self.delay = 0.0
        self.token = token.reached(last)
        return [Delivered(self.handle, mutations, size, self.token)]

    def _snapshot_ends(self, end: SnapshotEnd) -> list[ClientEvent]:
        self.state = next_state(self.state, Event.SNAPSHOT_END)
        if end.seqno != self.token.snapshot_end:
            raise StreamViolation(f"a snapshot ends at {end.seqno}, but {self.token} was announced; report it")
        self.token = self.token.completed(end.seqno)
        self.high = max(self.high, end.high_seqno)
        self.delay = 0.0
        return [Completed(self.handle, self.token, self.high), *self._perhaps_caught_up()]

    def _perhaps_caught_up(self) -> list[ClientEvent]:
        was, self.caught_up = self.caught_up, self.token.complete and self.token.seqno >= self.high
        return [CaughtUp(self.handle, self.token)] if self.caught_up and not was else []

    def _rollback(self, seqno: int) -> list[ClientEvent]:
        self.state = next_state(self.state, Event.ROLLBACK)
        if not 0 <= seqno < max(self.token.seqno, len(self.token.versions[:1])):
            raise StreamViolation(f"a rollback to {seqno} undoes nothing of {self.token}; report it")
        self.rollback_to = seqno
        self.stream = 0
        return [RollbackReceived(self.handle, seqno, self.token)]

    def _ended(self, reason: EndReason) -> list[ClientEvent]:
        error = end_error(self.token.topic, reason)
        if error is not None:
            return self._stopped(Event.ENDED, error)
        state = next_state(self.state, Event.REACHED_END)
        if not self.token.complete or self.token.seqno < self.end:
            raise StreamViolation(f"a stream ends at {self.token}, before seqno {self.end}; report it")
        self.state = state
        self.stream = 0
        return [StreamEnded(self.handle, None, self.token)]

    def _stopped(self, event: Event, error: Error) -> list[ClientEvent]:
        """It was interrupted or refused: open it again if the error is retryable."""
        if not (self.reopen and error.retryable):
            next_state(self.state, event)
            return self.fail(error)
        self.state = next_state(self.state, event)
        self.stream = 0
        return [Interrupted(self.handle, error, self.token)]


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of a client: `name` of the connection, "" for none; windows of a stream in mutations and bytes; seconds
    between noops; first and longest delay in seconds before an interrupted stream is requested again.
    """

    name: str = ""
    window_items: int = 65_536
    window_bytes: int = 8 * 1024 * 1024
    noop_interval: float = 20.0
    first_retry: float = 0.05
    last_retry: float = 10.0


@dataclass(eq=False)
class StreamClient:
    """All streams of a client, and its current connection.

    `_heard`: the time of the last message of the connection; None while there is no connection.
    """

    _config: ClientConfig
    _heard: float | None = None
    _handles: int = 0
    _last_stream: int = 0
    _consumers: dict[int, Consumer] = field(default_factory=dict)
    _streams: dict[int, Consumer] = field(default_factory=dict)
    _out: list[ClientMessage] = field(default_factory=list)
    _events: list[ClientEvent] = field(default_factory=list)

    # --- called by the user ---

    def open(
        self,
        start: ResumeToken,
        now: float,
        *,
        end: int = NO_END,
        flags: RequestFlag = RequestFlag.NONE,
        reopen: bool = True,
    ) -> int:
        """Open a stream from a token on (one with only a topic: from its beginning); returns its handle.

        It ends with the snapshot that contains `end`. Without `reopen` its first interruption ends it.
        """
        if not 0 <= end <= NO_END:
            raise InvalidRequest(f"end must be a seqno from 0 to {NO_END}, got {end} for topic {start.topic}")
        window = Window(self._config.window_items, self._config.window_bytes)
        self._handles += 1
        self._consumers[self._handles] = Consumer(self._handles, start, start.seqno, window, end, flags, reopen)
        self._request_due(now)
        return self._handles

    def close(self, handle: int) -> None:
        """Close a stream; it has no further events."""
        consumer = self._consumers.pop(handle, None)
        if consumer is not None:
            consumer.state = next_state(consumer.state, Event.CLOSED)
            if self._streams.pop(consumer.stream, None):
                self._out.append(CloseStream(consumer.stream))
        self._events = [event for event in self._events if isinstance(event, EndConnection) or event.stream != handle]

    def consumed(self, handle: int, items: int, size: int) -> None:
        """The reader has processed delivered mutations; each is reported once, also those before a rollback."""
        if consumer := self._consumers.get(handle):
            consumer.window.consumed(items, size)
            if consumer.stream in self._streams and (grant := consumer.window.due()):
                self._out.append(Grant(consumer.stream, *grant))

    def rolled_back(self, handle: int, seqno: int, now: float) -> None:
        """The answer to RollbackReceived. Raises InvalidRequest if none was requested, or `seqno` is too high."""
        consumer = self._consumers.get(handle)
        if consumer is None:
            raise InvalidRequest(f"stream {handle} does not exist: it was closed or has ended")
        consumer.rolled_back(seqno)
        self._request_due(now)

    def token(self, handle: int) -> ResumeToken | None:
        """The token after the last delivery of a stream; the reader may not have processed it yet."""
        consumer = self._consumers.get(handle)
        return None if consumer is None else consumer.token

    # --- called for the connection ---

    def connected(self, now: float) -> None:
        """A new connection is established; notifications of an older one no longer apply."""
        self.disconnected()
        self._last_stream = 0
        self._heard = now
        self._out = [StreamHello(self._config.name, self._config.noop_interval)]
        self._request_due(now)

    def disconnected(self) -> None:
        """The connection is lost or was closed."""
        self._heard = None
        self._out, self._streams = [], {}
        for consumer in [*self._consumers.values()]:
            consumer.retry_at = 0.0
            self._notify(consumer.disconnected())

    def receive(self, messages: Iterable[ServerMessage], now: float) -> None:
        """Process messages of the server, in order; they are ignored after the connection was closed."""
        for message in messages:
            if self._heard is None:
                return
            self._heard = now
            if isinstance(message, Noop):
                self._out.append(NoopAnswer())
            elif isinstance(message, Goodbye):
                self._hang_up(message.error)
            elif (consumer := self._streams.get(message.stream)) is not None:
                self._receive(consumer, message, now)
            elif not 0 < message.stream <= self._last_stream:
                self._hang_up(StreamViolation(f"a message for stream {message.stream}, which was never requested"))

    def tick(self, now: float) -> None:
        """Close a silent connection; request interrupted streams again whose delay is over."""
        if self._heard is not None and now >= self._heard + 2 * self._config.noop_interval:
            self._hang_up(ConnectionSilent("the service was silent for too long; connect again"))
        self._request_due(now)

    def next_tick(self) -> float | None:
        """The time of the next call of `tick` at the latest; None while there is no connection."""
        if self._heard is None:
            return None
        waiting = [one.retry_at for one in self._consumers.values() if one.state is Consuming.WAITING]
        return min([self._heard + 2 * self._config.noop_interval, *waiting])

    def take_frame(self) -> tuple[ClientMessage, ...]:
        frame, self._out = tuple(self._out), []
        return frame

    def take_events(self) -> list[ClientEvent]:
        events, self._events = self._events, []
        return events

    # --- internal ---

    def _receive(self, consumer: Consumer, message: StreamMessage, now: float) -> None:
        stream = consumer.stream
        try:
            self._notify(consumer.receive(message))
        except (StreamViolation, ForeignToken) as error:
            self._out.append(CloseStream(stream))
            self._notify(consumer.fail(error))
        if consumer.stream != stream:
            del self._streams[stream]
            if consumer.state is Consuming.WAITING:
                first, last = self._config.first_retry, self._config.last_retry
                consumer.delay = min(last, 2 * consumer.delay or first)
                consumer.retry_at = now + consumer.delay

    def _request_due(self, now: float) -> None:
        if self._heard is None:
            return
        for consumer in [*self._consumers.values()]:
            if consumer.state is Consuming.WAITING and consumer.retry_at <= now:
                asked = consumer.request(self._last_stream + 1)
                if isinstance(asked, StreamEnded):
                    self._notify([asked])
                    continue
                self._last_stream += 1
                self._streams[self._last_stream] = consumer
                self._out += asked

    def _notify(self, events: list[ClientEvent]) -> None:
        self._events += events
        for event in events:
            if isinstance(event, StreamEnded):
                self._consumers.pop(event.stream, None)

    def _hang_up(self, error: Error) -> None:
        self.disconnected()
        self._events.append(EndConnection(error))
