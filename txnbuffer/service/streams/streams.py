"""Change streams: the connections of clients, the feeds of topics, backfills from the log, and their shared memory.

A topic that nobody streams costs nothing. Durable cursors limit retention; streams without one do not, so a slow stream
may lose what retention trims. A connection takes from its cursors only after the previous frame was sent, so it holds
about one frame. A limited number of backfills read the log at a time, each in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial

from broker_io.batch import Width
from broker_io.compaction import CompactingBroker, CompactionState
from broker_io.environment import current
from broker_io.errors import Error, LimitExceeded, NotSupported, PositionTrimmed, TooManyStreams, TopicNotFound
from broker_io.partitions import partition_name
from broker_io.port import READ_SECONDS, PartitionedBroker, Reader, existing
from broker_io.position import NO_INDEX
from broker_io.waits import Waker
from txnbuffer.access.policy import Action, ResourceKind
from txnbuffer.config import StreamsConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import (
    CoordinatorStopped,
    MutationsTrimmed,
    RegistrationFailed,
    SeqnoGap,
    ServiceUnavailable,
)
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.cursor import Cursor
from txnbuffer.mutations.manager import MemoryBudget, ReadLog, StopReading, Wake
from txnbuffer.recordset import batch_slices
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.door.access import EVERYTHING_ALLOWED, Permissions
from txnbuffer.service.door.connection import MIB
from txnbuffer.service.door.quotas import ClientQuota, Quotas
from txnbuffer.service.streams.stream_topic import Feed, SeqnoAnchor, compactable
from txnbuffer.service.topics.topics import Topics
from txnbuffer.streams.messages import (
    ClientMessage,
    CloseCursor,
    EndConnection,
    EndReason,
    FindTopic,
    OpenCursor,
    ServerMessage,
    StreamDemand,
)
from txnbuffer.streams.server import Connections, ServerConfig, StreamServer, TopicInfo

FRAME_BYTES = MIB
TURN_ITEMS = 16_384
LEAST_TURN_BYTES = 64 * 1024


class StreamConnection:
    """A client's connection; created by `Streams.connect`.

    Call `receive` for each frame of the client; `next` returns the frames to send. `ended` is set once only the last
    frames are left to send.
    """

    def __init__(
        self,
        streams: Streams,
        number: int,
        peer: str,
        config: ServerConfig,
        quota: ClientQuota,
        permissions: Permissions,
    ) -> None:
        self.peer = peer
        self.quota = quota
        self.permissions = permissions
        self.server = StreamServer(config, streams.now())
        self.ended = asyncio.Event()
        self._streams = streams
        self._number = number
        self._cursors: dict[int, tuple[Feed, Cursor]] = {}
        self._wakeup = asyncio.Event()

    # For the transport

    def receive(self, messages: Iterable[ClientMessage]) -> None:
        """Handle a frame of the client; frames after the end are dropped."""
        self.server.receive(messages, self._streams.now())
        self._streams.client_named(self)
        self.settle()

    async def room(self) -> None:
        """Frames are handled as they arrive."""

    async def next(self) -> tuple[ServerMessage, ...] | None:
        """Return the next frame to send; None once the connection has ended."""
        while True:
            if frame := self.server.take_frame(FRAME_BYTES, self._streams.now()):
                return frame
            if self.server.closed:
                return None
            self._wakeup.clear()
            if not self._pump():
                await self._wakeup.wait()

    def lost(self) -> None:
        """The client disconnected."""
        self.server.disconnected()
        self.settle()

    def recheck(self) -> None:
        """Raises NotAuthorized if the client has to authenticate again, or may not read a topic any more."""
        self.permissions.check_valid()
        for feed, _ in self._cursors.values():
            self.permissions.check(Action.READ, ResourceKind.TOPIC, feed.name)

    # For `Streams`

    def topic_found(self, stream: int, facts: TopicInfo) -> None:
        self.server.topic_found(stream, facts, self._streams.now())
        self.settle()

    def topic_refused(self, stream: int, error: Error) -> None:
        self.server.topic_refused(stream, error)
        self.settle()

    def advanced(self, feed: Feed) -> None:
        """Report that a topic has more mutations."""
        self.server.advanced(feed.name, feed.manager.high, self._streams.now())
        self._wakeup.set()

    def tick(self) -> None:
        self.server.tick(self._streams.now())
        self.settle()

    def close(self, error: Error) -> None:
        """End the connection with an error."""
        self.server.hang_up(error)
        self.settle()

    def wake(self) -> None:
        """Make `next` check again for something to send."""
        self._wakeup.set()

    def settle(self) -> None:
        """Execute the effects of the stream server."""
        touched: dict[Feed, None] = {}
        while effects := self.server.take_effects():
            for effect in effects:
                match effect:
                    case FindTopic(stream, topic):
                        refusal: Error | None = self.permissions.refusal(Action.READ, ResourceKind.TOPIC, topic)
                        refusal = refusal or self._streams.limit(self)
                        if refusal is None:
                            self._streams.find(self, stream, topic)
                        else:
                            self.server.topic_refused(stream, refusal)
                    case OpenCursor():
                        self._open(effect)
                    case CloseCursor(stream):
                        held = self._cursors.pop(stream, None)
                        if held is not None:
                            self._streams.cursor_closed(*held)
                            touched[held[0]] = None
                    case EndConnection():
                        pass  # `next` ends once all is sent
        if self.server.closed:
            self.ended.set()
            self._streams.gone(self)
        for feed in touched:
            self._streams.settle(feed)
        self._wakeup.set()

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
        self._streams.cursor_opened(feed, name, self)

    def _pump(self) -> bool:
        """Take about one frame from the cursors, as far as streams allow; return whether there was anything."""
        wanted = [one for one in self.server.wanted() if self._has_news(one.stream)]
        share = max(FRAME_BYTES // max(len(wanted), 1), LEAST_TURN_BYTES)
        given = 0
        for one in wanted:
            if given >= FRAME_BYTES:
                break
            if one.stream in self._cursors:  # an effect of another stream may have ended it
                feed, cursor = self._cursors[one.stream]
                given += self._give(one, feed, cursor, share)
                self._streams.settle(feed)
        return given > 0

    def _has_news(self, stream: int) -> bool:
        """Whether to ask the cursor of a stream."""
        if (held := self._cursors.get(stream)) is None:
            return False
        feed, cursor = held
        return not cursor.idle or feed.problem is not None

    def _give(self, wanted: StreamDemand, feed: Feed, cursor: Cursor, share: int) -> int:
        """Pass a cursor's mutations to the server; return their approximate size."""
        server, stream = self.server, wanted.stream
        disk = cursor.backfill is not None
        if disk and not server.scan_opens(stream, feed.purge_seqno):
            self.settle()
            return 1
        try:
            slices = cursor.take(min(wanted.items, TURN_ITEMS), min(wanted.bytes, share))
        except Error as error:
            server.end(stream, _reason(error))
            self.settle()
            return 1
        now, given = self._streams.now(), 0
        for start, end, begins, ends, rows, repeats in slices:
            if begins:
                server.snapshot_begins(stream, start, end, disk=disk, repeats=repeats)
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


ANSWER_BYTES = 4 * MIB
"""Approximate maximum size of one backfill answer, so that cursors take turns."""
READ_MESSAGES = 4096
REMOVED_BYTES = 64
"""Size of a mutation without content, which has only a seqno and a position."""
LEAST_MESSAGE_BYTES = 256
"""Of a smaller answer, a read takes no more messages than if they had this size."""


class Backfills:
    """Reads of the log for cursors whose mutations are no longer in memory; at most `readers` at a time.

    `was_read` is called before an answer is used, `done` with each feed that got one. `items`: mutations read so far;
    `active`: reads in progress.
    """

    def __init__(
        self,
        topics: Topics,
        readers: int,
        was_read: Callable[[Feed], Awaitable[None]],
        done: Callable[[Feed], None],
    ) -> None:
        self.items = 0
        self.active = 0
        self._topics = topics
        self._was_read = was_read
        self._done = done
        self._room = asyncio.Semaphore(readers)
        self._threads = current().threads.executor(readers, "txnbuffer-backfill")
        self._tasks: dict[tuple[Feed, int], asyncio.Task[None]] = {}

    def start(self, feed: Feed, request: ReadLog) -> None:
        key = feed, request.ticket
        task = self._tasks[key] = asyncio.get_running_loop().create_task(self._serve(feed, request))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def stop(self, feed: Feed, ticket: int) -> None:
        """Cancel a read."""
        if (task := self._tasks.get((feed, ticket))) is not None:
            task.cancel()

    def close(self) -> None:
        for task in [*self._tasks.values()]:
            task.cancel()
        self._threads.shutdown(wait=False)

    @property
    def pending(self) -> int:
        """Reads that wait for a free reader."""
        return len(self._tasks) - self.active

    async def _serve(self, feed: Feed, request: ReadLog) -> None:
        async with self._room:
            self.active += 1
            try:
                rows = await self._read(feed, request)
                await self._was_read(feed)
            except PositionTrimmed:
                feed.manager.backfill_failed(request.ticket, MutationsTrimmed(request.first, feed.oldest()))
            except Error as error:
                feed.manager.backfill_failed(request.ticket, error)
            else:
                self.items += len(rows)
                feed.reached(request.cursor, rows)
                with contextlib.suppress(SeqnoGap):  # the cursor raises it
                    feed.manager.backfilled(request.ticket, rows)
            finally:
                self.active -= 1
        self._done(feed)

    async def _read(self, feed: Feed, request: ReadLog) -> MutationBatch:
        """The requested mutations, or the first of them. Raises MutationsTrimmed, and as `Reader.read`."""
        place = feed.read_start(request)
        share = feed.manager.backfill_memory.share  # it may be smaller than when the answer was requested
        wanted = min(request.max_bytes, ANSWER_BYTES, share)
        found: list[MutationBatch] = []
        width = Width()
        start = place.position._replace(batch=NO_INDEX)  # the message that contains the record
        inclusive = place.inclusive or start != place.position
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        open_reader = partial(self._topics.broker.reader, feed.name, start, inclusive=inclusive)
        reader: Reader = await in_thread(open_reader)
        try:
            while wanted > 0 and place.seqno <= request.last and not width.full:
                limit = READ_MESSAGES if place.seqno < request.first else -(-wanted // LEAST_MESSAGE_BYTES)
                read = partial(reader.read, limit=min(limit, READ_MESSAGES), timeout=READ_SECONDS)
                placed = existing(await in_thread(read), feed.name, place.position)
                for piece in batch_slices(placed):
                    rows = await self._topics.exclusively([feed.name], feed.visible, piece, place)
                    if rows is None and piece.positions.last < place.position:
                        continue  # the beginning of the entry in whose middle the read starts
                    place = SeqnoAnchor(place.seqno, piece.positions.last, inclusive=False)
                    if rows is None:
                        continue
                    place = place._replace(seqno=rows.last + 1)
                    if (rows := _within(rows, request)) is not None:
                        fitting = next(rows.parts(wanted))
                        found.append(fitting)
                        width.add(fitting.messages.properties, len(fitting))
                        wanted = wanted - _size(fitting) if len(fitting) == len(rows) else 0
                    if wanted <= 0 or width.full:
                        break
        finally:
            try:
                self._threads.submit(reader.close)
            except RuntimeError:  # the service is closing
                reader.close()
        return MutationBatch.concat(found)


def _size(rows: MutationBatch) -> int:
    return rows.payload() + (0 if rows.removed is None else REMOVED_BYTES * int(rows.removed.sum()))


def _within(rows: MutationBatch, request: ReadLog) -> MutationBatch | None:
    start, stop = max(request.first - rows.first, 0), min(request.last - rows.first + 1, len(rows))
    if start >= stop:
        return None
    return rows if (start, stop) == (0, len(rows)) else rows.take(slice(start, stop))


TICK = 0.25
"""Seconds between two ticks of the connections."""
LINGER = 30.0
"""Seconds that a feed stays open after its last stream, for a client that reconnects."""
LEAST_NOOP = 1.0


class Streams:
    """All connections and feeds. Runs on the engine's loop."""

    def __init__(self, topics: Topics, config: StreamsConfig, now: Callable[[], float], quotas: Quotas) -> None:
        self.now = now
        self._quotas = quotas
        self.feeds: dict[str, Feed] = {}
        self.budget = MemoryBudget(config.memory_bytes)
        self.connections: dict[StreamConnection, None] = {}
        self.backfills = Backfills(topics, config.readers, self._was_read, self.settle)
        self._loop = asyncio.get_running_loop()
        self._topics = topics
        self._config = config
        self._server = ServerConfig(
            max_streams=config.max_streams, slow_after=config.slow_after, min_noop_interval=LEAST_NOOP
        )
        self._names = Connections()
        self._numbers = 0
        self._streams: dict[Feed, dict[str, StreamConnection]] = {}
        self._finding: dict[asyncio.Task[None], None] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._compacting: dict[str, int] = {}
        self._cluster = ""
        self._ended: Error | None = None
        self._waker = Waker(self._loop, self._take)  # woken in any thread when messages were sequenced

    # For the transport

    def connect(self, peer: str = "in process", permissions: Permissions = EVERYTHING_ALLOWED) -> StreamConnection:
        """Open a connection; its first message must be the hello."""
        self._numbers += 1
        quota = self._quotas.of(permissions)
        connection = StreamConnection(self, self._numbers, peer, self._server, quota, permissions)
        self.connections[connection] = None
        own = sum(one.quota.usage is quota.usage for one in self.connections) if quota.usage.limits.streams else 0
        # Each stream may have an older connection that is not known to be lost.
        if (refusal := quota.check("streams", (own - 1) // 2)) is not None:
            connection.close(refusal)
        elif self._ended is not None:
            connection.close(self._ended)
        elif len(self.connections) > self._config.max_connections:
            text = f"{self._config.max_connections} stream connections are open, the maximum: try again later"
            connection.close(self._quotas.count(TooManyStreams(text, "streams.max_connections")))
        return connection

    # For the engine

    async def run(self) -> None:
        """Tick all connections, and open and close feeds, forever."""
        while True:
            await asyncio.sleep(TICK)
            for connection in [*self.connections]:
                connection.tick()
            for feed in [*self.feeds.values()]:
                self._check_feed(feed)
            self.budget.backfill_memory.tick()
            self.budget.backfill_memory.give_turns()
            self._free_memory()
            for name, topic in [*self._topics.by_name.items()]:
                if name not in self.feeds and topic.followed is not None and topic.followed.cursors:
                    with contextlib.suppress(Error):  # the topic has stopped: try again
                        await self._feed(name)

    def persist(self, names: Iterable[str]) -> None:
        """Update the mutation indexes of topics before their buffers' snapshots are captured."""
        for name in names:
            if (feed := self.feeds.get(name)) is not None:
                feed.persist()
                self.settle(feed)

    def close(self, error: Error | None = None) -> None:
        """End all connections and reject new ones."""
        self._ended = error or CoordinatorStopped("the service is stopping: connect again later")
        for connection in [*self.connections]:
            connection.close(self._ended)
        for task in self._finding:
            task.cancel()
        self.backfills.close()
        if error is not None:
            self._detach()

    async def finish(self) -> None:
        """After `close`, once nothing is written: add all mutations to the indexes for the last snapshots."""
        for name, feed in self.feeds.items():
            topic = self._topics.get(name)
            with contextlib.suppress(Error):  # a later read of the log begins earlier than it could
                if topic is not None and topic.followed is feed.followed:
                    await self._topics.exclusively([name], feed.followed.sequence_all)
                    feed.take()
                    feed.persist()
        self._detach()

    def _detach(self) -> None:
        for feed in self.feeds.values():
            feed.followed.on_sequenced = None

    async def cursor_topic(self, name: str) -> tuple[FollowedTopic, TopicInfo]:
        """A topic for its durable cursors; it is registered if needed. Raises the error that prevents streaming it."""
        followed = await self._followed_topic(name)
        return followed, await self._topic_info(followed, name)

    # For the compaction of topics

    def begin_compaction(self, name: str, last: int) -> int:
        """A registered topic is about to be compacted up to the ledger `last`; return the last one allowed, 0: none.

        All messages up to there are numbered. No ledger is compacted after the end of a snapshot that a stream has
        begun to read from the log. Snapshots that begin from now on end after the compacted ledgers. Call
        `end_compaction` afterwards, also after an error.
        """
        topic, feed = self._topics.get(name), self.feeds.get(name)
        if topic is None or topic.followed is None:
            return 0
        self._take()
        last = compactable(topic.followed, last, None if feed is None else feed.manager.compaction_bound())
        self._compacting[name] = last
        if feed is not None:
            feed.compacted(CompactionState(last))
            self.settle(feed)
        return last

    async def end_compaction(self, name: str) -> None:
        """The compaction has ended: apply what the log lacks now. Raises as asking the broker."""
        try:
            await self._compaction(name)
        finally:
            self._compacting.pop(name, None)

    async def _was_read(self, feed: Feed) -> None:
        """The log was read. If it is being compacted, that may have come first, and have purged deletions."""
        if feed.name in self._compacting:
            await self._compaction(feed.name)

    async def _compaction(self, name: str) -> CompactionState:
        """How the log of a topic is compacted, which its feed learns, too."""
        broker = self._topics.broker
        if not isinstance(broker, CompactingBroker):
            return CompactionState()
        state = await self._topics.work(broker.compaction, name)
        if (feed := self.feeds.get(name)) is not None:
            self._take()
            feed.compacted(state._replace(cleaned=max(state.cleaned, self._compacting.get(name, 0))))
            self.settle(feed)
        return state

    # For connections

    def limit(self, connection: StreamConnection) -> LimitExceeded | None:
        """Why the newest stream of a connection is refused by a limit of its principal, if it is."""
        quota, others = connection.quota, -1
        if quota.usage.limits.streams:
            others += sum(one.server.open_streams for one in self.connections if one.quota.usage is quota.usage)
        return quota.check("streams", others) or quota.waits()

    def client_named(self, connection: StreamConnection) -> None:
        """End an older connection of the same name once a client has sent its name."""
        older = self._names.named(connection.server, connection.permissions.principal)
        for other in [one for one in self.connections if one.server is older]:
            other.settle()

    def gone(self, connection: StreamConnection) -> None:
        self.connections.pop(connection, None)
        self._names.closed(connection.server, connection.permissions.principal)

    def peers(self, topic: str) -> list[str]:
        """The clients that stream a topic."""
        feed = self.feeds.get(topic)
        return [] if feed is None else sorted({one.peer for one in self._streams[feed].values()})

    def forget(self, topic: str) -> None:
        """Close the feed of a topic that was deleted."""
        if (feed := self.feeds.get(topic)) is not None:
            self._check_feed(feed)

    def find(self, connection: StreamConnection, stream: int, name: str) -> None:
        """Look up a topic in the background and report it to a connection."""
        task = self._loop.create_task(self._find(connection, stream, name))
        self._finding[task] = None
        task.add_done_callback(self._finding.pop)

    def cursor_opened(self, feed: Feed, cursor: str, connection: StreamConnection) -> None:
        """Record that a stream reads from a feed."""
        self._streams[feed][cursor] = connection
        feed.idle_since = None

    def cursor_closed(self, feed: Feed, cursor: Cursor) -> None:
        """Close the cursor of a stream that has ended."""
        cursor.close()
        feed.forget_cursor(cursor.name)
        owners = self._streams.get(feed, {})
        owners.pop(cursor.name, None)
        if not owners:
            feed.idle_since = self.now()

    def settle(self, feed: Feed) -> None:
        """Execute the effects of a feed's manager; free memory if the budget is exceeded, and pass turns on."""
        if self.budget.due:
            self._free_memory()
        if self.budget.backfill_memory.give_turns():
            self._execute_all()
        self._execute(feed)

    def _free_memory(self) -> None:
        self.budget.recover()
        self._execute_all()

    def _execute_all(self) -> None:
        for feed in self.feeds.values():
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

    def _take(self) -> None:
        for feed in [*self.feeds.values()]:
            came = feed.take()
            if came or feed.problem is not None:
                for connection in dict.fromkeys(self._streams[feed].values()):
                    connection.advanced(feed)
            if came:
                self.settle(feed)

    async def _find(self, connection: StreamConnection, stream: int, name: str) -> None:
        try:
            feed = await self._feed(name)
            facts = await self._topic_info(feed.followed, name)
        except Error as error:
            connection.topic_refused(stream, error)
            return
        except Exception as error:
            connection.topic_refused(stream, Error(f"unexpected: {error!r}"))
            raise
        if self.feeds.get(name) is not feed:
            connection.topic_refused(
                stream, ServiceUnavailable(f"the feed of topic {name!r} was just closed: try again")
            )
            return
        feed.idle_since = self.now() if feed.idle_since is not None else None
        feed.manager.trim(facts.trimmed_seqno + 1)
        feed.take()
        has_memory = self.budget.account.bytes <= self.budget.budget
        connection.topic_found(stream, replace(facts, high_seqno=feed.manager.high, has_memory=has_memory))
        self.settle(feed)

    async def _feed(self, name: str) -> Feed:
        """The feed of a topic, which is registered if needed. Raises the error that prevents streaming it."""
        async with self._opening.setdefault(name, asyncio.Lock()):
            if (feed := self.feeds.get(name)) is None:
                feed = Feed(name, await self._followed_topic(name), self._waker.wake, self.now())
                feed.begin(await self._topics.exclusively([name], feed.attach), self.budget)
                self._streams[feed] = {}
                self.feeds[name] = feed
                feed.take()
        if feed.problem is not None:
            raise feed.problem
        return feed

    async def _followed_topic(self, name: str) -> FollowedTopic:
        topic = self._topics.get(name)
        if topic is None or (topic.followed is None and topic.problem is None):
            self._topics.check(name)
            if name not in await self._topics.work(self._topics.broker.topics):
                raise await self._missing(name)
            await self._topics.register(name)
            topic = self._topics.get(name)
        if topic is None or topic.followed is None:
            problem = None if topic is None else topic.problem
            raise problem or RegistrationFailed(f"topic {name!r} could not be registered for streaming: try again")
        return topic.followed

    async def _missing(self, name: str) -> Error:
        broker = self._topics.broker
        count = await self._topics.work(lambda: broker.partitions(name)) if isinstance(broker, PartitionedBroker) else 0
        if count:
            first = partition_name(name, 0)
            return NotSupported(
                f"topic {name!r} is partitioned: stream one partition, such as {first!r}, "
                "or all of them with `stream_partitions`"
            )
        return TopicNotFound(f"there is no topic {name!r} to stream")

    async def _topic_info(self, followed: FollowedTopic, name: str) -> TopicInfo:
        broker = self._topics.broker
        if not self._cluster:
            self._cluster = await self._topics.work(broker.incarnation, self._topics.shard.topic(DECISIONS))
        ledgers = await self._topics.work(broker.ledgers, name)
        trimmed = followed.numbered.oldest(ledgers[0].ledger) - 1
        purge = followed.numbered.last_in((await self._compaction(name)).purged)
        high = followed.numbered.next_seqno - 1
        return TopicInfo(self._cluster, followed.writer.incarnation, followed.failover, high, purge, trimmed)

    def _check_feed(self, feed: Feed) -> None:
        """Close the feed of a topic that has stopped, or that nobody has streamed for a while."""
        topic = self._topics.get(feed.name)
        stopped = topic is None or topic.followed is not feed.followed
        if stopped:
            gone = topic is None or isinstance(topic.problem, TopicNotFound)
            reason = EndReason.DELETED if gone else EndReason.STATE_CHANGED
            for connection in dict.fromkeys(self._streams[feed].values()):
                connection.server.end_topic(feed.name, reason)
                connection.settle()
        unused = feed.idle_since is not None and self.now() - feed.idle_since > LINGER
        if stopped or (unused and not feed.followed.cursors):
            del self.feeds[feed.name], self._streams[feed]
            self._opening.pop(feed.name, None)
            feed.close()
