"""Upkeep of stored data: periodic snapshots, retention, policy checks and log verification.

The state of the buffers is captured on the loop and written in the worker thread. Retention trims by age and size, but
never what a snapshot, an open transaction, a group or a cursor needs. The policy checks report policies of a cluster
that would drop records silently. Log verification reads all stored data once after a start, so that a topic with a
damaged log is stopped before anybody relies on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from broker_io.environment import Clock
from broker_io.errors import DiskFailed, Error, ServiceUnavailable, TopicNotFound, UnsafePolicy
from broker_io.port import Broker, Ledger, PolicyBroker, VerifyingBroker
from snapshots.errors import OwnershipLost, TopicDamaged
from snapshots.format import SNAPSHOT_TOPIC, is_internal
from txnbuffer.config import RetentionConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.service.appends import ServiceTopic
from txnbuffer.service.connection import MIB
from txnbuffer.service.topics import Topics

SNAPSHOT_PAUSE = 0.1
"""Seconds between two checks for due snapshots."""
AT_ONCE = 32
"""Topics in one round of snapshots: capturing them blocks the loop."""
AFTER_FAILURE = 5.0


class SnapshotScheduler:
    """`problem`: the error of the last round, which is retried.

    `before_capture` is called with the names of topics before their state is captured.
    """

    def __init__(self, topics: Topics, before_capture: Callable[[list[str]], None]) -> None:
        self.problem: Error | None = None
        self.written = 0
        self._before_capture = before_capture
        self._topics = topics
        self._unsequenced: Error | None = None

    async def run(self) -> None:
        """Write due snapshots, forever."""
        while True:
            await asyncio.sleep(SNAPSHOT_PAUSE if self.problem is None else AFTER_FAILURE)
            await self._assign_seqnos()
            due = self._topics.manager.due()
            for start in range(0, len(due), AT_ONCE):
                await self.snapshot(due[start : start + AT_ONCE])

    async def snapshot(self, names: list[str]) -> None:
        """Write snapshots of topics now. Raises errors that end the ownership; others are kept as `problem`."""
        topics, manager = self._topics, self._topics.manager
        async with topics.snapshot_lock:
            try:
                await topics.work(manager.settle)
                self._before_capture(names)
                captured = await topics.exclusively(names, manager.begin, names)
                await topics.work(manager.write, captured)
                await topics.exclusively(names, manager.finish, captured)
            except (DiskFailed, OwnershipLost):
                raise
            except Error as error:
                self.problem = error
            else:
                self.problem = None
                self.written += len(captured)

    async def _assign_seqnos(self) -> None:
        """Assign seqnos in topics with unsequenced messages, one step per topic."""
        if self.problem is self._unsequenced:
            self.problem = None
        for topic in [*self._topics.by_name.values()]:
            if topic.followed is None:
                continue
            followed = topic.followed
            try:
                if followed.has_backlog:
                    await self._topics.exclusively([topic.name], followed.sequence_held)
                else:
                    followed.sequence_held()
            except Error as error:
                self._topics.sequencing_failed(topic, followed, error)
                if error.retryable:
                    self.problem = self._unsequenced = error


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
        await asyncio.to_thread(self._compact, self._topics.broker)

    def _compact(self, broker: Broker) -> None:
        decisions = self._decisions
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


CHECK_PAUSE = 0.2
"""Seconds between the policy checks of two topics: each takes ten requests, which would delay transactions."""


class PolicyChecks:
    """Checks policies every `seconds`. `dangers`: the unsafe policy of each topic at the last check."""

    def __init__(self, topics: Topics, seconds: float) -> None:
        self.dangers: dict[str, Error] = {}
        self._topics = topics
        self._seconds = seconds

    async def run(self) -> None:
        """Check all topics periodically, forever, if the broker has policies."""
        broker = self._topics.broker
        while isinstance(broker, PolicyBroker):
            await asyncio.sleep(self._seconds)
            shard = self._topics.shard
            ours = (DECISIONS, SNAPSHOT_TOPIC, SHARD_MESSAGES) if shard.of > 1 else (DECISIONS, SNAPSHOT_TOPIC)
            names = [*map(shard.topic, ours), *self._topics.by_name]
            self.dangers = {name: danger for name, danger in self.dangers.items() if name in names}
            for name in names:
                await self._check(broker, name)
                await asyncio.sleep(CHECK_PAUSE)

    async def _check(self, broker: PolicyBroker, name: str) -> None:
        try:
            await asyncio.to_thread(broker.check_topic, name)
        except UnsafePolicy as error:
            self.dangers[name] = error
        except TopicNotFound:
            self.dangers.pop(name, None)
        except Error:
            pass  # this check failed: the last result remains
        else:
            self.dangers.pop(name, None)


PAUSE = 1.0
"""Seconds until a failed read is repeated."""


class LogVerification:
    """Verifies stored data. `damages`: by topic; a damaged data topic is stopped. `done`: all was read."""

    def __init__(self, topics: Topics) -> None:
        self.damages: dict[str, TopicDamaged] = {
            name: problem for name, problem in topics.manager.problems.items() if isinstance(problem, TopicDamaged)
        }
        self.done = False
        self._topics = topics

    async def run(self) -> None:
        """Read every ledger of every topic in the background, if the broker stores the log itself."""
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
            await self._damaged(name, error)

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

    async def _damaged(self, name: str, error: Error) -> None:
        damage = self.damages[name] = TopicDamaged(name, error, needed=is_internal(name))
        if not is_internal(name):
            async with self._topics.snapshot_lock:
                self._topics.mark_damaged(name, damage)
