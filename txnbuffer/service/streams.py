"""All change streams of a service: feeds of topics, connections of clients, and the memory that they share.

A topic that nobody streams costs nothing. Streams hold no data back, durable cursors do: what retention drops, a slow
stream without one has lost.

One connection of change streams as the service sees it: what cursors give goes out when the client takes it.

Nothing is taken from a cursor before the frame before went out, so a connection holds about a frame.

Reads of the log for cursors that are behind memory: a bounded number at a time, each in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from broker_io.batch import Width
from broker_io.errors import Error, NotSupported, PositionTrimmed, TopicNotFound
from broker_io.partitions import partition_name
from broker_io.port import PartitionedBroker, Reader
from txnbuffer.config import StreamsConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import (
    BackfillFailed,
    CoordinatorStopped,
    MutationsTrimmed,
    RegistrationFailed,
    SeqnoGap,
    ServiceUnavailable,
)
from txnbuffer.mutations import Cursor, MemoryBudget, MutationBatch, ReadLog, StopReading, Wake
from txnbuffer.recordset import pieces
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.limits import MIB
from txnbuffer.service.snapshot_scheduler import SnapshotScheduler
from txnbuffer.service.stream_topic import Cursors, Feed, SeqnoAnchor, oldest_seqno, whole
from txnbuffer.service.topic import Topics
from txnbuffer.streams.effects import CloseCursor, EndConnection, FindTopic, OpenCursor, StreamDemand
from txnbuffer.streams.messages import ClientMessage, EndReason, ServerMessage
from txnbuffer.streams.server import Connections, ServerConfig, StreamServer, TopicInfo

FRAME_BYTES = MIB
TURN_ITEMS = 16_384
LEAST_TURN_BYTES = 64 * 1024


class Feeds(Protocol):
    """What a connection needs of the service's streams."""

    @property
    def feeds(self) -> Mapping[str, Feed]: ...

    def now(self) -> float: ...

    def named(self, connection: StreamConnection) -> None: ...

    def gone(self, connection: StreamConnection) -> None: ...

    def find(self, connection: StreamConnection, stream: int, name: str) -> None: ...

    def take_hold(self, feed: Feed, cursor: str, connection: StreamConnection) -> None: ...

    def let_go(self, feed: Feed, cursor: Cursor) -> None: ...

    def settle(self, feed: Feed) -> None: ...


class StreamConnection:
    """Made by `Streams.connect`. Call `receive` for each frame of the client; `next` gives the frames to send.

    `ended` is set once nothing but the last words is left to send.
    """

    def __init__(self, streams: Feeds, number: int, peer: str, config: ServerConfig) -> None:
        self.peer = peer
        self.server = StreamServer(config, streams.now())
        self.ended = asyncio.Event()
        self._streams = streams
        self._number = number
        self._cursors: dict[int, tuple[Feed, Cursor]] = {}
        self._something = asyncio.Event()

    # For whoever carries the frames

    def receive(self, messages: Iterable[ClientMessage]) -> None:
        """A frame of the client; what comes after the end is dropped."""
        self.server.receive(messages, self._streams.now())
        self._streams.named(self)
        self.settle()

    async def next(self) -> tuple[ServerMessage, ...] | None:
        """The next frame to send; None: there will be none, end the connection."""
        while True:
            if frame := self.server.take_frame(FRAME_BYTES, self._streams.now()):
                return frame
            if self.server.closed:
                return None
            self._something.clear()
            if not self._pump():
                await self._something.wait()

    def lost(self) -> None:
        """The client went away."""
        self.server.disconnected()
        self.settle()

    # For the streams of the service

    def found(self, stream: int, facts: TopicInfo) -> None:
        self.server.topic_found(stream, facts, self._streams.now())
        self.settle()

    def refused(self, stream: int, error: Error) -> None:
        self.server.topic_refused(stream, error)
        self.settle()

    def advanced(self, feed: Feed) -> None:
        """A topic has more mutations."""
        self.server.advanced(feed.name, feed.manager.high, self._streams.now())

    def tick(self) -> None:
        self.server.tick(self._streams.now())
        self.settle()

    def close(self, error: Error) -> None:
        """Say why, and end."""
        self.server.hang_up(error)
        self.settle()

    def wake(self) -> None:
        """There may be something to send."""
        self._something.set()

    def settle(self) -> None:
        """Do what the server asks for."""
        touched: dict[Feed, None] = {}
        while effects := self.server.take_effects():
            for effect in effects:
                match effect:
                    case FindTopic(stream, topic):
                        self._streams.find(self, stream, topic)
                    case OpenCursor():
                        self._open(effect)
                    case CloseCursor(stream):
                        held = self._cursors.pop(stream, None)
                        if held is not None:
                            self._streams.let_go(*held)
                            touched[held[0]] = None
                    case EndConnection():
                        pass  # `next` tells once all is sent
        if self.server.closed:
            self.ended.set()
            self._streams.gone(self)
        for feed in touched:
            self._streams.settle(feed)
        self._something.set()

    def _open(self, asked: OpenCursor) -> None:
        feed = self._streams.feeds[asked.topic]
        last = asked.end if asked.end <= feed.manager.high else None
        name = f"{self._number}.{asked.stream}"
        try:
            cursor = feed.manager.register(name, asked.start, end=last, snapshot_end=asked.floor)
        except Error as error:
            self.server.end(asked.stream, _reason(error))
            return
        self._cursors[asked.stream] = feed, cursor
        self._streams.take_hold(feed, name, self)

    def _pump(self) -> bool:
        """Take from cursors what streams may have now, about a frame; whether there was anything."""
        wanted = [one for one in self.server.wanted() if one.stream in self._cursors]
        share = max(FRAME_BYTES // max(len(wanted), 1), LEAST_TURN_BYTES)
        given = 0
        for one in wanted:
            if given >= FRAME_BYTES:
                break
            if one.stream in self._cursors:  # it may have ended with what another one caused
                feed, cursor = self._cursors[one.stream]
                given += self._give(one, feed, cursor, share)
                self._streams.settle(feed)
        return given > 0

    def _give(self, wanted: StreamDemand, feed: Feed, cursor: Cursor, share: int) -> int:
        """About how many bytes there are to send now."""
        server, stream = self.server, wanted.stream
        disk = cursor.backfill is not None
        try:
            slices = cursor.take(min(wanted.items, TURN_ITEMS), min(wanted.bytes, share))
        except Error as error:
            server.end(stream, _reason(error))
            self.settle()
            return 1
        now, given = self._streams.now(), 0
        for start, end, begins, ends, rows in slices:
            if begins:
                server.snapshot_begins(stream, start, end, disk=disk)
            server.mutations(stream, rows, now)
            given += 1 + rows.payload()
            if ends:
                server.snapshot_ends(stream)
        if slices:
            self.settle()
        elif feed.problem is not None and not cursor.has_next():
            server.end(stream, EndReason.BACKFILL_FAILED)
            self.settle()
        return given


def _reason(error: Error) -> EndReason:
    return EndReason.TRIMMED if isinstance(error, MutationsTrimmed) else EndReason.BACKFILL_FAILED


T = TypeVar("T")

ANSWER_BYTES = 4 * MIB
"""An answer holds about so much at most, so that readers take turns."""
READ_MESSAGES = 4096
READ_SECONDS = 30.0
"""In which a message that the log holds must be read."""


class Backfills:
    """`readers` reads go on at a time, the others wait. `done` is told of each feed that got an answer.

    `items` were read so far; `active` reads go on now.
    """

    def __init__(self, topics: Topics, readers: int, done: Callable[[Feed], None]) -> None:
        self.items = 0
        self.active = 0
        self._topics = topics
        self._done = done
        self._room = asyncio.Semaphore(readers)
        self._threads = ThreadPoolExecutor(readers, "txnbuffer-backfill")
        self._tasks: dict[tuple[Feed, int], asyncio.Task[None]] = {}

    def start(self, feed: Feed, request: ReadLog) -> None:
        key = feed, request.ticket
        task = self._tasks[key] = asyncio.get_running_loop().create_task(self._serve(feed, request))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def stop(self, feed: Feed, ticket: int) -> None:
        """Nobody wants the answer."""
        if (task := self._tasks.get((feed, ticket))) is not None:
            task.cancel()

    def close(self) -> None:
        for task in [*self._tasks.values()]:
            task.cancel()
        self._threads.shutdown(wait=False)

    @property
    def pending(self) -> int:
        """Reads that wait for their turn."""
        return len(self._tasks) - self.active

    async def _serve(self, feed: Feed, request: ReadLog) -> None:
        async with self._room:
            self.active += 1
            try:
                rows = await self._read(feed, request)
            except PositionTrimmed:
                first = feed.oldest(feed.followed.buffer.first_ledger)
                feed.manager.backfill_failed(request.ticket, MutationsTrimmed(request.first, first))
            except Error as error:
                feed.manager.backfill_failed(request.ticket, error)
            else:
                self.items += len(rows)
                feed.reached(request.cursor, rows)
                with contextlib.suppress(SeqnoGap):  # its cursor raises it
                    feed.manager.backfilled(request.ticket, rows)
            finally:
                self.active -= 1
        self._done(feed)

    async def _read(self, feed: Feed, request: ReadLog) -> MutationBatch:
        """The mutations that a request wants, or the first of them. Raises MutationsTrimmed and what reading raises."""
        place = feed.place(request)
        wanted = min(request.max_bytes, ANSWER_BYTES)
        found: list[MutationBatch] = []
        width = Width()
        start = whole(place.position)
        inclusive = place.inclusive or start != place.position
        reader: Reader = await self._in_thread(
            lambda: self._topics.broker.reader(feed.name, start, inclusive=inclusive)
        )
        try:
            while wanted > 0 and place.seqno <= request.last and not width.full:
                placed = await self._in_thread(lambda: reader.read(limit=READ_MESSAGES, timeout=READ_SECONDS))
                if placed is None:
                    raise BackfillFailed(f"topic {feed.name}: nothing was read behind {place.position}; try again")
                for piece in pieces(placed):
                    rows = await self._topics.exclusively([feed.name], feed.judged, piece, place)
                    place = SeqnoAnchor(place.seqno, piece.positions.last, inclusive=False)
                    if rows is None:
                        continue
                    place = place._replace(seqno=rows.last + 1)
                    if (rows := _within(rows, request)) is not None:
                        found.append(rows)
                        width.add(rows.messages.properties, len(rows))
                        wanted -= rows.payload()
                    if wanted <= 0 or width.full:
                        break
        finally:
            self._threads.submit(reader.close)
        return MutationBatch.concat(found)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _within(rows: MutationBatch, request: ReadLog) -> MutationBatch | None:
    start, stop = max(request.first - rows.first, 0), min(request.last - rows.first + 1, len(rows))
    if start >= stop:
        return None
    return rows if (start, stop) == (0, len(rows)) else rows.take(slice(start, stop))


TICK = 0.25
"""Seconds between two looks at the time."""
LINGER = 30.0
"""Seconds that a topic is fed on after its last stream, for a reader that comes back."""
LEAST_NOOP = 1.0

Register = Callable[[str], Awaitable[None]]


class Streams:
    """`register` makes a topic one that has seqnos. All of it belongs to the engine's loop."""

    def __init__(
        self,
        topics: Topics,
        scheduler: SnapshotScheduler,
        register: Register,
        config: StreamsConfig,
        now: Callable[[], float],
    ) -> None:
        self.now = now
        self.feeds: dict[str, Feed] = {}
        self.budget = MemoryBudget(config.memory_bytes)
        self.connections: set[StreamConnection] = set()
        scheduler.capturing = self.persist
        self.cursors = Cursors(topics, scheduler, self._known, limit=config.max_cursors, max_bytes=config.cursor_bytes)
        self.backfills = Backfills(topics, config.readers, self.settle)
        self._loop = asyncio.get_running_loop()
        self._topics = topics
        self._register = register
        self._config = config
        self._server = ServerConfig(
            max_streams=config.max_streams, slow_after=config.slow_after, min_noop_interval=LEAST_NOOP
        )
        self._names = Connections()
        self._numbers = 0
        self._streams: dict[Feed, dict[str, StreamConnection]] = {}
        self._finding: set[asyncio.Task[None]] = set()
        self._opening: dict[str, asyncio.Lock] = {}
        self._cluster = ""
        self._ended: Error | None = None
        self._woken = False

    # For those who carry frames

    def connect(self, peer: str = "in process") -> StreamConnection:
        """A new connection; it begins with hello."""
        self._numbers += 1
        connection = StreamConnection(self, self._numbers, peer, self._server)
        self.connections.add(connection)
        if self._ended is not None:
            connection.close(self._ended)
        elif len(self.connections) > self._config.max_connections:
            limit = self._config.max_connections
            connection.close(ServiceUnavailable(f"{limit} stream connections are open, no more may be: try later"))
        return connection

    # For the engine

    async def run(self) -> None:
        """Keep the time of all connections, and stop feeding what nobody streams, for ever."""
        while True:
            await asyncio.sleep(TICK)
            for connection in [*self.connections]:
                connection.tick()
            for feed in [*self.feeds.values()]:
                self._look_at(feed)

    def persist(self, names: Iterable[str]) -> None:
        """Snapshots of the buffers of topics are about to be captured."""
        for name in names:
            if (feed := self.feeds.get(name)) is not None:
                feed.persist()
                self.settle(feed)

    def close(self, error: Error | None = None) -> None:
        """End all connections; nothing is served after that."""
        self._ended = error or CoordinatorStopped("the service stops: connect again later")
        for connection in [*self.connections]:
            connection.close(self._ended)
        for task in self._finding:
            task.cancel()
        self.backfills.close()
        for feed in self.feeds.values():
            feed.followed.sequencing.on_sequenced = None

    # For connections

    def named(self, connection: StreamConnection) -> None:
        """A client may have said its name: an older connection of the same name ends."""
        older = self._names.named(connection.server)
        for other in [one for one in self.connections if one.server is older]:
            other.settle()

    def gone(self, connection: StreamConnection) -> None:
        self.connections.discard(connection)
        self._names.closed(connection.server)

    def find(self, connection: StreamConnection, stream: int, name: str) -> None:
        """Tell a connection what is known of a topic."""
        task = self._loop.create_task(self._find(connection, stream, name))
        self._finding.add(task)
        task.add_done_callback(self._finding.discard)

    def take_hold(self, feed: Feed, cursor: str, connection: StreamConnection) -> None:
        """A stream reads from a feed."""
        self._streams[feed][cursor] = connection
        feed.idle_since = None

    def let_go(self, feed: Feed, cursor: Cursor) -> None:
        """A stream has ended."""
        cursor.close()
        feed.left(cursor.name)
        owners = self._streams.get(feed, {})
        owners.pop(cursor.name, None)
        if not owners:
            feed.idle_since = self.now()

    def settle(self, feed: Feed) -> None:
        """Do what a manager asks for, and win memory back if there is too much."""
        if self.budget.pressed:
            self.budget.recover()
            for other in self.feeds.values():
                self._execute(other)
        self._execute(feed)

    def _execute(self, feed: Feed) -> None:
        for effect in feed.manager.take_effects():
            match effect:
                case ReadLog():
                    self.backfills.start(feed, effect)
                case StopReading(ticket):
                    self.backfills.stop(feed, ticket)
                case Wake(cursor):
                    if (owner := self._streams.get(feed, {}).get(cursor)) is not None:
                        owner.wake()

    # Feeds

    def _news(self) -> None:
        """In any thread: something got seqnos."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False
        for feed in [*self.feeds.values()]:
            came = feed.take()
            if came or feed.problem is not None:
                for connection in {*self._streams[feed].values()}:
                    connection.advanced(feed)
                    connection.wake()
            if came:
                self.settle(feed)

    async def _find(self, connection: StreamConnection, stream: int, name: str) -> None:
        try:
            feed = await self._feed(name)
            facts = await self._facts(feed)
        except Error as error:
            connection.refused(stream, error)
            return
        except Exception as error:
            connection.refused(stream, Error(f"unexpected: {error!r}"))
            raise
        if self.feeds.get(name) is not feed:
            connection.refused(stream, ServiceUnavailable(f"topic {name!r} was let go just now: try again"))
            return
        feed.idle_since = self.now() if feed.idle_since is not None else None
        feed.take()
        connection.found(stream, replace(facts, high_seqno=feed.manager.high))
        self.settle(feed)

    async def _feed(self, name: str) -> Feed:
        """The feed of a topic, which is registered for it. Raises why it can't be streamed."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (feed := self.feeds.get(name)) is None:
                feed = await self._open(name)
                self._streams[feed] = {}
                self.feeds[name] = feed
                feed.take()
        if feed.problem is not None:
            raise feed.problem
        return feed

    async def _open(self, name: str) -> Feed:
        feed = Feed(name, await self._followed_topic(name), self._news, self.now())
        feed.begin(await self._topics.exclusively([name], feed.attach), self.budget)
        return feed

    async def _followed_topic(self, name: str) -> FollowedTopic:
        topic = self._topics.get(name)
        if topic is None or (topic.followed is None and topic.problem is None):
            self._topics.check(name)
            if name not in await self._topics.work(self._topics.broker.topics):
                raise await self._missing(name)
            await self._register(name)
            topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            problem = None if topic is None else topic.problem
            raise problem or RegistrationFailed(f"topic {name!r} could not be registered to be streamed: try again")
        return topic.followed

    async def _missing(self, name: str) -> Error:
        broker = self._topics.broker
        count = await self._topics.work(lambda: broker.partitions(name)) if isinstance(broker, PartitionedBroker) else 0
        if count:
            first = partition_name(name, 0)
            return NotSupported(
                f"topic {name!r} is partitioned: a stream is of one partition, such as {first!r}, "
                "or of all by `stream_partitions`"
            )
        return TopicNotFound(f"there is no topic {name!r} to stream")

    async def _facts(self, feed: Feed) -> TopicInfo:
        facts = await self._facts_of(feed.followed, feed.name)
        feed.manager.trim(facts.trimmed_seqno + 1)
        has_memory = self.budget.account.bytes <= self.budget.budget
        return replace(facts, high_seqno=feed.manager.high, has_memory=has_memory)

    async def _known(self, name: str) -> tuple[FollowedTopic, TopicInfo]:
        followed = await self._followed_topic(name)
        return followed, await self._facts_of(followed, name)

    async def _facts_of(self, followed: FollowedTopic, name: str) -> TopicInfo:
        broker = self._topics.broker
        if not self._cluster:
            self._cluster = await self._topics.work(broker.incarnation, self._topics.shard.topic(DECISIONS))
        ledgers = await self._topics.work(broker.ledgers, name)
        trimmed = oldest_seqno(followed, ledgers[0].ledger) - 1
        high = followed.sequencing.sequencer.next_seqno - 1
        return TopicInfo(self._cluster, followed.writer.incarnation, followed.failover, high, trimmed_seqno=trimmed)

    def _look_at(self, feed: Feed) -> None:
        """A topic may have stopped, or nobody may stream it any more."""
        topic = self._topics.get(feed.name)
        stopped = topic is None or topic.followed is not feed.followed
        if stopped:
            gone = topic is None or isinstance(topic.problem, TopicNotFound)
            reason = EndReason.DELETED if gone else EndReason.STATE_CHANGED
            for connection in {*self._streams[feed].values()}:
                connection.server.end_topic(feed.name, reason)
                connection.settle()
        idle = feed.idle_since is not None and self.now() - feed.idle_since > LINGER
        if stopped or idle:
            del self.feeds[feed.name], self._streams[feed]
            self._opening.pop(feed.name, None)
            feed.close()
