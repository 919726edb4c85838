"""The topics of the service: append queues, writers and buffers; creation, opening and registration.

Everything that waits for the disk runs in one worker thread; appends to the topic are held meanwhile, so that its log
does not change. Snapshots and registrations write to the snapshot topic one at a time; the queries of a cluster by
which a registration begins run in a pool of their own.

In cluster mode applications write to the topics too: buffers are then fed with what followers read, never with what
was appended here, and a topic's writer appends markers only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from broker_io.batch import Batch, PlacedBatch
from broker_io.errors import Error, InvalidTopicName, TopicNotFound
from broker_io.port import MAX_PROPERTIES, Broker, BulkBroker, Writer, check_topic_name
from broker_io.position import Position, Positions
from broker_io.waits import Wait
from snapshots.errors import stopped_by
from snapshots.format import INTERNAL_PREFIX, is_internal
from snapshots.shards import ONLY, Shard, shard_of
from txnbuffer.buffer.state import Effect
from txnbuffer.errors import ForeignTopic, TopicNotCreated, UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.manager import SnapshotManager
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.connection import CELL_BYTES, MIB
from txnbuffer.service.log_readers import LogReader, LogReaders

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
    `cluster_mode`: applications write to the topic themselves; then `follower` reads it, and `writer` appends markers
    only.
    """

    def __init__(self, name: str, *, waits_for_space: bool = False, cluster_mode: bool = False) -> None:
        self.name = name
        self.waits_for_space = waits_for_space
        self.cluster_mode = cluster_mode
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
        self.follower: LogReader | None = None
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
        return is_temporary(self.problem, cluster_mode=self.cluster_mode)

    @property
    def stopped(self) -> bool:
        """Whether it needs an operator; requests that the cluster did not answer are retried."""
        return self.problem is not None and not (self.missing and self.problem.retryable)

    @property
    def obstacle(self) -> Error | None:
        """The error that stops or delays this topic."""
        return self.problem or self.write_problem or (None if self.follower is None else self.follower.problem)

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


def is_temporary(problem: Error | None, *, cluster_mode: bool) -> bool:
    """Whether a problem may go away: the topic was deleted or, in cluster mode, the cluster did not answer."""
    return isinstance(problem, TopicNotFound) or (cluster_mode and problem is not None and problem.retryable)


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

Applied = Callable[[ServiceTopic, list[Effect]], None]


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
    """All topics by name.

    `applied` is called with the effects of each batch that a buffer applied. `followers` is set in cluster mode.
    """

    def __init__(
        self,
        broker: Broker,
        manager: SnapshotManager,
        applied: Applied,
        *,
        create: bool,
        executor: ThreadPoolExecutor,
        followers: LogReaders | None = None,
        shard: Shard = ONLY,
    ) -> None:
        self.broker = broker
        self.manager = manager
        self.followers = followers
        self.shard = shard
        self.by_name: dict[str, ServiceTopic] = {}
        self.snapshot_lock = asyncio.Lock()
        self._held_limit = HELD_BYTES
        self._followed_count = self._divided_by = 0
        self._to_open: list[str] = []
        self.stopped: Callable[[ServiceTopic], None] | None = None
        """Called with each topic that stops."""
        self._applied = applied
        self._create = create
        self._executor = executor
        self.registration_pool = ThreadPoolExecutor(AT_ONCE, "txnbuffer-registering")

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def exclusively(self, names: Iterable[str], function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that works on followed topics and may block; nothing is applied to them meanwhile."""
        if self.followers is None:
            return function(*arguments)
        topics = [self.by_name[name] for name in names if name in self.by_name]
        followers = [topic.follower for topic in topics if topic.follower is not None]
        for follower in followers:
            follower.paused += 1
        try:
            return await self.work(function, *arguments)
        finally:
            for follower in followers:
                follower.paused -= 1
            self.followers.wake()

    def load(self, registered: Iterable[str]) -> None:
        """Open the recovered topics. A registered topic that was not recovered was deleted, or created again."""
        for name in self.manager.topics:
            topic = self.by_name[name] = ServiceTopic(name, cluster_mode=self.followers is not None)
            if self.followers is None:
                topic.writer = self.broker.writer(name, exclusive=True)
                topic.held = False
            self._follow(topic)
        if self.followers is not None:
            for name in {*filter(self.shard.owns, registered)} - {*self.by_name, *self.manager.problems}:
                self.manager.stop(name, topic_deleted(name))
        for name, problem in self.manager.problems.items():
            topic = self.by_name[name] = ServiceTopic(name, cluster_mode=self.followers is not None)
            topic.problem = problem
            if self.stopped is not None:
                self.stopped(topic)

    def get(self, name: str) -> ServiceTopic | None:
        return self.by_name.get(name)

    def check(self, name: str) -> None:
        """Raises InvalidTopicName for a name that a data topic can't have, ForeignTopic for another shard's topic."""
        check_name(name)
        check_owned(self.shard, "topic", name)

    def make(self, name: str) -> ServiceTopic:
        """Add a topic, for which `open` is to be called. Raises as `check`."""
        self.check(name)
        topic = self.by_name[name] = ServiceTopic(name, cluster_mode=self.followers is not None)
        return topic

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
        prepared = None
        if self.followers is not None:
            prepared = await asyncio.get_running_loop().run_in_executor(
                self.registration_pool, self._prepare, topic.name, create
            )
        elif topic.writer is None:
            await self.open(topic)
        async with self.snapshot_lock:
            await self.work(self._register, topic.name, prepared)
        self._follow(topic)
        return True

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
        if self.stopped is not None:
            self.stopped(topic)

    def acknowledged(self, topic: ServiceTopic, flight: AppendInFlight, positions: Positions) -> None:
        """Apply an acknowledged append to the buffer; in cluster mode the follower delivers it instead."""
        if topic.followed is None or self.followers is not None:
            return
        for placed in split_by_ledger(positions, flight.batch):
            if topic.followed is not None:
                self._apply(topic, topic.followed, placed)

    def _apply(self, topic: ServiceTopic, followed: FollowedTopic, placed: PlacedBatch) -> None:
        effects = self.manager.apply(topic.name, placed)
        if effects is None:
            self._stopped(topic)
            return
        if self.followers is None or not followed.has_backlog:
            followed.sequence_held()
        self._applied(topic, effects)

    def _stopped(self, topic: ServiceTopic) -> None:
        topic.followed = None
        topic.problem = self.manager.problems[topic.name]
        if self.followers is not None and topic.follower is not None:
            self.followers.leave(topic.follower)
        if self.stopped is not None:
            self.stopped(topic)

    def _received(self, topic: ServiceTopic, placed: PlacedBatch) -> None:
        if topic.followed is not None:
            self._apply(topic, topic.followed, placed)

    def _reading_failed(self, topic: ServiceTopic, error: BaseException) -> None:
        """Stop a topic that can't be read any further; all others continue."""
        if not isinstance(error, Error):
            raise error
        self.manager.stop(topic.name, error)
        self._stopped(topic)

    def mark_damaged(self, name: str, error: Error) -> None:
        """Stop a data topic whose log is damaged; all others continue."""
        topic = self.by_name.setdefault(name, ServiceTopic(name, cluster_mode=self.followers is not None))
        self.manager.stop(name, error)
        self._stopped(topic)

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
        return is_temporary(self.manager.problems.get(name), cluster_mode=self.followers is not None)

    def _open(self, name: str) -> Any:
        waiting, self._to_open = self._to_open, []
        if self._create and waiting and isinstance(self.broker, BulkBroker):
            self.broker.create_topics(waiting)  # the next calls find their topics created
        self._create_topic(name)
        return self.broker.writer(name, exclusive=True)

    def _follow(self, topic: ServiceTopic) -> None:
        followed = topic.followed = self.manager.followed(topic.name)
        reader = followed.take_reader()
        if self.followers is None:
            reader.close()
        else:
            take, fail = partial(self._received, topic), partial(self._reading_failed, topic)
            follower = LogReader(self.broker, topic.name, followed.at, take, fail, followed.writer.incarnation, reader)
            topic.follower = self.followers.follow(follower)
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
