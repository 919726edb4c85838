"""The topics of the service: append queues, writers and buffers; creation, opening and registration.

Everything that waits for the disk runs in one worker thread; appends to the topic are held meanwhile, so that its log
does not change. Snapshots and registrations write to the snapshot topic one at a time; the queries of a cluster by
which a registration begins run in a pool of their own.

The mode of the service decides what feeds the buffers, and what a missing topic means.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.environment import current
from broker_io.errors import DiskFailed, Error, InvalidTopicName, TopicNotFound
from broker_io.port import MAX_PROPERTIES, Broker, BulkBroker, Reader, Writer, check_topic_name
from broker_io.position import Position, Positions
from broker_io.waits import Wait
from snapshots.errors import OwnershipLost, stopped_by
from snapshots.format import INTERNAL_PREFIX, is_internal
from snapshots.shards import Shard, shard_of
from txnbuffer.buffer.state import Effect
from txnbuffer.errors import ForeignTopic, TopicNotCreated, UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.connection import CELL_BYTES, MIB
from txnbuffer.service.log_readers import LogReader

FLIGHT_BYTES = 8 * 1024 * 1024
"""Approximate maximum size of one append."""


class AppendPart(Protocol):
    """Messages to append, and the callbacks for the result; `size` is their approximate size in bytes.

    `reserved`: not a record; it may use the space that a nearly full disk keeps free.
    """

    batch: Batch
    size: int
    reserved: bool

    def acknowledged(self) -> None: ...

    def failed(self, error: Error) -> None: ...


class AppendInFlight(NamedTuple):
    """One append in flight: its parts, and all their messages in one batch."""

    parts: Sequence[AppendPart]
    batch: Batch
    reserved: bool = False


class ServiceTopic:
    """One topic: its append queue, its appends in flight, and its buffer (`followed`, None without transactions).

    `held`: appends are suspended. `problem`: the error that stopped the topic; `write_problem`: the error that blocks
    its writer for now. `waits_for_space`: appends that a nearly full disk rejects (`refused`) are retried in order
    instead of failing. `low`: the disk rejects records, so reserved messages are appended in batches of their own.
    `reader`: reads the topic if others write to it too. `deferred`: its appends wait until the answers of a turn were
    sent.
    """

    deferred = False

    def __init__(self, name: str, *, waits_for_space: bool = False) -> None:
        self.name = name
        self.waits_for_space = waits_for_space
        self.refused: list[AppendPart] = []
        self.low = False
        self.wait: Wait | None = None
        """The wait for disk space, while appends are refused."""
        self.writer: Writer | None = None
        self.followed: FollowedTopic | None = None
        self.held = True
        self.lock = asyncio.Lock()
        self.problem: Error | None = None
        self.write_problem: Error | None = None
        self.reader: LogReader | None = None
        self.waiting: deque[AppendPart] = deque()
        self.flights: deque[AppendInFlight] = deque()
        self.checks: dict[int, None] = {}
        """Transactions to count once the buffer has applied all that they sent."""
        self.awaiting_markers: set[TxnId] = set()
        """Transactions to query once the buffer has applied the log up to its current end."""
        self.asked_up_to: Position | None = None
        """Transactions that began after this position are not queried until the next tick."""

    @property
    def missing(self) -> bool:
        """Whether a temporary problem stopped it; then it is registered again."""
        return self.is_temporary(self.problem)

    @property
    def stopped(self) -> bool:
        """Whether it needs an operator; requests that the cluster did not answer are retried."""
        return self.problem is not None and not (self.missing and self.problem.retryable)

    @property
    def obstacle(self) -> Error | None:
        """The error that stops or delays this topic."""
        return self.problem or self.write_problem or (None if self.reader is None else self.reader.problem)

    @property
    def exists(self) -> bool:
        """Whether its log is known to exist."""
        return self.writer is not None

    @staticmethod
    def is_temporary(problem: Error | None) -> bool:
        """Whether a problem may go away: the topic was deleted."""
        return isinstance(problem, TopicNotFound)

    def open_writer(self) -> None:
        """Open the writer for what was queued, if it is not always open."""

    def writer_failed(self, error: Error) -> bool:
        """Handle a failed append; return whether all other appends have failed with it."""
        return isinstance(error, DiskFailed)

    def durable(self, flight: AppendInFlight, positions: Positions) -> None:
        """Handle an acknowledged append."""

    def refusal(self) -> Error:
        """The error for a transaction that writes to this topic."""
        return self.problem or UnregisteredTopic(
            f"topic {self.name!r} is not registered: register it before the first record of a transaction"
        )

    def take(self) -> AppendInFlight:
        """Take what can be appended now in one batch; the queue must not be empty."""
        parts: list[AppendPart] = []
        size, rows, names = 0, 0, set[str]()
        while self.waiting:
            part = self.waiting[0]
            size, rows = size + part.size, rows + len(part.batch)
            names.update(part.batch.properties)
            if parts and (size + CELL_BYTES * len(names) * rows > FLIGHT_BYTES or len(names) > MAX_PROPERTIES):
                break
            if parts and self.low and part.reserved != parts[0].reserved:
                break
            parts.append(self.waiting.popleft())
        return AppendInFlight(parts, Batch.concat([part.batch for part in parts]), self.low and parts[0].reserved)


def split_by_ledger(positions: Positions, batch: Batch) -> list[PlacedBatch]:
    """Return an append as placed batches, one for each ledger; all messages have the same publish time."""
    ledgers = positions.ledgers
    times = np.full(len(positions), positions.published, np.int64)
    if ledgers[0] == ledgers[-1]:
        return [PlacedBatch(positions, times, batch)]
    whole = PlacedBatch(positions, times, batch)
    cuts = [0, *(np.flatnonzero(np.diff(ledgers)) + 1).tolist(), len(ledgers)]
    return [whole.take(slice(start, stop)) for start, stop in itertools.pairwise(cuts)]


T = TypeVar("T")

HELD_BYTES = 64 * MIB
"""Undecided messages of all topics that wait in memory for their seqnos."""
LEAST_HELD = 64 * 1024
GROWTH = 1.1
"""Divide that memory again when the number of topics has grown by this factor: it costs a step per topic."""
AT_ONCE = 8
"""Registrations that query a cluster at the same time."""


class TopicEvents(Protocol):
    """What an engine does about its topics."""

    def applied(self, topic: ServiceTopic, effects: list[Effect]) -> None:
        """Handle the effects of a batch that a buffer applied."""

    def stopped(self, topic: ServiceTopic) -> None:
        """Handle a topic that has stopped."""


class TopicMode(Protocol):
    """What `Topics` asks the mode; `service.mode` documents it."""

    def make_topic(self, name: str, topics: Topics) -> ServiceTopic: ...
    def load(self, topic: ServiceTopic) -> None: ...
    def expected(self, registered: Iterable[str]) -> Iterable[str]: ...
    def is_temporary(self, problem: Error | None) -> bool: ...
    async def prepare(self, topic: ServiceTopic, topics: Topics, *, create: bool) -> FollowedTopic | None: ...
    def follow(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader, topics: Topics) -> None: ...
    async def exclusively(self, topics: Topics, names: Iterable[str], function: Callable[[], T]) -> T: ...
    def sequence(self, followed: FollowedTopic) -> None: ...
    def check_new(self, name: str, *, create: bool) -> None: ...


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


class Topics:
    """All topics by name. Without `create` missing topics are never created."""

    def __init__(
        self,
        broker: Broker,
        manager: SnapshotManager,
        mode: TopicMode,
        events: TopicEvents,
        executor: Executor,
        shard: Shard,
        *,
        create: bool,
    ) -> None:
        self.broker = broker
        self.manager = manager
        self.mode = mode
        self.shard = shard
        self.by_name: dict[str, ServiceTopic] = {}
        self.snapshot_lock = asyncio.Lock()
        self._held_limit = HELD_BYTES
        self._followed_count = self._divided_by = 0
        self._to_open: list[str] = []
        self._events = events
        self._create = create
        self._executor = executor
        self.registration_pool = current().threads.executor(AT_ONCE, "txnbuffer-registering")

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def exclusively(self, names: Iterable[str], function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that works on followed topics and may block; nothing is applied to them meanwhile."""
        return await self.mode.exclusively(self, names, partial(function, *arguments))

    def load(self, registered: Iterable[str]) -> None:
        """Open the recovered topics. A registered topic that was not recovered was deleted, or created again."""
        for name in self.manager.topics:
            topic = self._add(name)
            self.mode.load(topic)
            self._follow(topic)
        for name in {*self.mode.expected(registered)} - {*self.by_name, *self.manager.problems}:
            self.manager.stop(name, topic_deleted(name))
        for name, problem in self.manager.problems.items():
            topic = self._add(name)
            topic.problem = problem
            self._events.stopped(topic)

    def get(self, name: str) -> ServiceTopic | None:
        return self.by_name.get(name)

    def check(self, name: str) -> None:
        """Raises InvalidTopicName for a name that a data topic can't have, ForeignTopic for another shard's topic."""
        check_name(name)
        check_owned(self.shard, "topic", name)

    def make(self, name: str) -> ServiceTopic:
        """Add a topic, for which `open` is to be called. Raises as `check`."""
        self.check(name)
        return self._add(name)

    async def open(self, topic: ServiceTopic) -> None:
        """Open a topic for writing; create it if missing. Raises TopicNotFound if topics must not be created."""
        self._to_open.append(topic.name)
        topic.writer = await self.work(self._open, topic.name)

    async def register(self, topic: ServiceTopic, *, create: bool = True) -> bool:
        """Write a topic's first snapshot and follow it; the topic must be held and have no append in flight.

        Return False if it was followed already. Without `create` it must exist. Raises TopicNotFound, and the error
        that prevents following it.
        """
        if topic.followed is not None:
            return False
        prepared = await self.mode.prepare(topic, self, create=create)
        async with self.snapshot_lock:
            await self.work(self._register, topic.name, prepared)
        self._follow(topic)
        return True

    async def query(self, name: str, *, create: bool) -> FollowedTopic | None:
        """Query a cluster for what registration needs to know about a topic."""
        return await asyncio.get_running_loop().run_in_executor(self.registration_pool, self._prepare, name, create)

    def forget(self, topic: ServiceTopic) -> None:
        """Remove a topic that could not be opened, so that the next request tries again."""
        never_was = topic.writer is None and topic.followed is None and topic.problem is None
        if never_was and self.by_name.get(topic.name) is topic:
            del self.by_name[topic.name]

    def drop(self, name: str) -> Writer | None:
        """Remove a topic without notifying anyone; return its writer, which the caller closes."""
        topic = self.by_name.pop(name, None)
        if topic is None:
            return None
        writer, topic.writer = topic.writer, None
        return writer

    def recreation_failed(self, topic: ServiceTopic, error: Error) -> None:
        """Record that a missing topic could not be registered again; a temporary error is retried."""
        if isinstance(topic.problem, TopicNotFound):
            error = TopicNotFound(f"topic {topic.name!r} was deleted, and registering it again failed: {error}")
        topic.problem = stopped_by(topic.name, error)
        self.by_name[topic.name] = topic
        self._events.stopped(topic)

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
            self.mode.sequence(followed)
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

    def _stopped(self, topic: ServiceTopic) -> None:
        topic.followed = None
        topic.problem = self.manager.problems[topic.name]
        self._events.stopped(topic)

    def reading_failed(self, topic: ServiceTopic, error: BaseException) -> None:
        """Stop a topic that can't be read any further; all others continue."""
        if not isinstance(error, Error):
            raise error
        self.manager.stop(topic.name, error)
        self._stopped(topic)

    def mark_damaged(self, name: str, error: Error) -> None:
        """Stop a data topic whose log is damaged; all others continue."""
        topic = self.by_name.get(name) or self._add(name)
        self.manager.stop(name, error)
        self._stopped(topic)

    def check_new(self, name: str) -> None:
        """Raises InvalidTopicName, or TopicNotCreated, for a topic that can't be opened."""
        check_name(name)
        self.mode.check_new(name, create=self._create)

    def _add(self, name: str) -> ServiceTopic:
        topic = self.by_name[name] = self.mode.make_topic(name, self)
        return topic

    def _create_topic(self, name: str, create: bool = True) -> None:
        self._check_exists(name, create)
        self.broker.create_topic(name)

    def _check_exists(self, name: str, create: bool) -> None:
        if not (create and self._create) and name not in self.broker.topics():
            raise TopicNotFound(f"there is no topic {name!r}") if self._create else TopicNotCreated(name)

    def _prepare(self, name: str, create: bool) -> FollowedTopic | None:
        """Query what registration needs to know about a topic: some twenty requests to a cluster."""
        if self._was_missing(name):
            self._create_topic(name, create)
            return None
        self._check_exists(name, create)
        return self.manager.prepare(name)

    def _register(self, name: str, prepared: FollowedTopic | None) -> None:
        if self._was_missing(name):
            self.manager.recreate(name)
        else:
            self.manager.register(name, prepared)

    def _was_missing(self, name: str) -> bool:
        return self.mode.is_temporary(self.manager.problems.get(name))

    def _open(self, name: str) -> Any:
        waiting, self._to_open = self._to_open, []
        if self._create and waiting and isinstance(self.broker, BulkBroker):
            self.broker.create_topics(waiting)  # the next calls find their topics created
        self._create_topic(name)
        return self.broker.writer(name, exclusive=True)

    def _follow(self, topic: ServiceTopic) -> None:
        followed = topic.followed = self.manager.followed(topic.name)
        self.mode.follow(topic, followed, followed.take_reader(), self)
        self._followed_count += 1
        if self._followed_count > GROWTH * self._divided_by:
            self._divide_memory()
        followed.limit_held(self._held_limit)

    def _divide_memory(self) -> None:
        followed_topics = [topic.followed for topic in self.by_name.values() if topic.followed is not None]
        self._followed_count = self._divided_by = len(followed_topics)
        self._held_limit = max(HELD_BYTES // max(len(followed_topics), 1), LEAST_HELD)
        for followed in followed_topics:
            followed.limit_held(self._held_limit)
