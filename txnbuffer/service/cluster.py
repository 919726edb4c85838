"""Cluster mode: applications write to the topics of a cluster, the service follows them and writes only markers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.port import Broker, Reader
from broker_io.position import EARLIEST
from snapshots.shards import Shard
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.service.appends import Appends
from txnbuffer.service.cluster_topics import FirstRecords, MarkerWriters, ReadCounts, SharedTopic, TopicRecreation
from txnbuffer.service.connection import Limits
from txnbuffer.service.decision_log import CLUSTER_CONFIG, as_log_deleted, follow_decisions, watch_log
from txnbuffer.service.log_readers import LogReader, LogReaders
from txnbuffer.service.loop import Loop
from txnbuffer.service.mode import Count, Mode, Reregister, T
from txnbuffer.service.takeover import MAX_SHARDS, OwnedLog
from txnbuffer.service.topic import ServiceTopic, Topics


class ClusterMode(Mode):
    """Applications write to the topics themselves: buffers are fed by `readers`, and markers have writers of their own.

    What is appended here is never applied before it was read.
    """

    config = CLUSTER_CONFIG
    max_shards = MAX_SHARDS
    takes_records = False
    stop_seconds = 10.0

    def __init__(self, loop: Loop, broker: Broker, coordinator: Coordinator, appends: Appends, shard: Shard) -> None:
        super().__init__(loop, broker, coordinator, appends, shard)
        self.readers = LogReaders(asyncio.get_running_loop(), loop.wake)
        self._writers = MarkerWriters(loop, broker, appends)
        self._first_records = FirstRecords(broker, coordinator.epoch_marker)

    @classmethod
    def limits(cls, limits: Limits, broker: Broker, /) -> Limits:
        """The cluster limits the size of records that applications write to it."""
        return replace(limits, max_message_bytes=min(limits.max_message_bytes, broker.max_message_bytes))

    @classmethod
    def check_config(cls, config: CoordinatorConfig, /) -> None:
        """Raises InvalidConfiguration for one phase: every decision must be in the fenced log."""
        if config.one_phase:
            raise InvalidConfiguration(
                "one_phase must be False in cluster mode: a marker there does not fence an old owner"
            )

    def start(self, owned: OwnedLog, topics: Topics, take: Callable[[PlacedBatch], None]) -> None:
        """Follow the decision log and the messages of other shards; write to recovered topics whose log is empty."""
        loop, broker, decisions = self._loop, self._broker, self._shard.topic(DECISIONS)
        follow_decisions(self.readers, broker, decisions, owned.at, self._coordinator, loop.fail)
        loop.run(watch_log(broker, decisions, owned.name, loop.fail))
        if self._shard.of > 1:
            inbox = self._shard.topic(SHARD_MESSAGES)
            self.readers.follow(LogReader(broker, inbox, owned.inbox_end or EARLIEST, take, loop.fail))
        for topic in topics.by_name.values():
            loop.run(self._write_first_record(topic))

    def turn(self) -> None:
        """Deliver what was read."""
        self.readers.take()

    async def stop(self) -> None:
        """Stop all readers."""
        await asyncio.to_thread(self.readers.stop)

    def end_error(self, error: Error) -> Error:
        """LogDeleted if an internal topic is missing."""
        return as_log_deleted(error)

    def make_topic(self, name: str, topics: Topics) -> ServiceTopic:
        """Return a topic to which applications write."""
        return SharedTopic(name, self._writers)

    def load(self, topic: ServiceTopic) -> None:
        """The first marker opens the writer."""

    def expected(self, registered: Iterable[str]) -> Iterable[str]:
        """The topics of this shard: an application may have deleted or re-created them."""
        return filter(self._shard.owns, registered)

    def is_temporary(self, problem: Error | None) -> bool:
        """Whether the topic was deleted, or the cluster did not answer."""
        return SharedTopic.is_temporary(problem)

    async def prepare(self, topic: ServiceTopic, topics: Topics, *, create: bool) -> FollowedTopic | None:
        """Query what registration needs to know."""
        return await topics.query(topic.name, create=create)

    def follow(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader, topics: Topics) -> None:
        """Read the topic from where recovery ended."""
        take, fail = partial(topics.received, topic), partial(topics.reading_failed, topic)
        incarnation = followed.writer.incarnation
        topic.reader = self.readers.follow(
            LogReader(self._broker, topic.name, followed.at, take, fail, incarnation, reader)
        )

    def stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """Stop reading, and fail what is queued: no writer will be opened for it."""
        if topic.reader is not None:
            self.readers.leave(topic.reader)
        self._appends.fail(topic, problem)

    async def exclusively(self, topics: Topics, names: Iterable[str], function: Callable[[], T]) -> T:
        """Call the function in the worker thread, with the readers of the topics paused."""
        found = map(topics.get, names)
        readers = [topic.reader for topic in found if topic is not None and topic.reader is not None]
        for reader in readers:
            reader.paused += 1

        def resume(done: asyncio.Future[T]) -> None:
            if not done.cancelled():
                done.exception()  # the caller gets it, unless it was cancelled
            for reader in readers:
                reader.paused -= 1
            self.readers.wake()

        doing = asyncio.ensure_future(topics.work(function))
        doing.add_done_callback(resume)
        return await asyncio.shield(doing)  # the thread does not end when the caller is cancelled

    def sequence(self, followed: FollowedTopic) -> None:
        """Assign seqnos unless messages must be read again for it."""
        if not followed.has_backlog:
            followed.sequence_held()

    def check_new(self, name: str, *, create: bool) -> None:
        """A query takes time: registration checks it."""

    async def hold(self, topic: ServiceTopic) -> None:
        """Applications continue to write in any case."""

    async def registered(self, topic: ServiceTopic, *, fresh: bool) -> Error | None:
        """Notify the coordinator of a new log, and write its first record if it is empty."""
        if fresh and topic.followed is not None:
            ongoing = {entry.txn for entry in topic.followed.buffer.ongoing}
            self._coordinator.topic_recreated(topic.name, ongoing, self._loop.now())
        return await self._first_records.write(topic, new=fresh)

    def record_counts(self, count: Count) -> ReadCounts:
        """Return what counts once the readers have reached the present end."""
        return ReadCounts(self._loop, self._broker, count)

    def missing_topics(self, topics: Topics, reregister: Reregister) -> TopicRecreation:
        """Return what looks up missing topics."""
        return TopicRecreation(self._loop, self._coordinator, topics, reregister)

    async def _write_first_record(self, topic: ServiceTopic) -> None:
        await self._first_records.write(topic)
