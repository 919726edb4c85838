"""Cluster mode: applications write to the topics of a cluster, the service follows them and writes only markers.

First records: a cluster replaces the empty ledger of a topic whenever it loads the topic. A snapshot of an empty topic
would name that ledger, so it could not distinguish a log that was always empty from one that lost its messages. An
empty log therefore gets an epoch marker as its first message, before its first snapshot.

Re-creation: an application that keeps writing re-creates a deleted topic without notice, so a missing topic is looked
up at once. A topic that was re-created with partitions is dropped; each partition is registered when it is used. A
partition is dropped once its topic is deleted.

The owner follows the decision log too, to detect the next owner and the deletion of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from broker_io.batch import Batch, PlacedBatch
from broker_io.environment import current
from broker_io.errors import Error, ServiceUnavailable, TopicNotFound
from broker_io.port import Broker, PolicyLookupBroker, Reader
from broker_io.position import EARLIEST, Position
from broker_io.waits import Backoff
from snapshots.shards import Shard
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.protocol import marker_batch
from txnbuffer.recovery.followed_topic import FollowedTopic
from txnbuffer.recovery.restore import topic_deleted
from txnbuffer.service.log_readers import OWN_BATCH_DELAY, LogReader, LogReaders
from txnbuffer.service.loop import Loop
from txnbuffer.service.standby.decision_log import newest_owner
from txnbuffer.service.standby.takeover import MAX_SHARDS, OwnedLog
from txnbuffer.service.topics.appends import Appends, ServiceTopic
from txnbuffer.service.topics.topics import FIRST_PAUSE, LONGEST_PAUSE, T, TopicEvents, Topics, close_quietly

CLUSTER_CONFIG = CoordinatorConfig(one_phase=False, verify_counts=False)
"""The coordinator's configuration in cluster mode: every decision is in the fenced log."""


class SharedTopic(ServiceTopic):
    """A topic to which others write too: its writer appends markers or messages, and is opened when there are any.

    `opened` is called with the result of each attempt to open the writer.
    """

    deferred = True

    def __init__(
        self,
        name: str,
        loop: Loop,
        broker: Broker,
        appends: Appends,
        opened: Callable[[SharedTopic, Error | None], None] | None = None,
    ) -> None:
        super().__init__(name)
        self._loop = loop
        self._broker = broker
        self._appends = appends
        self._opened = opened
        self._opening = False

    def open_writer(self) -> None:
        """Open the writer in the background, unless it is open or being opened."""
        if self.writer is None and not self._opening:
            self._opening = True
            self._loop.run(self._open())

    def writer_failed(self, error: Error) -> bool:
        """Replace the writer: what is queued waits for the next one. No other topic is affected."""
        self.write_problem = error
        self._close_writer()
        if self.waiting:
            self.open_writer()
        return False

    def close_if_idle(self) -> bool:
        """Close the writer; return False if it is in use."""
        if self._opening or self.waiting or self.flights:
            return False
        self._close_writer()
        return True

    def _close_writer(self) -> None:
        writer, self.writer = self.writer, None
        self.held = True
        if writer is not None:
            self._loop.run(close_quietly(writer))

    async def _open(self) -> None:
        pauses, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while self.problem is None and self.writer is None:
                # Appends in flight belong to the failed writer: their failure must not affect the next one.
                if self.write_problem is not None or self.flights:
                    pauses += 1
                    await asyncio.sleep(backoff.after(pauses))
                if self.flights:
                    continue
                try:
                    self.writer = await asyncio.to_thread(self._broker.writer, self.name)
                except Error as error:
                    self.write_problem = error
                else:
                    self.write_problem = None
                if self._opened is not None:
                    self._opened(self, self.write_problem)
        finally:
            self._opening = False
        if self.writer is not None:
            self._appends.release(self)


REGISTERING = 8
"""Registrations that query the cluster at the same time: each takes some twenty requests."""
ACKNOWLEDGE_SECONDS = 60.0
"""Seconds within which the cluster must acknowledge an epoch marker."""
END_PAUSE = 0.5
"""Seconds until a failed query for the end of a topic is retried."""
CHECK_INTERVAL = 2.0
"""Seconds between two checks that the decision log exists."""
MISSED = 2
"""Consecutive checks that must find it missing before it counts as deleted."""


class ClusterTopics(Topics):
    """Applications write to the topics themselves: buffers are fed by `readers`, and markers have writers of their own.

    What is appended here is never applied before it was read.
    """

    config = CLUSTER_CONFIG
    max_shards = MAX_SHARDS
    takes_records = False
    stop_seconds = 10.0

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
        super().__init__(loop, broker, owned, appends, executor, shard, create=create)
        self.readers = LogReaders(asyncio.get_running_loop(), loop.wake)
        self._registration_pool = current().threads.executor(REGISTERING, "txnbuffer-registering")
        self._unread: dict[ServiceTopic, list[Callable[[], None]]] = {}

    def start(self, events: TopicEvents, take: Callable[[PlacedBatch], None]) -> None:
        """Start as every mode; follow the decision log and the inbox; write to recovered topics whose log is empty.

        A registered topic that was not recovered was deleted, or created again.
        """
        expected = filter(self.shard.owns, self._coordinator.topics())
        for name in {*expected} - {*self.manager.topics, *self.manager.problems}:
            self.manager.stop(name, topic_deleted(name))
        super().start(events, take)
        loop, broker, owned, decisions = self._loop, self.broker, self._owned, self.shard.topic(DECISIONS)
        reader = LogReader(broker, decisions, owned.at, self._decisions_came, loop.fail)
        self.readers.follow(reader).batch_delay = OWN_BATCH_DELAY
        loop.run(self._watch_log())
        if self.shard.of > 1:
            inbox = self.shard.topic(SHARD_MESSAGES)
            self.readers.follow(LogReader(broker, inbox, owned.inbox_end or EARLIEST, take, loop.fail))
        for topic in self.by_name.values():
            loop.run(self._write_first_record(topic))

    def turn(self) -> None:
        """Deliver what was read."""
        self.readers.take()

    async def stop(self) -> None:
        """Stop all readers."""
        await asyncio.to_thread(self.readers.stop)
        self._registration_pool.shutdown(wait=False, cancel_futures=True)

    async def exclusively(self, names: Iterable[str], function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the worker thread, with the readers of the topics paused."""
        found = map(self.get, names)
        readers = [topic.reader for topic in found if topic is not None and topic.reader is not None]
        for reader in readers:
            reader.paused += 1

        def resume(done: asyncio.Future[T]) -> None:
            if not done.cancelled():
                done.exception()  # the caller gets it, unless it was cancelled
            for reader in readers:
                reader.paused -= 1
            self.readers.wake()

        doing = asyncio.ensure_future(self.work(function, *arguments))
        doing.add_done_callback(resume)
        return await asyncio.shield(doing)  # the thread does not end when the caller is cancelled

    # Topics

    def _make_topic(self, name: str) -> ServiceTopic:
        return SharedTopic(name, self._loop, self.broker, self._appends)

    def _feed(self, topic: ServiceTopic, followed: FollowedTopic, reader: Reader | None) -> None:
        take, fail = partial(self.received, topic), partial(self._reading_failed, topic)
        incarnation = followed.writer.incarnation
        topic.reader = self.readers.follow(
            LogReader(self.broker, topic.name, followed.at, take, fail, incarnation, reader)
        )

    def _reading_failed(self, topic: ServiceTopic, error: BaseException) -> None:
        """Stop a topic that can't be read any further; all others continue."""
        if not isinstance(error, Error):
            raise error
        self.manager.stop(topic.name, error)
        self._stopped(topic)

    def _report_stopped(self, topic: ServiceTopic, problem: Error) -> None:
        """Stop reading, and fail what is queued: no writer will be opened for it."""
        if topic.reader is not None:
            self.readers.leave(topic.reader)
        self._appends.fail(topic, problem)
        super()._report_stopped(topic, problem)

    async def _prepare(self, topic: ServiceTopic, create: bool) -> FollowedTopic | None:
        """Query what registration needs to know; applications continue to write in any case.

        An empty log gets its first message.
        """
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._registration_pool, self._query, topic, create, self._epoch_marker())

    def _query(self, topic: ServiceTopic, create: bool, epoch_marker: Batch) -> FollowedTopic | None:
        begin = partial(self._append_if_empty, epoch_marker=epoch_marker, new=True)
        if self._was_missing(topic):
            self._create_topic(topic.name, create)
            if self.broker.last_position(topic.name) is None:  # else what the log held was trimmed
                begin(topic.name)
            return None
        self._check_exists(topic.name, create)
        return self.manager.prepare(topic.name, begin)

    async def _complete_registration(self, topic: ServiceTopic, *, fresh: bool) -> Error | None:
        """Notify the coordinator of a new log, and write the first record of a recovered one that is empty."""
        if fresh and topic.followed is not None:
            ongoing = {*topic.followed.buffer.ongoing}
            self._coordinator.topic_recreated(topic.name, ongoing, self._loop.now())
        return None if fresh else await self._write_first_record(topic)

    async def _write_first_record(self, topic: ServiceTopic) -> Error | None:
        """Write the first message of a followed topic if its log is empty; return the error if that failed."""
        if topic.followed is None or topic.followed.buffer.applied is not None:
            return None
        try:
            await asyncio.to_thread(self._append_if_empty, topic.name, self._epoch_marker())
        except Error as error:
            return error
        return None

    def _epoch_marker(self) -> Batch:
        return marker_batch(self._coordinator.epoch_marker())

    def _append_if_empty(self, name: str, epoch_marker: Batch, *, new: bool = False) -> Position | None:
        """Write a message if a log is empty, and return its position.

        `new`: `create_topic` has just checked the topic's policies.
        """
        broker = self.broker
        if any(ledger.lasting for ledger in broker.ledgers(name)):
            return None
        opened = broker.writer_of_new(name) if new and isinstance(broker, PolicyLookupBroker) else broker.writer(name)
        with opened as writer:
            try:
                return writer.append(epoch_marker).result(ACKNOWLEDGE_SECONDS).first
            except TimeoutError:
                raise ServiceUnavailable(
                    f"the cluster did not acknowledge a message to topic {name!r}: check its brokers and bookies"
                ) from None

    # Reports once a log was read

    def when_read(self, topic: ServiceTopic, report: Callable[[], None]) -> None:
        """Call `report` once the buffer has applied the topic's log up to its present end."""
        unread = self._unread.get(topic)
        if topic.reader is not None:
            topic.reader.begin_now()
        if unread is None:
            self._unread[topic] = [report]
            self._loop.run(self._query_end(topic))
        else:
            unread.append(report)

    async def _query_end(self, topic: ServiceTopic) -> None:
        """Query the end of the topic, for all calls of `when_read` until then."""
        while self._unread[topic]:
            asked, self._unread[topic] = self._unread[topic], []
            try:
                end = await asyncio.to_thread(self.broker.last_position, topic.name)
            except Error:
                self._unread[topic] = asked + self._unread[topic]
                await asyncio.sleep(END_PAUSE)
                continue
            for report in asked:
                if end is None:
                    report()
                else:
                    topic.reports.append((end, report))
            topic.report_applied()
        del self._unread[topic]

    # The decision log

    def _decisions_came(self, placed: PlacedBatch) -> None:
        """The entry of another owner ends this one."""
        epoch = newest_owner(placed)
        if epoch is not None:
            self._coordinator.newer_epoch_seen(epoch, "the decision log")

    async def _watch_log(self) -> None:
        """Fail once the log was deleted or created again: appends in flight to it might wait for a long time."""
        decisions, missed = self.shard.topic(DECISIONS), 0
        while missed < MISSED:
            await asyncio.sleep(CHECK_INTERVAL)
            try:
                name = await asyncio.to_thread(self.broker.incarnation, decisions)
            except TopicNotFound:
                name = ""
            except Error:
                continue  # this check failed
            missed = 0 if name == self._owned.name else missed + 1
        self._loop.fail(TopicNotFound(f"topic {decisions!r} was deleted"))
