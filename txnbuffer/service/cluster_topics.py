"""Topics in cluster mode, shared with applications: first records, counts, marker writers, re-creation.

First records: a cluster replaces the empty ledger of a topic whenever it loads the topic. A snapshot of an empty topic
names that ledger, so it could not distinguish a log that was always empty from one that lost its messages. Each log
with a snapshot therefore gets an epoch marker as its first message.

Re-creation: an application that keeps writing re-creates a deleted topic without notice, so a missing topic is looked
up at once. It is then reported as deleted, or registered again. A topic that was re-created with partitions is dropped;
each partition is registered when it is used. A partition is dropped once its topic is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from broker_io.batch import Batch
from broker_io.errors import Error, ServiceUnavailable, TopicNotFound
from broker_io.partitions import partition_of
from broker_io.port import Broker, PartitionedBroker, PolicyLookupBroker, Writer
from broker_io.position import Position
from broker_io.waits import Backoff
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.model import Marker
from txnbuffer.protocol import encode_marker
from txnbuffer.service.appends import Appends
from txnbuffer.service.loop import Loop
from txnbuffer.service.mode import Count, Reregister
from txnbuffer.service.topic import ServiceTopic, Topics

ACKNOWLEDGE_SECONDS = 60.0
"""Seconds within which the cluster must acknowledge an epoch marker."""


class FirstRecords:
    """Writes the first message of empty logs; `epoch_marker` returns a marker without transactions."""

    def __init__(self, broker: Broker, epoch_marker: Callable[[], Marker]) -> None:
        self._broker = broker
        self._epoch_marker = epoch_marker

    async def write(self, topic: ServiceTopic, *, new: bool = False) -> Error | None:
        """Write the first message of a followed topic if its log is empty; return the error if that failed.

        `new`: its registration has just checked the topic's policies.
        """
        if topic.followed is None or topic.followed.buffer.applied is not None:
            return None
        try:
            await asyncio.to_thread(self._write, topic.name, Batch.of([encode_marker(self._epoch_marker())]), new)
        except Error as error:
            return error
        except TimeoutError:
            return ServiceUnavailable(
                f"the cluster did not acknowledge a message to topic {topic.name!r}: check its brokers and bookies"
            )
        return None

    def _write(self, name: str, epoch_marker: Batch, new: bool) -> None:
        if any(ledger.lasting for ledger in self._broker.ledgers(name)):
            return
        if new and isinstance(self._broker, PolicyLookupBroker):
            opened = self._broker.writer_of_new(name)
        else:
            opened = self._broker.writer(name)
        with opened as writer:
            writer.append(epoch_marker).result(ACKNOWLEDGE_SECONDS)


def nothing(*_: object) -> None:
    """Do nothing: the callback for results that nobody waits for."""


PAUSE = 0.5
"""Seconds until a failed query for the end of a topic is retried."""


class ReadCounts:
    """Calls `count` for transactions once the buffer has applied the log up to its end at the time of `ask`."""

    def __init__(self, loop: Loop, broker: Broker, count: Count) -> None:
        self._broker = broker
        self._run = loop.run
        self._count = count
        self._asked: dict[ServiceTopic, list[int]] = {}
        self._waiting: dict[ServiceTopic, deque[tuple[Position, tuple[int, ...]]]] = {}
        self._pending: set[ServiceTopic] = set()

    def ask(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Count the records of transactions in a topic."""
        self._asked.setdefault(topic, []).extend(least)
        if topic not in self._pending:
            self._pending.add(topic)
            self._run(self._look(topic))

    def applied(self, topic: ServiceTopic) -> None:
        """Count for transactions whose records the buffer has applied by now."""
        waiting = self._waiting.get(topic)
        if not waiting:
            return
        at = None if topic.followed is None else topic.followed.buffer.applied
        while waiting and (topic.followed is None or (at is not None and waiting[0][0] <= at)):
            self._count(topic, waiting.popleft()[1])

    async def _look(self, topic: ServiceTopic) -> None:
        """Query the end of the topic, for all transactions passed to `ask` by then."""
        try:
            while asked := self._asked.pop(topic, None):
                try:
                    end = await asyncio.to_thread(self._broker.last_position, topic.name)
                except Error:
                    self._asked[topic] = [*asked, *self._asked.get(topic, ())]
                    await asyncio.sleep(PAUSE)
                    continue
                if end is None:
                    self._count(topic, tuple(asked))
                else:
                    self._waiting.setdefault(topic, deque()).append((end, tuple(asked)))
                    self.applied(topic)
        finally:
            self._pending.discard(topic)


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts to open a writer, or to look up a missing topic."""


class SharedTopic(ServiceTopic):
    """A topic to which others write too: its writer appends markers or messages, and is opened when there are any."""

    deferred = True

    def __init__(self, name: str, writers: MarkerWriters) -> None:
        super().__init__(name)
        self._writers = writers

    @staticmethod
    def is_temporary(problem: Error | None) -> bool:
        """Whether the topic was deleted, or the cluster did not answer."""
        return problem is not None and (isinstance(problem, TopicNotFound) or problem.retryable)

    @property
    def exists(self) -> bool:
        """Whether its log exists: it was found before anything was appended."""
        return True

    def open_writer(self) -> None:
        """Open the writer in the background, unless it is open or being opened."""
        self._writers.open(self)

    def writer_failed(self, error: Error) -> bool:
        """Replace the writer; no other topic is affected."""
        self._writers.failed(self, error)
        return False


class MarkerWriters:
    """Opens writers for markers; `opened` is called with the result of each attempt."""

    def __init__(
        self,
        loop: Loop,
        broker: Broker,
        appends: Appends,
        opened: Callable[[ServiceTopic, Error | None], None] = nothing,
    ) -> None:
        self._broker = broker
        self._run = loop.run
        self._release = appends.release
        self._opened = opened
        self._opening: set[ServiceTopic] = set()

    def open(self, topic: ServiceTopic) -> None:
        """Open a topic's writer in the background, unless it is open or being opened."""
        if topic.writer is None and topic not in self._opening:
            self._opening.add(topic)
            self._run(self._open(topic))

    def failed(self, topic: ServiceTopic, error: Error) -> None:
        """Close a failed writer; what is queued waits for the next one."""
        writer, topic.writer = topic.writer, None
        topic.held = True
        topic.write_problem = error
        if writer is not None:
            self._run(_close(writer))
        if topic.waiting:
            self.open(topic)

    def close_idle(self, topic: ServiceTopic) -> bool:
        """Close the writer of an idle topic; return False if it is still in use."""
        if topic in self._opening or topic.waiting or topic.flights:
            return False
        writer, topic.writer = topic.writer, None
        topic.held = True
        if writer is not None:
            self._run(_close(writer))
        return True

    async def _open(self, topic: ServiceTopic) -> None:
        pauses, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while topic.problem is None and topic.writer is None:
                # Appends in flight belong to the failed writer: their failure must not affect the next one.
                if topic.write_problem is not None or topic.flights:
                    pauses += 1
                    await asyncio.sleep(backoff.after(pauses))
                if topic.flights:
                    continue
                try:
                    topic.writer = await asyncio.to_thread(self._broker.writer, topic.name)
                except Error as error:
                    topic.write_problem = error
                else:
                    topic.write_problem = None
                self._opened(topic, topic.write_problem)
        finally:
            self._opening.discard(topic)
        if topic.writer is not None:
            self._release(topic)


async def _close(writer: Writer) -> None:
    with contextlib.suppress(Error):
        await asyncio.to_thread(writer.close)


class TopicRecreation:
    """Resolves missing topics: each is reported as deleted, or registered again if it exists."""

    def __init__(self, loop: Loop, coordinator: Coordinator, topics: Topics, reregister: Reregister) -> None:
        self._coordinator = coordinator
        self._topics = topics
        self._run = loop.run
        self._register = reregister
        self._now = loop.now
        self._wake = loop.wake
        self._pending: set[str] = set()

    def missing(self, name: str) -> None:
        """Find out whether a topic was deleted or re-created."""
        if name not in self._pending:
            self._pending.add(name)
            self._run(self._resolve_until_done(name))

    async def _resolve_until_done(self, name: str) -> None:
        pauses, backoff = 0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while self._unsettled(name):
                if self._is_missing(name) and await self._look(name):
                    return
                pauses += 1
                await asyncio.sleep(backoff.after(pauses))
        finally:
            self._pending.discard(name)

    async def _look(self, name: str) -> bool:
        """Try to resolve a missing topic; return whether it is done."""
        try:
            there, taken = await asyncio.to_thread(_look_up, self._topics.broker, name)
        except Error:
            return False
        if not self._is_missing(name):  # another task has just registered it
            return False
        if not there:
            self._coordinator.topic_deleted(name, self._now())
            writer = self._topics.drop(name) if taken else None
            self._wake()
            if writer is not None:  # its client library would create the topic again, next to the partitions
                with contextlib.suppress(Error):
                    await asyncio.to_thread(writer.close)
            return True
        error = await self._register(name)
        if error is not None and not error.retryable and not isinstance(error, TopicNotFound):
            self._coordinator.topic_stopped(name, error, self._now())
            self._wake()
        return error is None

    def _is_missing(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is None or topic.missing

    def _unsettled(self, name: str) -> bool:
        topic = self._topics.get(name)
        return topic is None or (topic.followed is None and (topic.problem is None or self._is_missing(name)))


def _look_up(broker: Broker, name: str) -> tuple[bool, bool]:
    """Whether a topic exists; and if not, whether a partitioned topic has its name or was deleted with it."""
    there = name in broker.topics()
    if not isinstance(broker, PartitionedBroker):
        return there, False
    partition = partition_of(name)
    if partition is not None:
        gone = partition.number >= broker.partitions(
            partition.topic
        )  # an application that had it open may have created it
        return there and not gone, gone
    return there, not there and broker.partitions(name) > 0
