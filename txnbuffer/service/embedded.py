"""Embedded mode: the service owns the log and writes every message itself, so buffers are fed with its own appends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.port import Broker, Reader
from broker_io.position import Positions
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import TopicNotCreated
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.connection import Limits
from txnbuffer.service.mode import Count, Mode, Reregister, T
from txnbuffer.service.takeover import OwnedLog
from txnbuffer.service.topic import AppendInFlight, ServiceTopic, Topics, split_by_ledger

FLIGHT_POLL = 0.001
"""Seconds between two checks for appends in flight."""


class OwnedTopic(ServiceTopic):
    """A topic to which only this engine writes: its buffer applies each append when that is durable."""

    def __init__(self, name: str, topics: Topics) -> None:
        super().__init__(name)
        self._topics = topics

    def durable(self, flight: AppendInFlight, positions: Positions) -> None:
        """Apply an acknowledged append to the buffer."""
        if self.followed is not None:
            for placed in split_by_ledger(positions, flight.batch):
                self._topics.received(self, placed)


class EmbeddedMode(Mode):
    """The service owns the log: one shard, no other writers, and reads of the log are cheap."""

    config = CoordinatorConfig()
    max_shards = 1
    takes_records = True
    stop_seconds = inf

    @classmethod
    def limits(cls, limits: Limits, _broker: Broker, /) -> Limits:
        """The limits as they are."""
        return limits

    @classmethod
    def check_config(cls, _config: CoordinatorConfig, /) -> None:
        """Every configuration works."""

    def start(self, owned: OwnedLog, topics: Topics, take: Callable[[PlacedBatch], None]) -> None:
        """Nobody else writes: there is nothing to read."""

    def turn(self) -> None:
        """Acknowledged appends were applied already."""

    async def stop(self) -> None:
        """Nothing is read."""

    def end_error(self, error: Error) -> Error:
        """The error as it is."""
        return error

    def make_topic(self, name: str, topics: Topics) -> ServiceTopic:
        """Return a topic that is fed with its own appends."""
        return OwnedTopic(name, topics)

    def load(self, topic: ServiceTopic) -> None:
        """Open the writer."""
        topic.writer = self._broker.writer(topic.name, exclusive=True)
        topic.held = False

    def expected(self, registered: Iterable[str]) -> Iterable[str]:
        """None: nobody else deletes topics while the service is down."""
        return ()

    def is_temporary(self, problem: Error | None) -> bool:
        """Whether the topic was deleted."""
        return OwnedTopic.is_temporary(problem)

    async def prepare(self, topic: ServiceTopic, topics: Topics, *, create: bool) -> FollowedTopic | None:
        """Open the topic for writing."""
        if topic.writer is None:
            await topics.open(topic)
        return None

    def follow(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader, topics: Topics) -> None:
        """The topic feeds its own appends: no reader is needed."""
        reader.close()

    def stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """What is queued is failed after the append that stopped the topic."""

    async def exclusively(self, topics: Topics, names: Iterable[str], function: Callable[[], T]) -> T:
        """Call the function on the loop."""
        return function()

    def sequence(self, followed: FollowedTopic) -> None:
        """Assign seqnos; what is not in memory is read from the disk."""
        followed.sequence_held()

    def check_new(self, name: str, *, create: bool) -> None:
        """Raises TopicNotCreated for a missing topic that must not be created."""
        if not create and name not in self._broker.topics():
            raise TopicNotCreated(name)

    async def hold(self, topic: ServiceTopic) -> None:
        """Suspend the appends and wait for those in flight."""
        topic.held = True
        while topic.flights:
            await asyncio.sleep(FLIGHT_POLL)

    async def registered(self, topic: ServiceTopic, *, fresh: bool) -> Error | None:
        """Nothing is left to do."""
        return None

    def record_counts(self, count: Count) -> AppliedCounts:
        """Return what counts at once."""
        return AppliedCounts(count)

    def missing_topics(self, topics: Topics, reregister: Reregister) -> DeletedTopics:
        """Return what waits for the next registration."""
        return DeletedTopics()


class AppliedCounts:
    """Calls `count` at once: the buffer has applied every durable message."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def ask(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Call the function for transactions in a topic."""
        self._count(topic, least)

    def applied(self, topic: ServiceTopic) -> None:
        """Nothing waits."""


class DeletedTopics:
    """A missing topic was deleted; it stays missing until it is registered again."""

    def missing(self, name: str) -> None:
        """Nobody else creates topics."""
