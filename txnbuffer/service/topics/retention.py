"""Retention: trims topics, but never what a snapshot, an open transaction, a group or a cursor needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from broker_io.environment import Clock
from broker_io.errors import DiskFailed, Error, ServiceUnavailable
from broker_io.port import Ledger
from txnbuffer.config import RetentionConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.service.door.connection import MIB
from txnbuffer.service.topics.appends import ServiceTopic
from txnbuffer.service.topics.topics import Topics
from txnbuffer.service.topics.upkeep import SnapshotScheduler

COMPACT_BYTES = 32 * MIB
"""The decision log is compacted at this size, and when it has doubled since the last compaction."""


class TrimFloors(NamedTuple):
    """How far a topic may be trimmed.

    `groups` returns the lowest ledger of a topic that a group needs, None if no group needs one. `cursors` does so for
    durable cursors, given the ledgers and the first one kept anyway; `shards` for groups of other shards, and if it
    fails nothing is trimmed. `prove_ownership` returns once it is certain that nobody else owns the log.
    """

    groups: Callable[[str], int | None]
    cursors: Callable[[str, Sequence[Ledger], int], int | None]
    shards: Callable[[str], Awaitable[int | None]]
    prove_ownership: Callable[[], Awaitable[object]]


class LogRetention:
    """Trims topics and compacts the decision log."""

    def __init__(
        self,
        topics: Topics,
        scheduler: SnapshotScheduler,
        config: RetentionConfig,
        clock: Clock,
        floors: TrimFloors,
    ) -> None:
        self.trimmed = 0
        self.problem: Error | None = None
        self._topics = topics
        self._scheduler = scheduler
        self._config = config
        self._clock = clock
        self._floors = floors
        self._unavailable: ServiceUnavailable | None = None
        self._decisions = topics.shard.topic(DECISIONS)
        self._inbox = topics.shard.topic(SHARD_MESSAGES) if topics.shard.of > 1 else None
        self._compacted = 0

    async def run(self) -> None:
        """Check all topics periodically, forever."""
        while True:
            await asyncio.sleep(self._config.check_seconds)
            self.problem = self._unavailable = None
            await self._catch(self.compact())
            if self._config.seconds or self._config.bytes:
                for topic in list(self._topics.by_name.values()):
                    if topic.problem is None and (topic.followed is not None or topic.writer is not None):
                        await self._catch(self.check(topic))

    async def check(self, topic: ServiceTopic) -> None:
        """Trim a topic."""
        name = topic.name
        first, ledgers = await self._topics.work(self._first_wanted, name)
        oldest = ledgers[0].ledger
        if first <= oldest:
            return
        if topic.followed is None and ledgers[0].original:
            # Its readers count from its first record: the snapshot keeps what they need when that is trimmed.
            if (error := await self._topics.register(name, create=False)) is not None:
                raise error
            topic = self._topics.by_name.get(name, topic)
        held = self._floors.cursors(name, ledgers, first)
        if topic.followed is not None:
            await self._scheduler.snapshot([name])
            first = min(first, await self._topics.exclusively([name], topic.followed.floor))
        if first <= oldest:
            return
        far = await self._remote_floor(name)
        await self._floors.prove_ownership()
        for needed in (self._floors.groups(name), held, far):
            first = first if needed is None else min(first, needed)
        if first > oldest:
            async with self._topics.snapshot_lock:
                if topic.compacting:
                    return
                self.trimmed += await self._topics.work(self._trim, name, first)

    async def _remote_floor(self, name: str) -> int | None:
        """After one unanswered request, do not wait for other shards again in this round."""
        if self._unavailable is not None:
            raise self._unavailable
        try:
            return await self._floors.shards(name)
        except ServiceUnavailable as error:
            self._unavailable = error
            raise

    async def compact(self) -> None:
        """Compact the decision log if it has grown enough, and trim the inbox up to what was read."""
        await asyncio.to_thread(self._compact)

    def _compact(self) -> None:
        broker, decisions = self._topics.broker, self._decisions
        if _size(broker.ledgers(decisions)) >= max(COMPACT_BYTES, 2 * self._compacted):
            broker.compact(decisions)
            self._compacted = _size(broker.ledgers(decisions))
        if self._inbox is not None and len(ledgers := broker.ledgers(self._inbox)) > 2:
            broker.trim(self._inbox, ledgers[-2].ledger)  # the last but one may not be read to its end

    def _trim(self, name: str, first: int) -> int:
        """Trim ledgers; return how many were dropped."""
        broker = self._topics.broker
        before = len(broker.ledgers(name))
        broker.trim(name, first)
        return before - len(broker.ledgers(name))

    def _first_wanted(self, name: str) -> tuple[int, list[Ledger]]:
        """The first ledger that age and size keep, and all ledgers. Runs in the worker thread."""
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

    async def _catch(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except DiskFailed:
            raise
        except Error as error:
            self.problem = error


def _size(ledgers: Sequence[Ledger]) -> int:
    return sum(ledger.bytes for ledger in ledgers)
