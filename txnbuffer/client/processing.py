"""Exactly-once processing by consumer groups

The records that a handler sends and the group's new position commit in one transaction. Each partition is assigned to
one member of the group at a time, and has its own reader. A member that has lost a partition can no longer commit
there, and no two members can commit the same records.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import NamedTuple

from broker_io.errors import InvalidTopicName, PositionTrimmed
from broker_io.partitions import whole_name
from broker_io.port import check_topic_name
from snapshots.format import is_internal
from txnbuffer.checks import check_callable, check_topics
from txnbuffer.client.handling import PAUSE, DeadLetter, HandlerRunner, HandlerTask, OnError, Processed
from txnbuffer.client.membership import AdaptiveBatch, Membership
from txnbuffer.client.reader import Start
from txnbuffer.client.transaction import BaseClient
from txnbuffer.coordinator.messages import PartitionAssignment
from txnbuffer.errors import InvalidRequest, PositionConflict, StaleGeneration
from txnbuffer.model import EARLIEST, Position

WAIT = 1.0
"""Maximum seconds of one wait for records."""


class GroupSource(NamedTuple):
    """What to read: the arguments of `Client.process` other than those of the handler."""

    topics: str | Sequence[str]
    group: str
    start: Start = "beginning"
    batch: int = 100
    idle_timeout: float | None = None


async def process(client: BaseClient, source: GroupSource, task: HandlerTask) -> Processed:
    """Join the group and handle its records until the idle timeout or a cancellation. Raises the handler's error."""
    topics = _check(source, task)
    member = Membership(client, source.group, topics, from_end=source.start == "end")
    work = _Process(client, source, topics, task, member)
    try:
        await member.join()
        await work.run()
    finally:
        await work.stop()
        await member.leave()
    return work.done


def _check(source: GroupSource, task: HandlerTask) -> Sequence[str]:
    """Check the arguments; return the topics. Raises InvalidRequest, InvalidTopicName."""
    if type(task.retries) is not int or task.retries < 0:
        raise InvalidRequest(f"retries must be an integer of at least 0, got {task.retries!r}")
    if type(source.batch) is not int or source.batch < 1:
        raise InvalidRequest(f"batch must be at least 1 record, got {source.batch!r}")
    idle = source.idle_timeout
    if idle is not None and (type(idle) not in (int, float) or not 0 < idle <= math.inf):
        raise InvalidRequest(f"idle_timeout must be a number of seconds above 0, or None, got {idle!r}")
    if not isinstance(source.start, (str, datetime, Position)):
        raise InvalidRequest(f"start must be 'beginning', 'end', a datetime or a position, got {source.start!r}")
    topics = _names(source.topics)
    _check_on_error(task.on_error, topics)
    check_callable(task.handler if task.batch_handler is None else task.batch_handler)
    return topics


def _names(topics: str | Sequence[str]) -> Sequence[str]:
    names = check_topics(topics)
    for name in names:
        if is_internal(check_topic_name(name)):
            raise InvalidTopicName(f"{name!r} is an internal topic: a group can only read topics of records")
    return names


def _check_on_error(on_error: OnError, topics: Sequence[str]) -> None:
    if isinstance(on_error, DeadLetter):
        target = check_topic_name(on_error.topic)
        if is_internal(target):
            raise InvalidTopicName(f"dead letters cannot go to {target!r}, which is an internal topic")
        if whole_name(target) in {whole_name(topic) for topic in topics}:
            raise InvalidRequest(
                f"dead letters cannot go to {target!r}, which the group reads: they would be handled again"
            )
    elif on_error not in ("stop", "skip"):
        raise InvalidRequest(f"on_error must be 'stop', 'skip' or dead_letter(topic), got {on_error!r}")


def position_after(end: Position) -> Position:
    """Return the first position that can follow `end`."""
    if end.batch >= 0:
        return end._replace(batch=end.batch + 1)
    return Position(end.ledger, end.entry + 1)


class _Process:
    """One call of `process`; a task reads and handles each assigned partition."""

    def __init__(
        self, client: BaseClient, source: GroupSource, topics: Sequence[str], task: HandlerTask, member: Membership
    ) -> None:
        self.done = Processed()
        self._client = client
        self._source = source
        self._topics = topics
        self._task = task
        self._member = member
        self._handler_lock = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[str, PartitionAssignment] = {}
        self._batch_sizes: dict[str, AdaptiveBatch] = {}
        self._starting: set[str] = set()
        self._busy = 0
        self._idle_since = math.inf

    async def run(self) -> None:
        """Run until the idle timeout. Raises the error of the first task that fails."""
        self._idle_since = asyncio.get_running_loop().time()  # joining may have taken long
        changed = asyncio.ensure_future(self._member.changed.wait())
        try:
            self._start_missing()
            while (left := self._left()) > 0:
                await asyncio.wait([changed, *self._tasks.values()], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if changed.done():
                    self._member.changed.clear()
                    changed = asyncio.ensure_future(self._member.changed.wait())
                if self._member.failure is not None:
                    raise self._member.failure
                for name, task in [*self._tasks.items()]:
                    if task.done():
                        del self._tasks[name]
                        task.result()
                self._start_missing()
        finally:
            changed.cancel()

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _left(self) -> float:
        """Return the seconds until the idle timeout, at most WAIT. Work and pending assignments restart the timeout."""
        if self._source.idle_timeout is None:
            return WAIT
        now = asyncio.get_running_loop().time()
        assigned = self._member.assignments.items()
        pending = any(self._followed.get(name) is not assignment for name, assignment in assigned)
        if pending or self._starting or self._busy or self._member.unsettled:
            self._idle_since = now
        return min(WAIT, self._idle_since + self._source.idle_timeout - now)

    def _start_missing(self) -> None:
        for name, assignment in self._member.assignments.items():
            if name not in self._tasks:
                self._followed[name] = assignment
                self._starting.add(name)  # not idle until its task runs, which may take a while
                self._tasks[name] = asyncio.create_task(self._follow(assignment))

    async def _follow(self, assignment: PartitionAssignment) -> None:
        """Handle a partition until it is assigned to another member."""
        batch_size = self._batch_sizes.setdefault(assignment.partition, AdaptiveBatch())
        shared = self._task, self.done, self._handler_lock, batch_size
        handling = HandlerRunner(self._client, self._member, assignment, *shared)
        try:
            with self._working():
                self._starting.discard(assignment.partition)
                reader = await self._client.reader(assignment.partition, start=self._start(assignment))
            try:
                wait = 0.0
                while self._member.holds(assignment):
                    with self._working() if wait == 0.0 else nullcontext():
                        records = await reader.read(limit=self._source.batch, timeout=wait)
                    if records is not None:
                        with self._working():
                            await handling.handle(records)
                    # Reading records that already exist never counts as idle.
                    wait = 0.0 if records is not None else min(WAIT, self._source.idle_timeout or WAIT)
            finally:
                with self._working():  # the idle timeout must not hide an error
                    await reader.close()
        except PositionTrimmed as error:
            if assignment.end == EARLIEST:
                raise
            group, topic = self._source.group, assignment.partition
            raise PositionTrimmed(
                f"group {group!r} has reached {assignment.end} of {topic!r}, which was trimmed: {error}. If the topic "
                f"was re-created, or the lost records do not matter, call forget_group({group!r}, {topic!r}) or run "
                f"`txnbuf groups {group} --forget --topic {topic}` to restart the group there"
            ) from error
        except (StaleGeneration, PositionConflict):
            self._member.rejected(assignment)
            await asyncio.sleep(PAUSE)

    def _start(self, assignment: PartitionAssignment) -> Start:
        """Return the position at which to start reading."""
        start = self._source.start
        if assignment.end != EARLIEST:
            return position_after(assignment.end)
        if isinstance(start, Position) and assignment.partition not in self._topics:
            raise InvalidRequest(f"start {start} is a position in one partition: use the partition's name as the topic")
        return "beginning" if start == "end" else start  # the group started at the end of an empty topic

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count as busy inside the block."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._idle_since = asyncio.get_running_loop().time()
