"""The topics of the service: creation, opening, registration and buffers.

Everything that waits for the disk runs in one worker thread; appends to the topic are held meanwhile, so that its log
does not change. Snapshots and registrations write to the snapshot topic one at a time.

The two modes of a service are subclasses of `Topics`. In embedded mode (`EmbeddedTopics`) the service owns the log:
clients write through it, so it knows each message without reading, and feeds the buffers with its own appends. In
cluster mode (`service.cluster`) applications write to the topics of a cluster themselves: the service reads these
topics and writes only markers and its internal topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from math import inf
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import (
    DiskFailed,
    Error,
    InvalidTopicName,
    NotAuthorized,
    NotSupported,
    TopicNotFound,
    UnsafePolicy,
    as_error,
)
from broker_io.partitions import partition_of
from broker_io.port import Broker, BulkBroker, PartitionedBroker, Reader, Writer, check_topic_name
from broker_io.position import Positions
from broker_io.waits import Backoff
from snapshots.errors import OwnershipLost, SnapshotMissing, TopicDamaged, stopped_by
from snapshots.format import INTERNAL_PREFIX, is_internal
from snapshots.shards import Shard, shard_of
from txnbuffer.buffer.state import Effect
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import ForeignTopic, TopicNotCreated
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.door.connection import MIB
from txnbuffer.service.loop import Loop
from txnbuffer.service.standby.takeover import OwnedLog
from txnbuffer.service.topics.appends import AppendInFlight, Appends, ServiceTopic

T = TypeVar("T")

TOPICS_AT_ONCE = 64
"""Topics that one step creates; records of others are not written meanwhile."""
OPENED_AT_ONCE = 16
"""Topics that are opened or registered at once for one session; the topics of other sessions wait for no more of it."""
HELD_BYTES = 64 * MIB
"""Undecided messages of all topics that wait in memory for their seqnos."""
LEAST_HELD = 64 * 1024
GROWTH = 1.1
"""Divide that memory again when the number of topics has grown by this factor: it costs a step per topic."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to open a writer, or to follow a missing topic again."""
FINAL = (InvalidTopicName, NotAuthorized, NotSupported, SnapshotMissing, TopicNotCreated, UnsafePolicy)
"""Errors of a registration that a retry can't fix: an operator has to act first."""


class TopicEvents(Protocol):
    """What the effect executor does about topics."""

    def applied(self, topic: ServiceTopic, effects: list[Effect]) -> None:
        """Handle the effects of a batch that a buffer applied."""

    def stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """Handle a topic that has stopped; the problem may be temporary."""


def check_name(name: str) -> None:
    """Raises InvalidTopicName for a name that a data topic can't have."""
    check_topic_name(name)
    if is_internal(name):
        raise InvalidTopicName(
            f"topic {name!r}: names that begin with {INTERNAL_PREFIX} are reserved for the service: use another"
        )


def check_owned(shard: Shard, kind: str, name: str) -> None:
    """Raises ForeignTopic for a topic, a producer or a group of another shard."""
    if not shard.owns(name):
        owner = shard_of(name, shard.of)
        raise ForeignTopic(
            f"{kind} {name!r} belongs to shard {owner} of {shard.of}, this is shard {shard.number}: ask shard {owner}"
        )


async def close_quietly(writer: Writer) -> None:
    """Close a writer in another thread; the caller does not need its errors."""
    with contextlib.suppress(Error):
        await asyncio.to_thread(writer.close)


class Topics(ABC):
    """All topics by name. Without `create` missing topics are never created.

    Of the mode: `config` is the coordinator's default configuration, `max_shards` the maximum number of shards of a
    log. `takes_records`: whether clients send records to the service. `stop_seconds`: how long a stopping engine waits
    for the acknowledgement of appends in flight.
    """

    config: ClassVar[CoordinatorConfig]
    max_shards: ClassVar[int]
    takes_records: ClassVar[bool]
    stop_seconds: ClassVar[float]

    def __init__(
        self,
        loop: Loop,
        broker: Broker,
        owned: OwnedLog,
        appends: Appends,
        executor: Executor,
        shard: Shard,
        *,
        create: bool,
    ) -> None:
        self.broker = broker
        self.manager = owned.manager
        self.shard = shard
        self.by_name: dict[str, ServiceTopic] = {}
        self.snapshot_lock = asyncio.Lock()
        self._loop = loop
        self._owned = owned
        self._coordinator = owned.coordinator
        self._appends = appends
        self._executor = executor
        self._create = create
        self._events: TopicEvents
        self._held_limit = HELD_BYTES
        self._followed_count = self._divided_by = 0
        self._looked_up: set[str] = set()
        self._unregistered: set[str] = set()
        """Topics that were stopped because of damage, and had no transactions."""
        self._to_open: dict[str, None] = {}
        self._openings: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def start(self, events: TopicEvents, take: Callable[[PlacedBatch], None]) -> None:
        """Follow the recovered topics, reporting to `events`; `take` is called with messages of other shards."""
        self._events = events
        for name in self.manager.topics:
            self._follow(self._add(name))
        for name, problem in self.manager.problems.items():
            topic = self._add(name)
            topic.problem = problem
            self._report_stopped(topic, problem)

    def get(self, name: str) -> ServiceTopic | None:
        return self.by_name.get(name)

    def is_followed(self, name: str) -> bool:
        """Whether a topic has a buffer that has not stopped."""
        topic = self.by_name.get(name)
        return topic is not None and topic.followed is not None

    def ongoing(self) -> dict[TxnId, list[str]]:
        """The transactions of this shard's coordinator that are ongoing in the buffers, each with these topics."""
        found: dict[TxnId, list[str]] = {}
        for topic in self.by_name.values():
            for entry in topic.followed.buffer.ongoing.values() if topic.followed is not None else ():
                if entry.txn.most == self.shard.number:
                    found.setdefault(entry.txn, []).append(topic.name)
        return found

    def check(self, name: str) -> None:
        """Raises InvalidTopicName for a name that a data topic can't have, ForeignTopic for another shard's topic."""
        check_name(name)
        check_owned(self.shard, "topic", name)

    def check_new(self, name: str) -> None:
        """Raises InvalidTopicName for a name that a data topic can't have.

        Raises TopicNotCreated for a missing topic that must not be created, unless finding that out takes time.
        """
        check_name(name)

    def is_missing(self, name: str) -> bool:
        """Whether a topic that is not open here may have to be created. On a cluster finding out would take time."""
        return True

    def drop(self, name: str) -> Writer | None:
        """Remove a topic without notifying anyone; return its writer, which the caller closes."""
        topic = self.by_name.pop(name, None)
        if topic is None:
            return None
        writer, topic.writer = topic.writer, None
        return writer

    async def delete_unopened(self, name: str) -> None:
        """Delete a topic that is not open here. Its sends fail meanwhile, and its registrations wait."""
        topic = self._add(name)
        async with topic.lock:
            try:
                await self.work(self.broker.delete_topic, name)
            finally:
                del self.by_name[name]
                self._appends.fail(topic, topic_deleted(name))

    # Opening and registration

    def make(self, name: str, session: str = "") -> ServiceTopic:
        """Add a topic without transactions and open it in the background; sends to it wait meanwhile.

        Raises InvalidTopicName and ForeignTopic.
        """
        self.check(name)
        topic = self._add(name)
        self._loop.run(self._open(topic, session))
        return topic

    async def register(self, name: str, *, session: str = "", create: bool = True) -> Error | None:
        """Register a topic for transactions and notify the coordinator; return the error if that failed.

        Without `create` it must exist. `session` is the one that asked, if any.
        """
        while True:
            missing = self.get(name)
            try:
                topic = self._registered_entry(name)
            except Error as error:
                return self._registration_failed(name, error)
            async with self._turn(topic, session):
                if self.get(name) is not topic:
                    continue  # another attempt has failed meanwhile
                try:
                    fresh = topic.followed is None and await self._register(topic, create)
                except (DiskFailed, OwnershipLost):
                    raise
                except Exception as unexpected:
                    return self._not_registered(topic, missing, as_error(unexpected))
                if (obstacle := await self._complete_registration(topic, fresh=fresh)) is not None:
                    return self._registration_failed(name, obstacle)
                self._coordinator.topic_snapshotted(name, self._loop.now())
                if topic.writer is not None:
                    self._appends.release(topic)
                self._loop.wake()
                return None

    @contextlib.asynccontextmanager
    async def _turn(self, topic: ServiceTopic, session: str) -> AsyncIterator[None]:
        """Hold the lock of a topic, once fewer than OPENED_AT_ONCE others are opened for the session."""
        if self.takes_records and topic.writer is None:
            self._to_open[topic.name] = None
        try:
            async with self._openings.setdefault(session, asyncio.Semaphore(OPENED_AT_ONCE)), topic.lock:
                yield
        finally:
            self._to_open.pop(topic.name, None)

    async def _open(self, topic: ServiceTopic, session: str) -> None:
        async with self._turn(topic, session):
            try:
                if topic.writer is None:
                    await self._open_writer(topic)
            except Exception as unexpected:  # any error affects this topic only
                self._give_up(topic, as_error(unexpected))
                self._loop.wake()
            else:
                self._appends.release(topic)

    async def _open_writer(self, topic: ServiceTopic, create: bool = True) -> None:
        """Open a topic for writing; `create` it if missing. Raises TopicNotFound if topics must not be created."""
        topic.writer = await self.work(self._create_and_open, topic.name, create)

    def _create_and_open(self, name: str, create: bool) -> Writer:
        if create and self._create and name in self._to_open and isinstance(self.broker, BulkBroker):
            together = [*{name: None, **self._to_open}][:TOPICS_AT_ONCE]
            for one in together:
                self._to_open.pop(one, None)
            self.broker.create_topics(together)  # the next calls find their topics created
        self._create_topic(name, create)
        return self.broker.writer(name, exclusive=True)

    def _create_topic(self, name: str, create: bool = True) -> None:
        self._check_exists(name, create)
        self.broker.create_topic(name)

    def _check_exists(self, name: str, create: bool) -> None:
        if not (create and self._create) and name not in self.broker.topics():
            raise TopicNotFound(f"there is no topic {name!r}") if self._create else TopicNotCreated(name)

    async def _register(self, topic: ServiceTopic, create: bool) -> bool:
        """Write a topic's first snapshot and follow it. Raises the error that prevents it."""
        prepared = await self._prepare(topic, create)
        async with self.snapshot_lock:
            await self.work(self._write_first_snapshot, topic, prepared)
        self._follow(topic)
        return True

    def _write_first_snapshot(self, topic: ServiceTopic, prepared: FollowedTopic | None) -> None:
        if self._was_missing(topic):
            self.manager.recreate(topic.name)
        else:
            self.manager.register(topic.name, prepared)

    def _was_missing(self, topic: ServiceTopic) -> bool:
        """Whether a topic being registered was missing before."""
        problem = self.manager.problems.get(topic.name)
        return problem is not None and topic.is_temporary(problem)

    def _registered_entry(self, name: str) -> ServiceTopic:
        """The entry of a topic, a new one if the topic was missing. Raises InvalidTopicName and ForeignTopic."""
        topic = self.get(name)
        if topic is not None and topic.problem is not None and topic.missing:
            self._appends.fail(topic, topic.problem)
            if topic.writer is not None:
                self._loop.run(close_quietly(topic.writer))
                topic.writer = None
            topic = None
        if topic is None:
            self.check(name)
            topic = self._add(name)
        return topic

    def _not_registered(self, topic: ServiceTopic, missing: ServiceTopic | None, error: Error) -> Error:
        if topic.writer is None:
            self._give_up(topic, error)
        else:
            self._appends.release(topic)
        if missing is not None and missing is not topic:
            self._recreation_failed(missing, error)
        return self._registration_failed(topic.name, error)

    def _registration_failed(self, name: str, error: Error) -> Error:
        self._coordinator.registration_failed(name, str(error), self._loop.now(), final=isinstance(error, FINAL))
        self._loop.wake()
        return error

    def _give_up(self, topic: ServiceTopic, error: Error) -> None:
        """Remove a topic that could not be opened, so that the next request tries again; fail what was queued."""
        never_was = topic.writer is None and topic.followed is None and topic.problem is None
        if never_was and self.get(topic.name) is topic:
            del self.by_name[topic.name]
        self._appends.fail(topic, error)

    def _recreation_failed(self, topic: ServiceTopic, error: Error) -> None:
        """Record that a missing topic could not be registered again; a temporary error is retried."""
        if isinstance(topic.problem, TopicNotFound):
            error = TopicNotFound(f"topic {topic.name!r} was deleted, and registering it again failed: {error}")
        topic.problem = stopped_by(topic.name, error)
        self.by_name[topic.name] = topic
        self._report_stopped(topic, topic.problem)

    # Buffers

    def received(self, topic: ServiceTopic, placed: PlacedBatch) -> None:
        """Apply messages of a topic to its buffer, if it is followed."""
        followed = topic.followed
        if followed is None:
            return
        effects = self.manager.apply(topic.name, placed)
        if effects is None:
            self._stopped(topic)
            return
        failed = None
        try:
            if self.takes_records or not followed.has_backlog:  # reading the backlog from a cluster blocks the loop
                followed.sequence_held()
        except Error as error:
            failed = error
        self._events.applied(topic, effects)
        if failed is not None:
            self.sequencing_failed(topic, followed, failed)

    def sequencing_failed(self, topic: ServiceTopic, followed: FollowedTopic, error: Error) -> None:
        """Stop a topic whose messages can't be numbered; all others continue. A retryable error stops nothing.

        Raises OwnershipLost, after which the service can't continue.
        """
        if isinstance(error, OwnershipLost):
            raise error
        if not error.retryable and topic.followed is followed:
            self.manager.stop(topic.name, error)
            self._stopped(topic)

    def mark_damaged(self, name: str, error: Error) -> None:
        """Stop a data topic whose log is damaged; all others continue."""
        topic = self.by_name.get(name) or self._add(name)
        if topic.followed is None and name not in self.manager.problems:
            self._unregistered.add(name)
        self.manager.stop(name, error)
        self._stopped(topic)

    async def mended(self, name: str) -> None:
        """Follow a topic again whose damaged files were repaired. Raises the error that prevents it."""
        topic = self.by_name.get(name)
        if topic is None or not isinstance(topic.problem, TopicDamaged):
            return
        async with topic.lock, self.snapshot_lock:
            if name in self._unregistered:
                self.manager.problems.pop(name, None)
                self._unregistered.discard(name)
            else:
                await self.work(self.manager.recreate, name)
                self._follow(topic)
            topic.problem = None
        if topic.writer is None:
            del self.by_name[name]  # the next request opens it
        self._coordinator.topic_snapshotted(name, self._loop.now())
        self._loop.wake()

    def _stopped(self, topic: ServiceTopic) -> None:
        topic.followed = None
        topic.problem = self.manager.problems[topic.name]
        self._report_stopped(topic, topic.problem)

    def _report_stopped(self, topic: ServiceTopic, problem: Error) -> None:
        self._events.stopped(topic, problem)

    def _add(self, name: str) -> ServiceTopic:
        topic = self.by_name[name] = self._make_topic(name)
        return topic

    def _follow(self, topic: ServiceTopic) -> None:
        followed = topic.followed = self.manager.followed(topic.name)
        self._feed(topic, followed, followed.take_reader())
        self._followed_count += 1
        if self._followed_count > GROWTH * self._divided_by:
            self._divide_memory()
        followed.held_limit = self._held_limit

    def _divide_memory(self) -> None:
        followed_topics = [topic.followed for topic in self.by_name.values() if topic.followed is not None]
        self._followed_count = self._divided_by = len(followed_topics)
        self._held_limit = max(HELD_BYTES // max(len(followed_topics), 1), LEAST_HELD)
        for followed in followed_topics:
            followed.held_limit = self._held_limit

    # Missing topics

    def look_up(self, name: str) -> None:
        """Find out in the background whether a missing topic was deleted, and follow it again if it exists."""
        if name not in self._looked_up:
            self._looked_up.add(name)
            self._loop.run(self._resolve_until_done(name))

    @contextlib.contextmanager
    def deleting(self, name: str) -> Iterator[None]:
        """The readers end before the topic is deleted; it would be registered again, and so created again."""
        looked_up = name in self._looked_up
        self._looked_up.add(name)
        try:
            yield
        finally:
            if not looked_up:
                self._looked_up.discard(name)

    async def _resolve_until_done(self, name: str) -> None:
        pauses, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while self._unsettled(name):
                if self._is_missing(name) and await self._resolve(name):
                    return
                pauses += 1
                await asyncio.sleep(backoff.after(pauses))
        finally:
            self._looked_up.discard(name)

    async def _resolve(self, name: str) -> bool:
        """Try to resolve a missing topic; return whether it is done."""
        try:
            there, taken = await asyncio.to_thread(_is_there, self.broker, name)
        except Error:
            return False
        if not self._is_missing(name):  # another task has just registered it
            return False
        if not there:
            self._coordinator.topic_deleted(name, self._loop.now())
            writer = self.drop(name) if taken else None
            self._loop.wake()
            if writer is not None:  # its client library would create the topic again, next to the partitions
                await close_quietly(writer)
            return True
        error = await self.register(name, create=False)
        if error is not None and not error.retryable and not isinstance(error, TopicNotFound):
            self._coordinator.topic_stopped(name, error, self._loop.now())
            self._loop.wake()
        return error is None

    def _is_missing(self, name: str) -> bool:
        topic = self.get(name)
        return topic is None or topic.missing

    def _unsettled(self, name: str) -> bool:
        topic = self.get(name)
        return topic is None or (topic.followed is None and (topic.problem is None or topic.missing))

    # What differs between the modes

    @abstractmethod
    def _make_topic(self, name: str) -> ServiceTopic:
        """Return a new entry of a data topic."""

    @abstractmethod
    def _feed(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader | None) -> None:
        """Feed the messages of a topic to its buffer from now on; `reader` continues where recovery ended, if open."""

    @abstractmethod
    async def _prepare(self, topic: ServiceTopic, create: bool) -> FollowedTopic | None:
        """Prepare the registration of a topic, so that its log does not change; `create` it if missing."""

    @abstractmethod
    async def exclusively(self, names: Iterable[str], function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that works on followed topics and may block; nothing is applied to them meanwhile."""

    @abstractmethod
    def when_read(self, topic: ServiceTopic, report: Callable[[], None]) -> None:
        """Call `report` once the buffer has applied the topic's log up to its present end."""

    @abstractmethod
    def turn(self) -> None:
        """At the begin of each turn of a service that takes no records: deliver what was read."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop reading."""

    async def _complete_registration(self, topic: ServiceTopic, *, fresh: bool) -> Error | None:
        """Complete a registration, a `fresh` one or a repeated one; return the error if that failed."""
        return None


def _is_there(broker: Broker, name: str) -> tuple[bool, bool]:
    """Whether a topic exists; and if not, whether a partitioned topic has its name or was deleted with it."""
    there = name in broker.topics()
    if not isinstance(broker, PartitionedBroker):
        return there, False
    partition = partition_of(name)
    if partition is None:
        return there, not there and broker.partitions(name) > 0
    # An application that had the partition open may have created it again.
    gone = partition.number >= broker.partitions(partition.topic)
    return there and not gone, gone


FLIGHT_POLL = 0.001
"""Seconds between two checks for appends in flight."""


class OwnedTopic(ServiceTopic):
    """A topic to which only this engine writes: its buffer applies each append when that is durable."""

    def __init__(self, name: str, received: Callable[[ServiceTopic, PlacedBatch], None]) -> None:
        super().__init__(name)
        self._received = received

    def durable(self, flight: AppendInFlight, positions: Positions) -> None:
        """Apply an acknowledged append to the buffer."""
        if self.followed is not None:
            for placed in split_by_ledger(positions, flight.batch):
                self._received(self, placed)


def split_by_ledger(positions: Positions, batch: Batch) -> list[PlacedBatch]:
    """Return an append as placed batches, one for each ledger; all messages have the same publish time."""
    ledgers = positions.ledgers
    times = np.empty(len(ledgers), np.int64)
    times.fill(positions.published)
    if ledgers[0] == ledgers[-1]:
        return [PlacedBatch(positions, times, batch)]
    whole = PlacedBatch(positions, times, batch)
    cuts = [0, *(np.flatnonzero(np.diff(ledgers)) + 1).tolist(), len(ledgers)]
    return [whole.take(slice(start, stop)) for start, stop in itertools.pairwise(cuts)]


class EmbeddedTopics(Topics):
    """The service owns the log: one shard, no other writers, and reads of the log are cheap."""

    config = CoordinatorConfig()
    max_shards = 1
    takes_records = True
    stop_seconds = inf

    def check_new(self, name: str) -> None:
        """Raises InvalidTopicName, and TopicNotCreated for a missing topic that must not be created."""
        super().check_new(name)
        if not self._create and name not in self.broker.topics():
            raise TopicNotCreated(name)

    def is_missing(self, name: str) -> bool:
        return name not in self.broker.topics()

    async def exclusively(self, names: Iterable[str], function: Callable[..., T], *arguments: Any) -> T:
        """Call the function on the loop."""
        return function(*arguments)

    def when_read(self, topic: ServiceTopic, report: Callable[[], None]) -> None:
        """Call `report` at once: the buffer has applied every durable message."""
        report()

    def look_up(self, name: str) -> None:
        """A topic that is not there was deleted, since nobody else creates topics: decisions about it are complete."""
        topic = self.get(name)
        if topic is None or isinstance(topic.problem, TopicNotFound):
            self._coordinator.topic_deleted(name, self._loop.now())
        else:
            super().look_up(name)

    def turn(self) -> None:
        """Nothing is read: acknowledged appends were applied already."""

    async def stop(self) -> None:
        """Nothing is read."""

    def _make_topic(self, name: str) -> ServiceTopic:
        return OwnedTopic(name, self.received)

    def _feed(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader | None) -> None:
        """The topic feeds its own appends: no reader is needed. Open a recovered topic for writing."""
        if reader is not None:
            reader.close()
        if topic.writer is None:
            topic.writer = self.broker.writer(topic.name, exclusive=True)
            topic.held = False

    async def _prepare(self, topic: ServiceTopic, create: bool) -> FollowedTopic | None:
        """Suspend the appends and wait for those in flight; then open the topic for writing."""
        topic.held = True
        while topic.under_way:
            await asyncio.sleep(FLIGHT_POLL)
        if topic.writer is None:
            await self._open_writer(topic, create)
        return None
