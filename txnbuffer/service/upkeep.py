"""Upkeep of stored data: periodic snapshots, policy checks and log verification.

The state of the buffers is captured on the loop and written in the worker thread. The policy checks report policies of
a cluster that would drop records silently. Log verification reads all stored data once after a start, so that a topic
with a damaged log is stopped before anybody relies on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from broker_io.errors import DiskFailed, Error, TopicNotFound, UnsafePolicy
from broker_io.port import PolicyBroker, VerifyingBroker
from snapshots.errors import OwnershipLost, TopicDamaged
from snapshots.format import SNAPSHOT_TOPIC, is_internal
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.shard_messages import TOPIC as SHARD_MESSAGES
from txnbuffer.service.topics import Topics

SNAPSHOT_PAUSE = 0.1
"""Seconds between two checks for due snapshots."""
AT_ONCE = 32
"""Topics in one round of snapshots: capturing them blocks the loop."""
AFTER_FAILURE = 5.0


@dataclass(eq=False)
class SnapshotScheduler:
    """`problem`: the error of the last round, which is retried.

    `before_capture` is called with the names of topics before their state is captured.
    """

    _topics: Topics
    _before_capture: Callable[[list[str]], None]
    problem: Error | None = None
    written: int = 0
    _unsequenced: Error | None = None

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


CHECK_PAUSE = 0.2
"""Seconds between the policy checks of two topics: each takes ten requests, which would delay transactions."""


@dataclass(eq=False)
class PolicyChecks:
    """Checks policies every `seconds`. `dangers`: the unsafe policy of each topic at the last check."""

    _topics: Topics
    _seconds: float
    dangers: dict[str, Error] = field(default_factory=dict)

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
            return
        except TopicNotFound:
            pass
        except Error:
            return  # this check failed: the last result remains
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
                    try:
                        await self._read(broker, name)
                    except TopicNotFound:
                        pass  # deleted meanwhile
                    except Error as error:
                        await self._damaged(name, error)
        self.done = True

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
