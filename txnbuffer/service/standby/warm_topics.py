"""The topics that a standby keeps warm: it follows the snapshot topic and the logs of its shard, and writes nothing.

It restores every topic that has a snapshot, within a limit of memory, and applies its log as it grows. Topics that are
registered, deleted or created again meanwhile are noticed in the snapshot topic; a topic whose log can't be followed is
restored again. A topic with a newer snapshot is restored from it from time to time, to drop the messages before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from broker_io.batch import PlacedBatch
from broker_io.environment import current
from broker_io.errors import Error
from broker_io.port import Broker
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.scan import Scan, SnapshotTable
from snapshots.shards import Shard
from txnbuffer.recovery.restore import restored_topics
from txnbuffer.recovery.warm_topic import WarmTopic
from txnbuffer.service.log_readers import LogReader, LogReaders

T = TypeVar("T")

STEP = 1.0
"""Seconds between two looks at the snapshot topic."""
AT_ONCE = 4
"""Topics that are restored at the same time."""
IN_A_STEP = 64
"""Topics that are restored between two looks at the snapshot topic."""
RENEW_AFTER = 30.0
"""Seconds after which a topic is restored from a newer snapshot."""
TAIL_BYTES = 256 * 1024
"""Bytes of messages after which it is restored earlier."""
AGAIN_AFTER = 10.0
"""Seconds until a topic that could not be restored or followed is tried again."""
RELEASE_SECONDS = 2.0
"""Seconds that a takeover waits for reads that have begun; then all topics are recovered cold."""


class StandbyLag(NamedTuple):
    """How far a standby follows.

    `topics`: those with a snapshot; `warm`: of these, the ones that it follows, `failing` of them with an error that is
    retried; `no_room`: those for which there is no memory; `bytes`: approximate memory; `restarted`: how often a topic
    could not be followed, and was restored again.
    """

    topics: int
    warm: int
    failing: int
    no_room: int
    bytes: int
    restarted: int


NO_LAG = StandbyLag(0, 0, 0, 0, 0, 0)


class Kept(NamedTuple):
    """A warm topic, its reader, and when it was restored."""

    warm: WarmTopic
    reader: LogReader
    since: float


class WarmTopics:
    """Call `run`, and `release` once, which ends it. `limit`: bytes of memory; 0 keeps no topic warm."""

    def __init__(self, broker: Broker, shard: Shard, limit: int) -> None:
        environment = current()
        self._broker = broker
        self._snapshots = shard.topic(SNAPSHOT_TOPIC)
        self._limit = limit
        self._clock = environment.clock
        self._pool = environment.threads.executor(AT_ONCE, "txnbuffer-warming")
        self._readers = LogReaders(asyncio.get_running_loop(), self._take)
        self._kept: dict[str, Kept] = {}
        self._try_at: dict[str, float] = {}
        self._scan: Scan | None = None
        self._topics = self._no_room = self._restarted = 0
        self._released = asyncio.Event()

    @property
    def lag(self) -> StandbyLag:
        failing = sum(kept.reader.problem is not None for kept in self._kept.values())
        return StandbyLag(self._topics, len(self._kept), failing, self._no_room, self._bytes(), self._restarted)

    async def run(self) -> None:
        """Follow until `release`."""
        try:
            while self._limit and not self._released.is_set():
                with contextlib.suppress(Error):  # the next look reads it again
                    await self._step(await self._call(self._look))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), STEP)
        finally:
            self._pool.shutdown(wait=False)
            if self._scan is not None:
                self._scan.close()

    async def release(self) -> dict[str, WarmTopic]:
        """Stop following; return the topics with their readers."""
        self._released.set()
        ending = asyncio.ensure_future(asyncio.to_thread(self._readers.end_reads))
        await asyncio.wait([ending], timeout=RELEASE_SECONDS)
        if not ending.done():
            ending.add_done_callback(lambda _: self._readers.stop())
            kept, self._kept = self._kept, {}
            for one in kept.values():
                one.warm.close()
            return {}
        self._readers.take()
        kept, self._kept = self._kept, {}
        for topic, one in [*kept.items()]:
            one.warm.followed.return_reader(one.reader.take_reader())
            if one.reader.at != one.warm.followed.at:  # something was read that was not taken
                kept.pop(topic).warm.close()
        return {topic: one.warm for topic, one in kept.items()}

    # Following

    def _look(self) -> SnapshotTable:
        """Read the snapshot topic up to its end; after an error another scan begins."""
        try:
            if self._scan is None:
                self._scan = Scan(self._broker, self._snapshots)
            self._scan.read_to_end()
        except Error:
            if self._scan is not None:
                self._scan.close()
                self._scan = None
            raise
        return self._scan.table

    async def _step(self, table: SnapshotTable) -> None:
        """Keep those topics warm that have a snapshot now."""
        now = self._clock.monotonic()
        topics = restored_topics(table)
        self._topics = len(topics)
        for gone in self._kept.keys() - {*topics}:
            self._drop(gone)
        due = [topic for topic in topics if now >= self._try_at.get(topic, 0.0) and self._is_due(table, topic, now)]
        await asyncio.gather(*(self._restore(table, topic) for topic in due[:IN_A_STEP]))
        self._make_room()
        self._no_room = len(topics) - len(self._kept) if self._bytes() >= self._limit else 0

    def _is_due(self, table: SnapshotTable, topic: str, now: float) -> bool:
        """Whether a topic is to be restored, at first or from a newer snapshot."""
        kept = self._kept.get(topic)
        if kept is None:
            return self._bytes() < self._limit
        old = kept.warm.tail.bytes > TAIL_BYTES or now > kept.since + RENEW_AFTER
        return old and not kept.warm.is_of(table.topics[topic])

    async def _restore(self, table: SnapshotTable, topic: str) -> None:
        kept, now = self._kept.get(topic), self._clock.monotonic()
        if self._released.is_set():
            return
        try:
            if kept is None:
                loaded = await self._call(WarmTopic.load, self._broker, table, topic, self._snapshots, self._clock)
                self._follow(loaded)
                return
            await self._renew(table, topic, kept)
        except Error:
            self._try_at[topic] = now + AGAIN_AFTER
            self._drop(topic)

    async def _renew(self, table: SnapshotTable, topic: str, kept: Kept) -> None:
        """Restore a topic from its newer snapshot while its reader is paused."""
        kept.reader.paused += 1
        try:
            newer = await self._call(kept.warm.renewed, table, self._snapshots, self._clock)
        finally:
            kept.reader.paused -= 1
            self._readers.wake()
        is_kept = self._kept.get(topic) is kept
        if is_kept and newer is not None and newer.followed.at == kept.warm.followed.at:
            kept.warm.close()
            self._kept[topic] = Kept(newer, kept.reader, self._clock.monotonic())
            return
        if newer is not None:
            newer.close()
        if is_kept:
            self._drop(topic)

    def _follow(self, warm: WarmTopic) -> None:
        if self._released.is_set():
            warm.close()
            return

        def take(placed: PlacedBatch) -> None:
            self._taken(reader, placed)

        topic, followed = warm.topic, warm.followed
        fail = partial(self._failed, topic)
        reader = LogReader(self._broker, topic, followed.at, take, fail, warm.incarnation, followed.take_reader())
        self._kept[topic] = Kept(warm, reader, self._clock.monotonic())
        self._readers.follow(reader)

    def _taken(self, reader: LogReader, placed: PlacedBatch) -> None:
        topic = reader.name
        kept = self._kept.get(topic)
        if kept is None or kept.reader is not reader:
            return  # it was dropped since this was read
        try:
            kept.warm.apply(placed)
        except Error as error:
            self._failed(topic, error)
            return
        if kept.warm.bytes > self._limit // 2:
            self._drop(topic)

    def _failed(self, topic: str, error: BaseException) -> None:
        """Restore a topic again that can't be followed: it was deleted or trimmed, or is damaged."""
        if not isinstance(error, Error):
            raise error
        self._restarted += 1
        self._try_at[topic] = self._clock.monotonic() + AGAIN_AFTER
        self._drop(topic)

    def _drop(self, topic: str) -> None:
        kept = self._kept.pop(topic, None)
        if kept is not None:
            self._readers.leave(kept.reader)
            kept.warm.close()

    def _make_room(self) -> None:
        """Drop the largest topics while there are too many bytes."""
        missing = self._bytes() - self._limit
        for topic in sorted(self._kept, key=lambda topic: -self._kept[topic].warm.bytes) if missing > 0 else ():
            missing -= self._kept[topic].warm.bytes
            self._try_at[topic] = self._clock.monotonic() + RENEW_AFTER
            self._drop(topic)
            if missing <= 0:
                return

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def _bytes(self) -> int:
        return sum(kept.warm.bytes for kept in self._kept.values())

    def _take(self) -> None:
        self._readers.take()
