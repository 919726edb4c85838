"""A member of a consumer group: it says once a second that it is there, and hears what it holds."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping, Sequence

from broker_io.position import EARLIEST, Position
from txnbuffer.checks import check_name
from txnbuffer.client.base import BaseClient
from txnbuffer.client.read_topics import ReadTopics
from txnbuffer.coordinator.messages import Share, TakePart
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
        self.shares: Mapping[str, Share] = {}
        self.generation = 0
        self.unsettled = True
        self.changed = asyncio.Event()
        self.failure: Exception | None = None
        self._name = f"{socket.gethostname()[:100]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._client = client
        self._topics = topics
        self._from_end = from_end
        self._part = TakePart(0, self.group, self._name)
        self._came = False
        self._looking: asyncio.Future[TakePart] | None = None
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
                await self._client.take_part(TakePart(0, self.group, self._name, leaves=True))
        except (Error, TimeoutError):
            return

    def holds(self, share: Share) -> bool:
        """Whether it is still held, as far as is known."""
        held = self.shares.get(share.partition)
        return held is not None and held.since == share.since

    def generation_of(self, share: Share) -> int:
        """The generation that commits for it name. Raises StaleGeneration."""
        if not self.holds(share):
            raise StaleGeneration(f"group {self.group!r} gave {share.partition!r} to another member")
        return self.generation

    def doubt(self, share: Share) -> None:
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
        shares = {share.partition: self._kept(share) for share in told.shares}
        news = shares.keys() != self.shares.keys() or any(not self.holds(share) for share in shares.values())
        self.shares, self.generation, self.unsettled = shares, told.generation, told.unsettled
        if news:
            self.changed.set()

    def _kept(self, share: Share) -> Share:
        return self.shares[share.partition] if self.holds(share) else share

    def _what_there_is(self) -> TakePart:
        """As it was found last: looking may take its time, this member is there meanwhile."""
        loop = asyncio.get_running_loop()
        if self._looking is None and loop.time() >= self._look_at:
            self._looking = loop.run_in_executor(None, self._look)
        if self._looking is not None and self._looking.done():
            found, self._looking, self._look_at = self._looking, None, loop.time() + LOOK
            self._part = found.result()
        return self._part

    def _look(self) -> TakePart:
        """What there is to be read now. In another thread."""
        broker = self._client.open_broker()
        parts = ReadTopics(broker, self._topics, "beginning").parts()
        ends: tuple[Position, ...] = ()
        if self._from_end:
            ends = tuple(broker.last_position(partition) or EARLIEST for partition, _ in parts)
        topics, partitions = tuple(topic for _, topic in parts), tuple(partition for partition, _ in parts)
        return TakePart(0, self.group, self._name, topics, partitions, ends)
