"""Exactly-once processing by consumer groups

The records that a handler sends and the group's new position commit in one transaction. Each partition is assigned to
one member of the group at a time, and has its own reader. A member that has lost a partition can no longer commit
there, and no two members can commit the same records.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.errors import InvalidTopicName, PositionTrimmed
from broker_io.partitions import whole_name
from snapshots.format import is_internal
from txnbuffer.buffer.held_back import HeldBack
from txnbuffer.checks import check_callable, check_flag
from txnbuffer.client.base import BaseClient
from txnbuffer.client.groups.handling import (
    LOG,
    PAUSE,
    DeadLetter,
    HandlerRunner,
    HandlerTask,
    NoMoreTaken,
    OnError,
    Processed,
)
from txnbuffer.client.groups.membership import AdaptiveBatch, Membership
from txnbuffer.client.lifecycle import cancel
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.starts import Seqno, Start, canonical
from txnbuffer.client.topic_names import check_source, check_topic, check_topics
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
    wait: bool = False


async def process(client: BaseClient, source: GroupSource, task: HandlerTask) -> Processed:
    """Join the group and handle its records until the idle timeout, `task.stop` or a cancellation.

    Raises the handler's error.
    """
    source = source._replace(start=canonical(source.start))
    topics = _check(source, task)
    member = Membership(client, source.group, topics, from_end=source.start == "end", wait=source.wait)
    work = _Process(client, source, topics, task, member)
    try:
        await member.join()
        await work.run()
    finally:
        try:
            await work.stop()
        finally:  # a member whose heartbeats go on would hold its partitions
            await member.leave()
    return task.done


def _check(source: GroupSource, task: HandlerTask) -> Sequence[str]:
    """Check the arguments; return the topics. Raises InvalidRequest, InvalidTopicName."""
    if type(task.retries) is not int or task.retries < 0:
        raise InvalidRequest(f"retries must be an integer of at least 0, got {task.retries!r}")
    if type(source.batch) is not int or source.batch < 1:
        raise InvalidRequest(f"batch must be at least 1 record, got {source.batch!r}")
    idle = source.idle_timeout
    if idle is not None and (type(idle) not in (int, float) or not 0 < idle <= math.inf):
        raise InvalidRequest(f"idle_timeout must be a number of seconds above 0, or None, got {idle!r}")
    check_flag(source.wait, "wait")
    topics = check_topics(source.topics)
    for name in topics:
        check_source(name)
    _check_on_error(task.on_error, topics)
    check_callable(next((one for one in (task.work, task.batch_handler) if one is not None), task.handler))
    return topics


def _check_on_error(on_error: OnError, topics: Sequence[str]) -> None:
    if isinstance(on_error, DeadLetter):
        target = check_topic(on_error.topic)
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
    return end._replace(batch=end.batch + 1) if end.batch >= 0 else Position(end.ledger, end.entry + 1)


@dataclass(eq=False)
class _Process:
    """One call of `process`; a task reads and handles each assigned partition."""

    client: BaseClient
    source: GroupSource
    topics: Sequence[str]
    task: HandlerTask
    member: Membership
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    followed: dict[str, PartitionAssignment] = field(default_factory=dict)
    batch_sizes: dict[str, AdaptiveBatch] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    handling: set[str] = field(default_factory=set)
    readers: dict[str, AsyncReader] = field(default_factory=dict)
    busy: int = 0
    idle_since: float = math.inf

    async def run(self) -> None:
        """Run until the idle timeout or the stop. Raises the error of the first task that fails."""
        self.idle_since = asyncio.get_running_loop().time()  # joining may have taken long
        changed, stopped = (asyncio.ensure_future(one.wait()) for one in (self.member.changed, self.task.stop))
        try:
            self._start_missing()
            while (left := self._left()) > 0 and not stopped.done():
                waited = [changed, stopped, *self.tasks.values()]
                await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if changed.done():
                    self.member.changed.clear()
                    changed = asyncio.ensure_future(self.member.changed.wait())
                if self.member.failure is not None:
                    raise self.member.failure
                for name, task in [*self.tasks.items()]:
                    if task.done():
                        del self.tasks[name]
                        task.result()
                self._start_missing()
            if stopped.done():
                await self._finish()
            else:
                await self._say_what_is_held_back()
        finally:
            changed.cancel()
            stopped.cancel()

    async def _finish(self) -> None:
        """After the stop, wait until the handler has ended and what it has handled is committed."""
        for name, task in self.tasks.items():
            if name not in self.handling:
                task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks.values())
        for task in self.tasks.values():
            if not task.cancelled():
                task.result()

    async def _say_what_is_held_back(self) -> None:
        """Record and log what the assigned partitions have, but no transaction of the group could get yet."""
        found: list[HeldBack] = []
        for reader in [*self.readers.values()]:
            with suppress(InvalidRequest):  # closed meanwhile: its partition was reassigned
                found += await reader.held_back()
        self.task.done.held_back = tuple(found)
        for one in found:
            LOG.warning("group %r: %s", self.source.group, one)

    async def stop(self) -> None:
        await cancel(*self.tasks.values())

    def _left(self) -> float:
        """Return the seconds until the idle timeout, at most WAIT. Work and pending assignments restart the timeout."""
        if self.source.idle_timeout is None:
            return WAIT
        now = asyncio.get_running_loop().time()
        pending = any(self.followed.get(name) is not one for name, one in self.member.assignments.items())
        if pending or self.starting or self.busy or self.member.unsettled:
            self.idle_since = now
        return min(WAIT, self.idle_since + self.source.idle_timeout - now)

    def _start_missing(self) -> None:
        for name, assignment in self.member.assignments.items():
            if name not in self.tasks:
                self.followed[name] = assignment
                self.starting.add(name)  # not idle until its task runs, which may take a while
                self.tasks[name] = asyncio.create_task(self._follow(assignment))

    async def _follow(self, assignment: PartitionAssignment) -> None:
        """Handle a partition until it is assigned to another member."""
        batch_size = self.batch_sizes.setdefault(assignment.partition, AdaptiveBatch())
        runner = HandlerRunner(self.client, self.member, assignment, self.task, batch_size)
        try:
            with self._working():
                self.starting.discard(assignment.partition)
                reader = await self.client.reader(assignment.partition, start=self._start(assignment))
            self.readers[assignment.partition] = reader
            try:
                wait = 0.0
                while self.member.holds(assignment) and not self.task.stop.is_set():
                    with self._working() if wait == 0.0 else nullcontext():
                        records = await reader.read(limit=self.source.batch, timeout=wait)
                    if records is not None:
                        with self._working():
                            self.handling.add(assignment.partition)
                            await runner.handle(records)
                            self.handling.discard(assignment.partition)
                    # Reading records that already exist never counts as idle.
                    wait = 0.0 if records is not None else min(WAIT, self.source.idle_timeout or WAIT)
            finally:
                del self.readers[assignment.partition]
                with self._working():  # the idle timeout must not hide an error
                    await reader.close()
        except PositionTrimmed as error:
            if assignment.end == EARLIEST:
                raise
            group, topic = self.source.group, assignment.partition
            raise PositionTrimmed(
                f"group {group!r} has reached {assignment.end} of {topic!r}, which was trimmed: {error}. If the topic "
                f"was re-created, or the lost records do not matter, call forget_group({group!r}, {topic!r}) or run "
                f"`txnbuf groups forget {group} --topic {topic}` to restart the group there"
            ) from error
        except NoMoreTaken:
            return
        except (StaleGeneration, PositionConflict):
            self.member.rejected(assignment)
            await asyncio.sleep(PAUSE)

    def _start(self, assignment: PartitionAssignment) -> Start:
        """Return the position at which to start reading."""
        start = self.source.start
        if assignment.end != EARLIEST:
            return position_after(assignment.end)
        if isinstance(start, (Position, Seqno)) and assignment.partition not in self.topics:
            raise InvalidRequest(f"start {start} is in one partition: use the partition's name as the topic")
        return "beginning" if start == "end" else start  # the group started at the end of an empty topic

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count as busy inside the block."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.idle_since = asyncio.get_running_loop().time()
