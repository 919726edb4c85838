"""A member of a consumer group: it says once a second that it is there, and hears what it holds.

How much of a partition one transaction takes, where its handler takes its time.

A transaction is aborted once its time is up, and a member is given up while its event loop stands still. What was
handled meanwhile is done again: fewer records at a time, with a commit after half of the time that was too long. A
record that takes too long alone is handled some times more and then has failed, as one that the handler raises for.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from broker_io.position import EARLIEST, Position
from txnbuffer.checks import check_name
from txnbuffer.client.base import BaseClient
from txnbuffer.client.routing import ReadTopics
from txnbuffer.coordinator.messages import GroupHeartbeat, PartitionAssignment
from txnbuffer.errors import Error, StaleGeneration

BEAT = 1.0
"""Seconds between two words to the coordinator."""
LOOK = 10.0
"""Seconds between two looks whether topics have more partitions."""
LEAVING = 5.0
"""Seconds that the coordinator has to hear that this member goes."""


class Membership:
    """`shares`: what is held, by partition; `changed`: set when that, or `failure`, is news.

    `from_end`: the group begins at the end of topics that it never was on.
    """

    def __init__(self, client: BaseClient, group: str, topics: Sequence[str], *, from_end: bool) -> None:
        self.group = check_name(group, "a group")
        self.shares: Mapping[str, PartitionAssignment] = {}
        self.generation = 0
        self.unsettled = True
        self.changed = asyncio.Event()
        self.failure: Exception | None = None
        self._name = f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._client = client
        self._topics = topics
        self._from_end = from_end
        self._part = GroupHeartbeat(0, self.group, self._name)
        self._came = False
        self._looking: asyncio.Future[GroupHeartbeat] | None = None
        self._look_at = 0.0
        self._hurry = asyncio.Event()
        self._beats: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Become a member. Raises TopicNotFound, or why the service refuses."""
        loop = asyncio.get_running_loop()
        self._part = await loop.run_in_executor(None, self._look)
        self._look_at = loop.time() + LOOK
        self._came = True
        await self._say()
        self._beats = asyncio.create_task(self._go_on())

    async def leave(self) -> None:
        """Give back what is held, at once; without an answer the coordinator finds out by itself."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
        if not self._came:
            return
        try:
            async with asyncio.timeout(LEAVING):
                await self._client.take_part(GroupHeartbeat(0, self.group, self._name, leaves=True))
        except (Error, TimeoutError):
            return

    def holds(self, share: PartitionAssignment) -> bool:
        """Whether it is still held, as far as is known."""
        held = self.shares.get(share.partition)
        return held is not None and held.since == share.since

    def generation_of(self, share: PartitionAssignment) -> int:
        """The generation that commits for it name. Raises StaleGeneration."""
        if not self.holds(share):
            raise StaleGeneration(f"group {self.group!r} gave {share.partition!r} to another member")
        return self.generation

    def doubt(self, share: PartitionAssignment) -> None:
        """A commit was refused: ask now, and take what is held from where the group is."""
        if self.holds(share):
            self.shares = {name: held for name, held in self.shares.items() if name != share.partition}
        self.unsettled = True
        self._hurry.set()

    async def _go_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            try:
                await self._say()
            except Exception as error:
                if not isinstance(error, Error) or not error.retryable:
                    self.failure = error
                    self.changed.set()
                    return

    async def _say(self) -> None:
        told = await self._client.take_part(self._what_there_is())
        # Where a partition is held since the same generation as before, nobody else has moved the group there.
        shares = {share.partition: self._kept(share) for share in told.assignments}
        news = shares.keys() != self.shares.keys() or any(not self.holds(share) for share in shares.values())
        self.shares, self.generation, self.unsettled = shares, told.generation, told.unsettled
        if news:
            self.changed.set()

    def _kept(self, share: PartitionAssignment) -> PartitionAssignment:
        return self.shares[share.partition] if self.holds(share) else share

    def _what_there_is(self) -> GroupHeartbeat:
        """As it was found last: looking may take its time, this member is there meanwhile."""
        loop = asyncio.get_running_loop()
        if self._looking is None and loop.time() >= self._look_at:
            self._looking = loop.run_in_executor(None, self._look)
        if self._looking is not None and self._looking.done():
            found, self._looking, self._look_at = self._looking, None, loop.time() + LOOK
            self._part = found.result()
        return self._part

    def _look(self) -> GroupHeartbeat:
        """What there is to be read now. In another thread."""
        broker = self._client.open_broker()
        parts = ReadTopics(broker, self._topics, "beginning").parts()
        ends: tuple[Position, ...] = ()
        if self._from_end:
            ends = tuple(broker.last_position(partition) or EARLIEST for partition, _ in parts)
        topics, partitions = tuple(topic for _, topic in parts), tuple(partition for partition, _ in parts)
        return GroupHeartbeat(0, self.group, self._name, topics, partitions, ends)


LONGEST = 5.0
"""Seconds of handling records after which what is done commits: below the time after which a member counts as dead."""
MANY = 1 << 30
"""More records than any batch has."""
WELL = 16
"""Transactions one after the other that go well before twice as many records are tried."""
LEAST_CALLS = 3
"""How often a record is handled that takes too long: what stopped the process for a while comes once."""
BLOCKED = 4.0
"""Seconds for which an event loop stands still if its member may be given up for that."""
TURN = 0.5


class AdaptiveBatch:
    """Of one partition, whoever follows it: `seconds` after which what is done commits, `records` of a transaction."""

    def __init__(self) -> None:
        self.seconds = LONGEST
        self.records = MANY
        self._at: Position | None = None
        self._calls = 0
        self._well = 0

    def calls(self, position: Position) -> int:
        """How often a record alone has taken too long."""
        return self._calls if position == self._at else 0

    def too_long(self, position: Position, count: int, seconds: float, last: float) -> None:
        """So many records from a position on were handled in vain, as that took so long; `last`: the last of them."""
        self.seconds, self._well = min(self.seconds, seconds / 2), 0
        if count > 1:
            self.records = count - 1 if 2 * last >= seconds else (count + 1) // 2
        else:
            self._calls, self._at = self.calls(position) + 1, position

    def well(self) -> None:
        """A transaction has committed."""
        self._well += 1
        if self._well >= WELL:
            self.records, self._well = min(2 * self.records, MANY), 0


class LoopStalls:
    """`longest`: seconds for which the event loop stood still at most, while in the block."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._last = self._loop.time()
        self._timer = self._loop.call_later(TURN, self._turned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._look()

    def _turned(self) -> None:
        self._look()
        self._timer = self._loop.call_later(TURN, self._turned)

    def _look(self) -> None:
        now = self._loop.time()
        self.longest, self._last = max(self.longest, now - self._last), now
