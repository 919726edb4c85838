"""Membership in a consumer group, and adaptive batch sizes

A member sends a heartbeat once a second; the answer has its partition assignments.

If a handler takes too long, the service aborts the transaction after its timeout; if it blocks the event loop, the
service removes the member. The records are then handled again in a smaller batch, which commits after half of the time
that was too long. A single record that takes too long is handled a few more times, and then counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from broker_io.environment import current
from broker_io.position import EARLIEST, Position
from txnbuffer.checks import check_name
from txnbuffer.client.base import BaseClient
from txnbuffer.client.lifecycle import cancel
from txnbuffer.client.reading.starts import ReadTopics
from txnbuffer.coordinator.messages import GroupHeartbeat, PartitionAssignment
from txnbuffer.errors import Error, StaleGeneration

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats."""
PARTITION_CHECK_INTERVAL = 10.0
"""Seconds between checks for new partitions."""
LEAVE_TIMEOUT = 5.0
"""Seconds to wait for the coordinator when leaving."""


class Membership:
    """A member of a group.

    `assignments`: the current assignments, by partition. `unsettled`: the service may be about to change them.
    `changed` is set when `assignments` or `failure` changes. `from_end`: the group starts at the end of topics that it
    has not consumed before. `wait`: topics that do not exist yet are consumed once they do, from their beginning.
    """

    def __init__(
        self, client: BaseClient, group: str, topics: Sequence[str], *, from_end: bool, wait: bool = False
    ) -> None:
        self.group = check_name(group, "a group")
        self.assignments: Mapping[str, PartitionAssignment] = {}
        self.generation = 0
        self.unsettled = True
        self.changed = asyncio.Event()
        self.failure: Exception | None = None
        environment = current()
        host, token = environment.network.host_name(), environment.randomness.token(4)
        self.name = f"{host[:100]}-{environment.process}-{token.hex()}"
        self._client = client
        self._topics = topics
        self._from_end = from_end
        self._wait = wait
        self._missing: frozenset[str] = frozenset()
        self._awaited: frozenset[str] = frozenset()
        """The topics that did not exist when the group was joined."""
        self._heartbeat = GroupHeartbeat(0, self.group, self.name)
        self._joined = False
        self._finding: asyncio.Future[GroupHeartbeat] | None = None
        self._check_at = 0.0
        self._send_now = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Join the group. Raises TopicNotFound, and the service's error if it rejects the member."""
        loop = asyncio.get_running_loop()
        self._heartbeat = await asyncio.to_thread(self._find_topics)
        self._awaited = self._missing
        self._check_at = loop.time() + self._check_interval
        self._joined = True
        await self._send_heartbeat()
        self._heartbeats = asyncio.create_task(self._heartbeat_loop())

    async def leave(self) -> None:
        """Leave the group. If the coordinator does not answer, it removes the member when its heartbeats stop."""
        await cancel(self._heartbeats)
        if self._finding is not None:
            self._finding.cancel()
        if not self._joined:
            return
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self._client.heartbeat(GroupHeartbeat(0, self.group, self.name, leaves=True))
        except (Error, TimeoutError):
            return

    def holds(self, assignment: PartitionAssignment) -> bool:
        """Return whether the newest heartbeat confirmed the assignment."""
        held = self.assignments.get(assignment.partition)
        return held is not None and held.since == assignment.since

    def generation_of(self, assignment: PartitionAssignment) -> int:
        """Return the generation to commit with. Raises StaleGeneration if the partition is no longer assigned."""
        if not self.holds(assignment):
            raise StaleGeneration(f"group {self.group!r} assigned {assignment.partition!r} to another member")
        return self.generation

    def rejected(self, assignment: PartitionAssignment) -> None:
        """Drop an assignment whose commit was rejected, and request the current assignments now."""
        if self.holds(assignment):
            self.assignments = {name: held for name, held in self.assignments.items() if name != assignment.partition}
        self.unsettled = True
        self._send_now.set()

    async def _heartbeat_loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    await self._send_now.wait()
            except TimeoutError:
                pass
            self._send_now.clear()
            try:
                await self._send_heartbeat()
            except Exception as error:
                if not isinstance(error, Error) or not error.retryable:
                    self.failure = error
                    self.changed.set()
                    return

    async def _send_heartbeat(self) -> None:
        answer = await self._client.heartbeat(self._current_heartbeat())
        # If `since` is unchanged, no other member has had the partition in between: keep the object.
        assignments = {
            one.partition: self.assignments[one.partition] if self.holds(one) else one for one in answer.assignments
        }
        changed = assignments.keys() != self.assignments.keys() or not all(map(self.holds, assignments.values()))
        self.assignments, self.generation, self.unsettled = assignments, answer.generation, answer.unsettled
        if changed:
            self.changed.set()

    def _current_heartbeat(self) -> GroupHeartbeat:
        """Return the heartbeat with the partitions known so far; looking for new ones must not delay heartbeats."""
        loop = asyncio.get_running_loop()
        if self._finding is None and loop.time() >= self._check_at:
            self._finding = asyncio.ensure_future(asyncio.to_thread(self._find_topics))
        if self._finding is not None and self._finding.done():
            found, self._finding, self._check_at = self._finding, None, loop.time() + self._check_interval
            self._heartbeat = found.result()
        return self._heartbeat

    @property
    def _check_interval(self) -> float:
        return HEARTBEAT_INTERVAL if self._missing else PARTITION_CHECK_INTERVAL

    def _find_topics(self) -> GroupHeartbeat:
        """Return a heartbeat with all topics and partitions to read. Blocks, so it runs in another thread."""
        broker = self._client.open_broker()
        found = ReadTopics(broker, self._topics, "beginning", wait=self._wait)
        parts, self._missing = found.parts(), frozenset(found.missing)
        ends: tuple[Position, ...] = ()
        if self._from_end:
            last = broker.last_position
            ends = tuple((topic not in self._awaited and last(name)) or EARLIEST for name, topic in parts)
        topics, partitions = tuple(topic for _, topic in parts), tuple(partition for partition, _ in parts)
        return GroupHeartbeat(0, self.group, self.name, topics, partitions, ends)


COMMIT_INTERVAL = 5.0
"""Seconds of handling after which the finished records commit; less than the 8 s after which a member is removed."""
UNLIMITED = 1 << 30
"""A batch size without limit."""
SUCCESSES_TO_GROW = 16
"""Consecutive successful transactions before the batch size doubles."""
MIN_CALLS = 3
"""How many times a slow record is handled at least, because the process may only have paused once."""
BLOCKED = 4.0
"""If the event loop was blocked for this many seconds, that may be why the member was removed."""
STALL_CHECK_INTERVAL = 0.5
"""Seconds between checks whether the event loop is blocked."""


class AdaptiveBatch:
    """The batch size of a partition: commit after `records` records, or after `seconds`."""

    def __init__(self) -> None:
        self.seconds = COMMIT_INTERVAL
        self.records = UNLIMITED
        self._at: Position | None = None
        self._calls = 0
        self._successes = 0

    def calls(self, position: Position) -> int:
        """Return how many times a transaction with only the record at this position has taken too long."""
        return self._calls if position == self._at else 0

    def too_long(self, position: Position, count: int, seconds: float, last: float) -> None:
        """Reduce the size: `count` records took too long, `seconds` in total, `last` of these for the last record."""
        self.seconds, self._successes = min(self.seconds, seconds / 2), 0
        if count > 1:
            self.records = count - 1 if 2 * last >= seconds else (count + 1) // 2
        else:
            self._calls, self._at = self.calls(position) + 1, position

    def committed(self) -> None:
        """A transaction has committed."""
        self._successes += 1
        if self._successes >= SUCCESSES_TO_GROW:
            self.records, self._successes = min(2 * self.records, UNLIMITED), 0


class LoopStalls:
    """Measures how long the event loop was blocked inside the `with` block: `longest` is the maximum in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._last = self._loop.time()
        self._timer = self._loop.call_later(STALL_CHECK_INTERVAL, self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._measure()

    def _check(self) -> None:
        self._measure()
        self._timer = self._loop.call_later(STALL_CHECK_INTERVAL, self._check)

    def _measure(self) -> None:
        now = self._loop.time()
        self.longest, self._last = max(self.longest, now - self._last), now
