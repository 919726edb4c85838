"""The topics of the service: made, opened for writing, registered, and fed with what was appended.

Whatever waits for the disk runs in one worker thread; a topic is held back meanwhile, so that its log
stands still. Snapshots and registrations never overlap: both write to the snapshot topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from broker_io.errors import Error, InvalidTopicName, TopicNotFound
from broker_io.port import Broker, check_topic_name
from broker_io.position import Positions
from snapshots.keeper import BufferKeeper
from snapshots.keys import INTERNAL_PREFIX, is_internal
from txnbuffer.buffer.effects import Effect
from txnbuffer.service.limits import MIB
from txnbuffer.service.topic import Flight, Topic, placed_runs

T = TypeVar("T")

HELD_BYTES = 64 * MIB
"""Undecided messages that wait in memory for their seqnos, all topics together."""
LEAST_HELD = 64 * 1024

Applied = Callable[[Topic, list[Effect]], None]


def check_name(name: str) -> None:
    """Raises InvalidTopicName for what can't be a data topic."""
    check_topic_name(name)
    if is_internal(name):
        raise InvalidTopicName(
            f"topic {name!r}: names that begin with {INTERNAL_PREFIX} are the service's own: use another"
        )


class Topics:
    """`applied` is told what the buffer of a topic made of what was appended; `stopped` of a topic that stopped."""

    def __init__(
        self, broker: Broker, keeper: BufferKeeper, applied: Applied, *, create: bool, executor: ThreadPoolExecutor
    ) -> None:
        self.broker = broker
        self.keeper = keeper
        self.by_name: dict[str, Topic] = {}
        self.keeping = asyncio.Lock()
        self.registered = 0
        self._applied = applied
        self._create = create
        self._executor = executor

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call something that waits, in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def load(self) -> None:
        """Open the topics that were recovered."""
        for name in self.keeper.topics:
            topic = self.by_name[name] = Topic(name)
            topic.writer = self.broker.writer(name, exclusive=True)
            topic.held = False
            self._follow(topic)
        for name, problem in self.keeper.problems.items():
            topic = self.by_name[name] = Topic(name)
            topic.problem = problem
        self._share_memory()

    def get(self, name: str) -> Topic | None:
        return self.by_name.get(name)

    def make(self, name: str) -> Topic:
        """The entry of a topic that `open` is to be called for. Raises InvalidTopicName."""
        check_name(name)
        topic = self.by_name[name] = Topic(name)
        return topic

    async def open(self, topic: Topic) -> None:
        """Open a topic for writing, made if missing. Raises TopicNotFound if it is and that is not wanted."""
        topic.writer = await self.work(self._open, topic.name)

    async def register(self, topic: Topic) -> None:
        """Follow a topic, which is held back and has nothing under way; its first snapshot is durable then."""
        if topic.tail is not None:
            return
        if topic.writer is None:
            await self.open(topic)
        async with self.keeping:
            await self.work(self.keeper.register, topic.name)
        self._follow(topic)
        self._share_memory()

    def forget(self, topic: Topic) -> None:
        """A topic that could not be opened: the next one who asks tries again."""
        if topic.writer is None and self.by_name.get(topic.name) is topic:
            del self.by_name[topic.name]

    def landed(self, topic: Topic, flight: Flight, positions: Positions) -> None:
        """Feed the buffer with an append that is durable."""
        tail = topic.tail
        if tail is None:
            return
        for placed in placed_runs(positions, flight.batch):
            effects = self.keeper.apply(topic.name, placed)
            if effects is None:
                topic.tail = None
                topic.problem = self.keeper.problems[topic.name]
                return
            tail.numbering.step()
            self._applied(topic, effects)

    def _open(self, name: str) -> Any:
        if not self._create and name not in self.broker.topics():
            raise TopicNotFound(f"there is no topic {name!r}, and this service makes none: create it first")
        self.broker.create_topic(name)
        return self.broker.writer(name, exclusive=True)

    def _follow(self, topic: Topic) -> None:
        topic.tail = self.keeper.tail(topic.name)
        topic.tail.stop_reading()

    def _share_memory(self) -> None:
        tails = [topic.tail for topic in self.by_name.values() if topic.tail is not None]
        self.registered = len(tails)
        share = max(HELD_BYTES // max(len(tails), 1), LEAST_HELD)
        for tail in tails:
            tail.numbering.held_limit = share


def as_error(error: BaseException) -> Error:
    """Any failure as one of the tree."""
    return error if isinstance(error, Error) else Error(f"unexpected: {error!r}")
