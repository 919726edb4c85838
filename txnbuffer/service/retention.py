"""Which data goes: by age and by size, never what a snapshot, an open transaction or a group still needs.

Looks whether policies endanger topics that are open: what drops records in silence is told before it does.

All that is stored is read once after a start: a topic whose log is damaged stops before anybody builds on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from broker_io.environment import Clock
from broker_io.errors import DiskFailed, Error, ServiceUnavailable, TopicNotFound, UnsafePolicy
from broker_io.port import Broker, Ledger, PolicyBroker, VerifyingBroker
from snapshots.errors import TopicDamaged
from snapshots.keys import SNAPSHOT_TOPIC, is_internal
from txnbuffer.config import RetentionConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.service.limits import MIB
from txnbuffer.service.snapshot_scheduler import SnapshotScheduler
from txnbuffer.service.topic import ServiceTopic, Topics

COMPACT_BYTES = 32 * MIB
"""The decision log is compacted when it is this long, and twice as long as after the last time."""


class LogRetention:
    """`floor` tells the lowest ledger of a topic that anything else needs; None if nothing does.

    `others` tells it of groups of other shards; where it can't be had nothing goes. `prove` returns once it is certain
    that nobody else owns the topics.
    `cursors` tells that of durable cursors, of a topic's ledgers of which those from one on are to stay anyway.
    """

    def __init__(
        self,
        topics: Topics,
        scheduler: SnapshotScheduler,
        config: RetentionConfig,
        clock: Clock,
        floor: Callable[[str], int | None],
        cursors: Callable[[str, Sequence[Ledger], int], int | None] | None = None,
        others: Callable[[str], Awaitable[int | None]] | None = None,
        prove: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.trimmed = 0
        self.problem: Error | None = None
        self._topics = topics
        self._scheduler = scheduler
        self._config = config
        self._clock = clock
        self._floor = floor
        self._cursors = cursors
        self._others = others
        self._prove = prove
        self._unheard: ServiceUnavailable | None = None
        self._decisions = topics.shard.topic(DECISIONS)
        self._letters = topics.shard.topic(SHARD_MESSAGES) if topics.shard.of > 1 else None
        self._compacted = 0

    async def run(self) -> None:
        """Look at all topics now and then, for ever."""
        while True:
            await asyncio.sleep(self._config.check_seconds)
            self.problem = self._unheard = None
            await self._guarded(self.compact())
            if self._config.seconds or self._config.bytes:
                for topic in list(self._topics.by_name.values()):
                    if topic.problem is None and (topic.shared or topic.writer is not None):
                        await self._guarded(self.check(topic))

    async def check(self, topic: ServiceTopic) -> None:
        """Drop what a topic need not keep."""
        name = topic.name
        first, ledgers = await self._topics.work(self._first_wanted, name)
        oldest = ledgers[0].ledger
        if first <= oldest:
            return
        held = None if self._cursors is None else self._cursors(name, ledgers, first)
        if topic.followed is not None:
            await self._scheduler.snapshot([name])
            first = min(first, await self._topics.exclusively([name], topic.followed.floor))
        if first <= oldest:
            return
        far = None if self._others is None else await self._of_others(self._others, name)
        if self._prove is not None:
            await self._prove()
        for needed in (self._floor(name), held, far):
            first = first if needed is None else min(first, needed)
        if first > oldest:
            async with self._topics.snapshot_lock:
                self.trimmed += await self._topics.work(self._trim, name, first)

    async def _of_others(self, others: Callable[[str], Awaitable[int | None]], name: str) -> int | None:
        """Who did not answer for one topic is not waited for again in this round."""
        if self._unheard is not None:
            raise self._unheard
        try:
            return await others(name)
        except ServiceUnavailable as error:
            self._unheard = error
            raise

    async def compact(self) -> None:
        """Compact the decision log if that is worth it, and let go of letters that were read."""
        await asyncio.to_thread(self._compact, self._topics.broker)

    def _compact(self, broker: Broker) -> None:
        decisions = self._decisions
        if _size(broker.ledgers(decisions)) >= max(COMPACT_BYTES, 2 * self._compacted):
            broker.compact(decisions)
            self._compacted = _size(broker.ledgers(decisions))
        if self._letters is not None and len(ledgers := broker.ledgers(self._letters)) > 2:
            broker.trim(self._letters, ledgers[-2].ledger)  # the last but one may not be read to its end

    def _trim(self, name: str, first: int) -> int:
        """Drop ledgers; how many are gone."""
        broker = self._topics.broker
        before = len(broker.ledgers(name))
        broker.trim(name, first)
        return before - len(broker.ledgers(name))

    def _first_wanted(self, name: str) -> tuple[int, list[Ledger]]:
        """The first ledger that age and size want to keep, and those that there are. In the worker thread."""
        broker, config = self._topics.broker, self._config
        ledgers = broker.ledgers(name)
        wanted = ledgers[0].ledger
        if config.seconds:
            kept_from = broker.position_at(name, self._clock.now_ms() - int(config.seconds * 1000))
            if kept_from is not None:
                wanted = kept_from.ledger
            else:
                broker.roll(name)
                wanted = broker.ledgers(name)[-1].ledger
        if config.bytes:
            excess = _size(ledgers) - config.bytes
            for ledger in ledgers[:-1]:
                excess -= ledger.bytes
                if excess < 0:
                    break
                wanted = max(wanted, ledger.ledger + 1)
        return wanted, ledgers

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except DiskFailed:
            raise
        except Error as error:
            self.problem = error


def _size(ledgers: Sequence[Ledger]) -> int:
    return sum(ledger.bytes for ledger in ledgers)


class PolicyChecks:
    """`dangers`: what endangers each topic now, as of the last look; looks come every `seconds`."""

    def __init__(self, topics: Topics, seconds: float) -> None:
        self.dangers: dict[str, Error] = {}
        self._topics = topics
        self._seconds = seconds

    async def run(self) -> None:
        """Look at all topics now and then, for ever, where the broker has such policies."""
        broker = self._topics.broker
        while isinstance(broker, PolicyBroker):
            await asyncio.sleep(self._seconds)
            shard = self._topics.shard
            ours = (DECISIONS, SNAPSHOT_TOPIC, SHARD_MESSAGES) if shard.of > 1 else (DECISIONS, SNAPSHOT_TOPIC)
            names = [*map(shard.topic, ours), *self._topics.by_name]
            self.dangers = {name: danger for name, danger in self.dangers.items() if name in names}
            for name in names:
                await self._check(broker, name)

    async def _check(self, broker: PolicyBroker, name: str) -> None:
        try:
            await asyncio.to_thread(broker.check_topic, name)
        except UnsafePolicy as error:
            self.dangers[name] = error
        except TopicNotFound:
            self.dangers.pop(name, None)
        except Error:
            pass  # it could not be seen this time: what was found last stands
        else:
            self.dangers.pop(name, None)


PAUSE = 1.0
"""Seconds until what could not be read for now is read again."""


class LogVerification:
    """`damages`: what was found, by topic; those of data topics are what stopped them, too. `done`: all was read."""

    def __init__(self, topics: Topics) -> None:
        self.damages: dict[str, TopicDamaged] = {
            name: problem for name, problem in topics.manager.problems.items() if isinstance(problem, TopicDamaged)
        }
        self.done = False
        self._topics = topics

    async def run(self) -> None:
        """Look at every ledger of every topic, beside all else, where the broker has the log itself."""
        broker = self._topics.broker
        if isinstance(broker, VerifyingBroker):
            for name in broker.topics():
                if name not in self.damages:
                    await self._check(broker, name)
        self.done = True

    async def _check(self, broker: VerifyingBroker, name: str) -> None:
        try:
            await self._read(broker, name)
        except TopicNotFound:
            pass  # deleted meanwhile
        except Error as error:
            await self._found(name, error)

    async def _read(self, broker: VerifyingBroker, name: str) -> None:
        for ledger in await asyncio.to_thread(self._topics.broker.ledgers, name):
            while True:
                try:
                    await asyncio.to_thread(broker.check_stored, name, ledger.ledger)
                    break
                except Error as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(PAUSE)

    async def _found(self, name: str, error: Error) -> None:
        damage = self.damages[name] = TopicDamaged(name, error, needed=is_internal(name))
        if not is_internal(name):
            async with self._topics.snapshot_lock:
                self._topics.damaged(name, damage)
