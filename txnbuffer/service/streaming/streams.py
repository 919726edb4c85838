"""All change streams of a service: feeds of topics, connections of clients, and the memory that they share.

A topic that nobody streams costs nothing. Streams hold no data back, durable cursors do: what retention drops, a slow
stream without one has lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from broker_io.errors import Error, NotOffered, TopicNotFound
from broker_io.partitions import partition_name
from broker_io.port import PartitionedBroker
from txnbuffer.config import StreamsConfig
from txnbuffer.coordinator.entries import TOPIC as DECISIONS
from txnbuffer.errors import CoordinatorStopped, RegistrationFailed, ServiceUnavailable
from txnbuffer.mutations import Cursor, MemoryBudget, ReadLog, StopReading, Wake
from txnbuffer.recovery.tailing import Tail
from txnbuffer.service.keeping import Keeping
from txnbuffer.service.streaming.backfills import Backfills
from txnbuffer.service.streaming.connection import StreamConnection
from txnbuffer.service.streaming.cursors import Cursors
from txnbuffer.service.streaming.feed import Feed, oldest_seqno
from txnbuffer.service.topics import Topics
from txnbuffer.streams.messages import EndReason
from txnbuffer.streams.registry import Connections
from txnbuffer.streams.requests import TopicFacts
from txnbuffer.streams.server import ServerConfig

TICK = 0.25
"""Seconds between two looks at the time."""
LINGER = 30.0
"""Seconds that a topic is fed on after its last stream, for a reader that comes back."""
LEAST_NOOP = 1.0

Register = Callable[[str], Awaitable[None]]


class Streams:
    """`register` makes a topic one that has seqnos. All of it belongs to the engine's loop."""

    def __init__(
        self, topics: Topics, keeping: Keeping, register: Register, config: StreamsConfig, now: Callable[[], float]
    ) -> None:
        self.now = now
        self.feeds: dict[str, Feed] = {}
        self.budget = MemoryBudget(config.memory_bytes)
        self.connections: set[StreamConnection] = set()
        keeping.capturing = self.persist
        self.cursors = Cursors(topics, keeping, self._known, limit=config.max_cursors, max_bytes=config.cursor_bytes)
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
            feed.tail.numbering.told = None

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
                self._carry_out(other)
        self._carry_out(feed)

    def _carry_out(self, feed: Feed) -> None:
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
        feed = Feed(name, await self._tail(name), self._news, self.now())
        feed.begin(await self._topics.apart([name], feed.attach), self.budget)
        return feed

    async def _tail(self, name: str) -> Tail:
        topic = self._topics.get(name)
        if topic is None or (topic.tail is None and topic.problem is None):
            self._topics.check(name)
            if name not in await self._topics.work(self._topics.broker.topics):
                raise await self._missing(name)
            await self._register(name)
            topic = self._topics.get(name)
        if topic is None or topic.tail is None:
            problem = None if topic is None else topic.problem
            raise problem or RegistrationFailed(f"topic {name!r} could not be registered to be streamed: try again")
        return topic.tail

    async def _missing(self, name: str) -> Error:
        broker = self._topics.broker
        count = await self._topics.work(lambda: broker.partitions(name)) if isinstance(broker, PartitionedBroker) else 0
        if count:
            first = partition_name(name, 0)
            return NotOffered(
                f"topic {name!r} is partitioned: a stream is of one partition, such as {first!r}, "
                "or of all by `stream_partitions`"
            )
        return TopicNotFound(f"there is no topic {name!r} to stream")

    async def _facts(self, feed: Feed) -> TopicFacts:
        facts = await self._facts_of(feed.tail, feed.name)
        feed.manager.trim(facts.trimmed_seqno + 1)
        has_memory = self.budget.account.bytes <= self.budget.budget
        return replace(facts, high_seqno=feed.manager.high, has_memory=has_memory)

    async def _known(self, name: str) -> tuple[Tail, TopicFacts]:
        tail = await self._tail(name)
        return tail, await self._facts_of(tail, name)

    async def _facts_of(self, tail: Tail, name: str) -> TopicFacts:
        broker = self._topics.broker
        if not self._cluster:
            self._cluster = await self._topics.work(broker.incarnation, self._topics.shard.topic(DECISIONS))
        ledgers = await self._topics.work(broker.ledgers, name)
        trimmed = oldest_seqno(tail, ledgers[0].ledger) - 1
        high = tail.numbering.sequencer.next_seqno - 1
        return TopicFacts(self._cluster, tail.writer.incarnation, tail.failover, high, trimmed_seqno=trimmed)

    def _look_at(self, feed: Feed) -> None:
        """A topic may have stopped, or nobody may stream it any more."""
        topic = self._topics.get(feed.name)
        stopped = topic is None or topic.tail is not feed.tail
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
