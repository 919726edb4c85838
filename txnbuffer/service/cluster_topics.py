"""The first message of logs that hold none: a border.

Whoever loads a topic of a cluster replaces its empty ledger. A snapshot that applied nothing names that ledger, and
could not tell a log that was always empty from one whose messages went; so no log with a snapshot is left empty.

Counting the records of commits where others write the topics: the buffer has them once its tail has come to them.

Writers for markers, where others write the topics too: opened when a marker waits, and again when one has died.

Topics that were deleted on the cluster, or that it did not answer for: told of as gone, or registered again.

Whoever writes on makes a deleted topic anew, and asks for nothing: so it is looked for as soon as it is missed.
One that was made anew with partitions is told of no more: each of these is registered when it is used. Nor is one of
them, once their topic is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from broker_io.batch import Batch
from broker_io.errors import Error, ServiceUnavailable, TopicNotFound
from broker_io.partitions import partition_of
from broker_io.port import Broker, PartitionedBroker, PolicyLookupBroker, Writer
from broker_io.position import Position
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.model import Marker
from txnbuffer.protocol import encode_marker
from txnbuffer.service.topic import ServiceTopic, Topics

SECONDS = 60.0
"""So long the cluster has to acknowledge a border."""


class FirstRecords:
    """`epoch_marker` makes a marker without transactions."""

    def __init__(self, broker: Broker, epoch_marker: Callable[[], Marker]) -> None:
        self._broker = broker
        self._epoch_marker = epoch_marker

    async def write(self, topic: ServiceTopic, *, new: bool = False) -> Error | None:
        """Give a followed topic its first message if it has none that lasts; what is in the way.

        `new`: its registration has just seen that no policy endangers it.
        """
        if topic.followed is None or topic.followed.buffer.applied is not None:
            return None
        try:
            await asyncio.to_thread(self._write, topic.name, Batch.of([encode_marker(self._epoch_marker())]), new)
        except Error as error:
            return error
        except TimeoutError:
            return ServiceUnavailable(
                f"the cluster did not acknowledge a message to topic {topic.name!r}: is it running?"
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
            writer.append(epoch_marker).result(SECONDS)


PAUSE = 0.5
"""Seconds until a broker that could not tell the end of a topic is asked again."""

Count = Callable[[ServiceTopic, "tuple[int, ...]"], None]


class RecordCounts:
    """`count` is called for transactions once the buffer has all that was in the log when they were asked for."""

    def __init__(self, broker: Broker, run: Callable[[Coroutine[Any, Any, None]], None], count: Count) -> None:
        self._broker = broker
        self._run = run
        self._count = count
        self._asked: dict[ServiceTopic, list[int]] = {}
        self._waiting: dict[ServiceTopic, deque[tuple[Position, tuple[int, ...]]]] = {}
        self._looking: set[ServiceTopic] = set()

    def ask(self, topic: ServiceTopic, least: tuple[int, ...]) -> None:
        """Count the records of these in a topic."""
        self._asked.setdefault(topic, []).extend(least)
        if topic not in self._looking:
            self._looking.add(topic)
            self._run(self._look(topic))

    def applied(self, topic: ServiceTopic) -> None:
        """The buffer has come further."""
        waiting = self._waiting.get(topic)
        if not waiting:
            return
        at = None if topic.followed is None else topic.followed.buffer.applied
        while waiting and (topic.followed is None or (at is not None and waiting[0][0] <= at)):
            self._count(topic, waiting.popleft()[1])

    async def _look(self, topic: ServiceTopic) -> None:
        """Take the end of the topic for all that were asked for by then."""
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
            self._looking.discard(topic)


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to open a writer."""


class MarkerWriters:
    """`run` runs something beside the loop's turns; `release` lets a topic append that was held back."""

    def __init__(
        self,
        broker: Broker,
        run: Callable[[Coroutine[Any, Any, None]], None],
        release: Callable[[ServiceTopic], None],
    ) -> None:
        self._broker = broker
        self._run = run
        self._release = release
        self.opened: Callable[[ServiceTopic, Error | None], None] | None = None
        """Told what came of each try to open a writer."""
        self._opening: set[ServiceTopic] = set()

    def need(self, topic: ServiceTopic) -> None:
        """Open a topic's writer in the background, unless it is open or about to be."""
        if topic.writer is None and topic not in self._opening:
            self._opening.add(topic)
            self._run(self._open(topic))

    def died(self, topic: ServiceTopic, error: Error) -> None:
        """A writer failed, and will go on failing: what waits is for the next one."""
        writer, topic.writer = topic.writer, None
        topic.held = True
        topic.write_problem = error
        if writer is not None:
            self._run(_close(writer))
        if topic.waiting:
            self.need(topic)

    def let_go(self, topic: ServiceTopic) -> bool:
        """Close the writer of a topic that is not used any more; False, and nothing done, if it is still in use."""
        if topic in self._opening or topic.waiting or topic.flights:
            return False
        writer, topic.writer = topic.writer, None
        topic.held = True
        if writer is not None:
            self._run(_close(writer))
        return True

    async def _open(self, topic: ServiceTopic) -> None:
        pause = FIRST_PAUSE
        try:
            while topic.problem is None and topic.writer is None:
                # What is under way belongs to the writer that died: its failure must not hit the next one.
                if topic.write_problem is not None or topic.flights:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                if topic.flights:
                    continue
                try:
                    topic.writer = await asyncio.to_thread(self._broker.writer, topic.name)
                except Error as error:
                    topic.write_problem = error
                else:
                    topic.write_problem = None
                if self.opened is not None:
                    self.opened(topic, topic.write_problem)
        finally:
            self._opening.discard(topic)
        if topic.writer is not None:
            self._release(topic)


async def _close(writer: Writer) -> None:
    with contextlib.suppress(Error):
        await asyncio.to_thread(writer.close)


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two looks at a topic that can't be settled."""

Register = Callable[[str], Awaitable[Error | None]]


class TopicRecreation:
    """`run` runs something beside the loop's turns; `register` registers a topic that is there, or says why not.

    `wake` makes a turn of the loop.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        topics: Topics,
        run: Callable[[Coroutine[Any, Any, None]], None],
        register: Register,
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._topics = topics
        self._run = run
        self._register = register
        self._now = now
        self._wake = wake
        self._looking: set[str] = set()

    def missing(self, name: str) -> None:
        """A topic is not what was followed, or not there at all: settle what becomes of it."""
        if name not in self._looking:
            self._looking.add(name)
            self._run(self._settle(name))

    async def _settle(self, name: str) -> None:
        pause = FIRST_PAUSE
        try:
            while self._unsettled(name):
                if self._is_missing(name) and await self._look(name):
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._looking.discard(name)

    async def _look(self, name: str) -> bool:
        """Whether nothing is left to be done."""
        try:
            there, taken = await asyncio.to_thread(_ask, self._topics.broker, name)
        except Error:
            return False
        if not self._is_missing(name):  # somebody registers it just now
            return False
        if not there:
            self._coordinator.topic_deleted(name, self._now())
            writer = self._topics.drop(name) if taken else None
            self._wake()
            if writer is not None:  # its client library would make the topic again, beside the partitions
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


def _ask(broker: Broker, name: str) -> tuple[bool, bool]:
    """Whether a topic is there, and if not, whether none can have its name: partitions have it, or had it."""
    there = name in broker.topics()
    if not isinstance(broker, PartitionedBroker):
        return there, False
    partition = partition_of(name)
    if partition is not None:
        gone = partition.number >= broker.partitions(partition.topic)  # it may be there, made by who had it open
        return there and not gone, gone
    return there, not there and broker.partitions(name) > 0
