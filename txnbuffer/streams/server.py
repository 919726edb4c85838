"""The server's side of change streams: one connection, the checks of a stream request, durable cursors.

A connection takes messages, answers from topics and cursors, and times. Call `take_effects` and `take_frame` after each
input. `wanted` omits streams without credits, so their cursors lag instead of filling the memory of the connection. A
second connection with the same name supersedes the first.

A durable cursor is a name and the seqno up to which its reader has everything; the owner of the topic keeps the
mutations after it. It moves forward when its reader acknowledges, and never back, except to the point where the history
branched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias

from broker_io.errors import Error, TooManyStreams
from txnbuffer.errors import (
    ConnectionSilent,
    ConnectionSuperseded,
    ForeignToken,
    InvalidRequest,
    SeqnoOutOfRange,
    StreamBranched,
    StreamExists,
    StreamMemoryExhausted,
    StreamTrimmed,
    StreamViolation,
)
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.streams.failover import FailoverLog, ResumeToken, common_seqno, rollback_point
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseCursor,
    CloseStream,
    EndConnection,
    EndReason,
    FindTopic,
    Goodbye,
    Grant,
    Noop,
    Ok,
    OpenCursor,
    Refused,
    RequestFlag,
    RollbackRequired,
    ServerEffect,
    ServerMessage,
    StreamDemand,
    StreamEnd,
    StreamHello,
    StreamMutations,
    StreamRequest,
)
from txnbuffer.streams.producer import ConnectionStatistics, Producer, of_stream
from txnbuffer.streams.states import Event, Producing, Pulse, next_state

Answer: TypeAlias = Ok | RollbackRequired | Refused


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """The state of a topic at its owner.

    `high_seqno`: the newest mutation; `purge_seqno`: deletions up to it may be missing; `trimmed_seqno`: mutations up
    to it were trimmed from the log. `has_memory`: there is memory for another stream.
    """

    cluster: str
    incarnation: str
    log: FailoverLog
    high_seqno: int
    purge_seqno: int = 0
    trimmed_seqno: int = 0
    has_memory: bool = True


def answer(request: StreamRequest, info: TopicInfo) -> Answer:
    """The answer to a request: Ok with the start of the stream, a rollback, or a refusal."""
    try:
        return _checked(request, info)
    except Error as error:
        return Refused(request.stream, error)


def _checked(request: StreamRequest, info: TopicInfo) -> Ok | RollbackRequired:
    """Raises the error with which the request is refused."""
    stream, topic, start, end = request[:4]
    snapshot_start, snapshot_end, flags = request.snapshot_start, request.snapshot_end, request.flags
    advice = "start from a resume token"
    if request.cluster not in ("", info.cluster):
        raise ForeignToken(
            f"topic {topic} belongs to cluster {info.cluster}, not {request.cluster}: use a token of this cluster"
        )
    ignores_start = RequestFlag.FROM_NOW in flags or RequestFlag.FROM_OLDEST in flags
    if ignores_start:
        start = info.high_seqno if RequestFlag.FROM_NOW in flags else info.trimmed_seqno
        snapshot_start = snapshot_end = start
    if not 0 <= start <= end:
        raise SeqnoOutOfRange(f"can't stream topic {topic}: start {start} is after end {end}; {advice}")
    if not 0 <= snapshot_start <= start <= snapshot_end:
        snapshot = f"[{snapshot_start}, {snapshot_end}]"
        raise SeqnoOutOfRange(f"can't stream topic {topic}: start {start} is not within {snapshot}; {advice}")
    point = None if ignores_start else _rollback(request, info)
    if point is not None:
        return RollbackRequired(stream, point)
    if RequestFlag.TO_NOW in flags:
        end = info.high_seqno
    if not start <= min(end, info.high_seqno):
        last = info.high_seqno
        raise SeqnoOutOfRange(f"can't stream topic {topic}: start {start} is after its last mutation, {last}; {advice}")
    if start < info.trimmed_seqno:
        raise StreamTrimmed(
            f"topic {topic} is trimmed up to seqno {info.trimmed_seqno}, a stream from {start} would have a "
            f"gap; start from the oldest mutation"
        )
    if start in (snapshot_start, snapshot_end):
        snapshot_start = snapshot_end = start
    if not info.has_memory:
        raise StreamMemoryExhausted(
            f"no memory for a stream of topic {topic} now, the limit is streams.memory_bytes; try again later",
            "streams.memory_bytes",
        )
    return Ok(
        *(stream, info.log.for_readers, start, snapshot_start, snapshot_end, end, info.high_seqno, info.purge_seqno),
        *(info.cluster, info.incarnation),
    )


def _rollback(request: StreamRequest, info: TopicInfo) -> int | None:
    """The rollback point of a request. If the topic was created again, it has no history in common with the old one."""
    same = request.incarnation in ("", info.incarnation)
    return rollback_point(
        request.start,
        request.snapshot_start,
        request.snapshot_end,
        request.versions if same else (),
        info.log,
        info.high_seqno,
        purge_seqno=0 if RequestFlag.IGNORE_PURGED in request.flags else info.purge_seqno,
        known_purge_seqno=request.purge_seqno if same else 0,
        strict=RequestFlag.STRICT in request.flags,
    )


MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits of a connection: `max_streams`; `hello_timeout` seconds until the client's hello; a stream that has
    messages but no credits for `slow_after` seconds is ended as too slow; the range of noop intervals in seconds.
    """

    max_streams: int = 1000
    hello_timeout: float = 60.0
    slow_after: float = 720.0
    min_noop_interval: float = 0.1
    max_noop_interval: float = 10_800.0


@dataclass(eq=False)
class StreamServer:
    """One connection. `name` is "" until the client's hello, or if it has none."""

    _config: ServerConfig
    _opened_at: float
    name: str = ""
    closed: bool = False
    _pulse: Pulse | None = None
    _streams: dict[int, Producer] = field(default_factory=dict)
    _last_stream: int = 0
    _out: deque[tuple[ServerMessage, int]] = field(default_factory=deque)
    _effects: list[ServerEffect] = field(default_factory=list)
    _totals: Counter[str] = field(default_factory=Counter)
    _ends: Counter[str] = field(default_factory=Counter)

    # --- called for the client ---

    def receive(self, messages: Iterable[ClientMessage], now: float) -> None:
        """Process messages of the client, in order. A violation of the protocol ends the connection."""
        try:
            for message in messages:
                if not self.closed:
                    self._receive(message, now)
        except StreamViolation as error:
            self.hang_up(error)

    def _receive(self, message: ClientMessage, now: float) -> None:
        if isinstance(message, StreamHello):
            self._hello(message, now)
            return
        if self._pulse is None:
            raise StreamViolation("a connection must begin with hello; use a client of this release")
        self._pulse.heard(now)
        match message:
            case StreamRequest():
                self._request(message)
            case Grant(stream, items, size):
                if producer := self._streams.get(stream):
                    producer.allowance.grant(items, size)
                    producer.pause(now)
            case CloseStream(stream):
                if producer := self._streams.get(stream):
                    self._drop(producer, Event.CLOSED, EndReason.CLOSED)

    def _hello(self, hello: StreamHello, now: float) -> None:
        low, high = self._config.min_noop_interval, self._config.max_noop_interval
        if self._pulse is not None:
            raise StreamViolation("a connection must have only one hello; open another connection")
        if len(hello.name.encode()) > MAX_NAME or not low <= hello.noop_interval <= high:
            raise StreamViolation(
                f"a connection's name must have up to {MAX_NAME} bytes, its noop interval must be {low} to {high} s"
            )
        self.name = hello.name
        self._pulse = Pulse(hello.noop_interval, now)

    def _request(self, request: StreamRequest) -> None:
        stream = request.stream
        if stream in self._streams:
            exists = StreamExists(f"stream {stream} of this connection is already open: use another number")
            self._say(Refused(stream, exists))
        elif stream <= self._last_stream:
            raise StreamViolation(f"stream {stream} is requested after stream {self._last_stream}: numbers must ascend")
        elif len(self._streams) >= self._config.max_streams:
            self._last_stream = stream
            limit = self._config.max_streams
            text = f"the connection has {limit} streams open, the limit is streams.max_streams: close some"
            many = TooManyStreams(text, "streams.max_streams")
            self._say(Refused(stream, many))
        else:
            self._last_stream = stream
            self._streams[stream] = Producer(request, request.end)
            self._effects.append(FindTopic(stream, request.topic))

    @property
    def open_streams(self) -> int:
        """How many streams are open, or asked for."""
        return len(self._streams)

    # --- called for topics ---

    def topic_found(self, stream: int, info: TopicInfo, now: float) -> None:
        """The answer to FindTopic; it is ignored if the client has closed the stream meanwhile."""
        producer = self._streams.get(stream)
        if producer is None:
            return
        result = answer(producer.request, info)
        self._say(result)
        if not isinstance(result, Ok):
            self._totals["rollbacks"] += isinstance(result, RollbackRequired)
            self._forget(producer, Event.ROLLBACK if isinstance(result, RollbackRequired) else Event.REFUSED)
            return
        producer.opened(result)
        self._totals["opened"] += 1
        if producer.finished:
            self._end(producer, EndReason.OK)
            return
        producer.pause(now)
        topic, floor = producer.request.topic, producer.announced
        self._effects.append(OpenCursor(stream, topic, producer.sent, producer.end, floor))

    def topic_refused(self, stream: int, error: Error) -> None:
        """The answer to FindTopic if the topic can't be streamed from here."""
        if producer := self._streams.get(stream):
            self._say(Refused(stream, error))
            self._forget(producer, Event.REFUSED)

    def advanced(self, topic: str, high_seqno: int, now: float) -> None:
        """The topic now has mutations up to `seqno`."""
        for producer in self._streams.values():
            if producer.request.topic == topic and producer.state is not Producing.ASKED:
                producer.high = max(producer.high, high_seqno)
                producer.pause(now)

    def end_topic(self, topic: str, reason: EndReason) -> None:
        """End all streams of a topic: it is owned by another service, branched, or was deleted."""
        for producer in [*self._streams.values()]:
            if producer.request.topic == topic:
                self.end(producer.request.stream, reason)

    # --- called for cursors ---

    def wanted(self) -> list[StreamDemand]:
        """What each stream can take now; the streams take turns to be first."""
        ready = [
            StreamDemand(stream, *left)
            for stream, producer in self._streams.items()
            if producer.state is not Producing.ASKED and (left := producer.allowance.left())[0]
        ]
        turn = self._totals["turns"] % max(1, len(ready))
        self._totals["turns"] += 1
        return ready[turn:] + ready[:turn]

    def scan_opens(self, stream: int, purge_seqno: int) -> bool:
        """The cursor reads the log, which lacks deletions up to a seqno; False if that ends the stream.

        Call it before passing on what was read. A client that had nothing and has got nothing can't miss any.
        """
        producer = self._streams.get(stream)
        if producer is None:
            return False
        request = producer.request
        began_empty = not request.start or RequestFlag.FROM_OLDEST in request.flags
        if began_empty and not producer.allowance.sent_items:
            producer.purge = purge_seqno
        known = producer.purge == purge_seqno or RequestFlag.IGNORE_PURGED in request.flags
        if 0 < producer.sent < purge_seqno and not known:
            self.end(stream, EndReason.ROLLBACK)
            return False
        return True

    def snapshot_begins(self, stream: int, start: int, end: int, *, disk: bool = False, repeats: bool = False) -> None:
        """The cursor enters a snapshot, or extends the last one, from the log if `disk`; `repeats` as in a `Slice`."""
        if producer := self._streams.get(stream):
            self._say(producer.snapshot_begins(start, end, disk=disk, repeats=repeats))

    def mutations(self, stream: int, mutations: MutationBatch, now: float) -> None:
        """Mutations of the cursor: not more than in `wanted`."""
        producer = self._streams.get(stream)
        if producer is not None and len(mutations):
            size = mutations.payload()
            self._say(producer.mutations(mutations, size), size)
            producer.pause(now)
            self._totals["items"] += len(mutations)
            self._totals["bytes"] += size

    def snapshot_ends(self, stream: int) -> None:
        """The cursor has returned the whole snapshot."""
        producer = self._streams.get(stream)
        if producer is not None and (message := producer.snapshot_ends()):
            self._say(message)
            if producer.finished:
                self._end(producer, EndReason.OK)

    def end(self, stream: int, reason: EndReason) -> None:
        """End a stream. One whose request is not answered yet gets its answer instead."""
        producer = self._streams.get(stream)
        if producer is not None and producer.state is not Producing.ASKED:
            self._end(producer, reason)

    # --- time and output ---

    def tick(self, now: float) -> None:
        """Send noops, close the connection of a silent client, end streams of slow readers."""
        if self.closed:
            return
        late = now - self._opened_at >= self._config.hello_timeout
        if self._pulse.silent(now) if self._pulse else late:
            self.hang_up(ConnectionSilent("the client was silent for too long; open another connection"))
            return
        if self._pulse and self._pulse.should_ask(now):
            self._say(Noop())
        for producer in [*self._streams.values()]:
            if producer.paused_since is not None and now - producer.paused_since >= self._config.slow_after:
                self._end(producer, EndReason.TOO_SLOW)

    def hang_up(self, error: Error) -> None:
        """End the connection and its streams."""
        if not self.closed:
            self.disconnected()
            self._say(Goodbye(error))
            self._effects.append(EndConnection(error))

    def disconnected(self) -> None:
        """The connection is lost: close the cursors."""
        self.closed = True
        for producer in [*self._streams.values()]:
            self._drop(producer, Event.CLOSED, EndReason.DISCONNECTED)

    def take_frame(self, max_bytes: int, now: float) -> tuple[ServerMessage, ...]:
        """The next messages to send, in order, with mutations of at most `max_bytes` bytes, or a single larger one."""
        frame: list[ServerMessage] = []
        size = 0
        while self._out:
            message, more = self._out[0]
            size += more
            if frame and size > max_bytes:
                break
            self._out.popleft()
            frame.append(message)
        if frame and self._pulse:
            self._pulse.sent(now)
        return tuple(frame)

    def take_effects(self) -> list[ServerEffect]:
        effects, self._effects = self._effects, []
        return effects

    def statistics(self, now: float) -> ConnectionStatistics:
        ready: dict[int, list[MutationBatch]] = {}
        for message, _ in self._out:
            if isinstance(message, StreamMutations):
                ready.setdefault(message.stream, []).append(message.mutations)
        streams = tuple(of_stream(one, now, ready.get(number, ())) for number, one in self._streams.items())
        states = Counter(stream.state for stream in streams)
        return ConnectionStatistics(
            name=self.name,
            streams=streams,
            items_sent=self._totals["items"],
            bytes_sent=self._totals["bytes"],
            items_remaining=sum(stream.items_remaining for stream in streams),
            items_ready=sum(stream.items_ready for stream in streams),
            unacked_bytes=sum(stream.unacked_bytes for stream in streams),
            max_buffer_bytes=sum(stream.max_buffer_bytes for stream in streams),
            backfill_num_active=states["backfilling"],
            backfill_num_pending=states["pending"],
            messages_waiting=len(self._out),
            noops_sent=self._pulse.noops if self._pulse else 0,
            streams_opened=self._totals["opened"],
            rollbacks=self._totals["rollbacks"],
            stream_ends=tuple(sorted(self._ends.items())),
        )

    def _say(self, message: ServerMessage, size: int = 0) -> None:
        self._out.append((message, size))

    def _end(self, producer: Producer, reason: EndReason) -> None:
        self._say(StreamEnd(producer.request.stream, reason))
        self._drop(producer, Event.REACHED_END if reason is EndReason.OK else Event.ENDED, reason)

    def _drop(self, producer: Producer, event: Event, reason: EndReason) -> None:
        if producer.state is not Producing.ASKED:
            self._ends[reason.name] += 1
            self._effects.append(CloseCursor(producer.request.stream, reason))
        self._forget(producer, event)

    def _forget(self, producer: Producer, event: Event) -> None:
        producer.state = next_state(producer.state, event)
        del self._streams[producer.request.stream]


@dataclass(slots=True, eq=False)
class Connections:
    """The current connection of each principal and name."""

    _named: dict[tuple[str, str], StreamServer] = field(default_factory=dict)

    def named(self, server: StreamServer, principal: str = "") -> StreamServer | None:
        """A connection of a principal has sent its hello. Ends the connection that it supersedes, and returns it."""
        if not server.name or server.closed:
            return None
        older = self._named.get((principal, server.name))
        if older is server:
            return None
        self._named[principal, server.name] = server
        if older is None or older.closed:
            return None
        older.hang_up(ConnectionSuperseded(f"another connection named {server.name!r} was opened; this one ends"))
        return older

    def closed(self, server: StreamServer, principal: str = "") -> None:
        """A connection has ended."""
        if self._named.get((principal, server.name)) is server:
            del self._named[principal, server.name]


def check_cursor_name(name: object) -> str:
    """The name of a durable cursor, checked. Raises InvalidRequest."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME:
        raise InvalidRequest(
            f"the name of a cursor must be 1 to {MAX_NAME} bytes of printable text, got {repr(name)[:80]}"
        )
    return name


def acknowledged(at: int | ResumeToken, topic: str, info: TopicInfo) -> int:
    """The seqno up to which a reader has everything, given its seqno or its resume token.

    Raises ForeignToken for a token of another topic, StreamBranched for one of another history, SeqnoOutOfRange.
    """
    if isinstance(at, ResumeToken):
        if (at.topic, at.cluster, at.incarnation) != (topic, info.cluster, info.incarnation):
            raise ForeignToken(
                f"the resume token belongs to another topic than {topic!r}, or to a deleted one of this name"
            )
        common = common_seqno(at.versions, info.log, info.high_seqno)
        if at.seqno and (common is None or at.seqno > common):
            raise StreamBranched(f"the history of topic {topic!r} branched after seqno {common or 0}: roll back first")
        at = at.seqno
    if not 0 <= at <= info.high_seqno:
        raise SeqnoOutOfRange(f"a cursor can't be at seqno {at}: topic {topic!r} has mutations 1 to {info.high_seqno}")
    return at


def first_needed(seqno: int, first_seqnos: Mapping[int, int]) -> int | None:
    """The first ledger with records after `seqno`; None if no ledger has a visible record.

    `first_seqnos`: ledger → seqno of the first visible record at or after its start, ascending.
    """
    ledgers = [*first_seqnos.items()]
    usable = bisect_right(ledgers, seqno + 1, key=itemgetter(1))
    return ledgers[max(usable - 1, 0)][0] if ledgers else None
