"""Topics that were deleted on the cluster, or that it did not answer for: told of as gone, or registered again.

Whoever writes on makes a deleted topic anew, and asks for nothing: so it is looked for as soon as it is missed.
One that was made anew with partitions is told of no more: each of these is registered when it is used. Nor is one of
them, once their topic is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from broker_io.errors import Error, TopicNotFound
from broker_io.partitions import partition_of
from broker_io.port import Broker, PartitionedBroker
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.service.topics import Topics

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two looks at a topic that can't be settled."""

Register = Callable[[str], Awaitable[Error | None]]


class Remaking:
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
        return topic is None or (topic.tail is None and (topic.problem is None or self._is_missing(name)))


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
