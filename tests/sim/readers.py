"""Applications of a simulated world that read: committed readers from any position, followers of change streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.apps import PAUSE, App, Setting
from sim.history import DELETION, Following, Shown
from sim.world import Host

from txnbuffer.client.client import Client
from txnbuffer.client.partition_streams import PartitionedStream, stream_partitions
from txnbuffer.client.streams.streams import ChangeBatch, ChangeStream, Rollback
from txnbuffer.client.streams.tokens import FileTokens
from txnbuffer.errors import StreamTrimmed, TopicNotFound, UnknownCursor
from txnbuffer.model import Position
from txnbuffer.streams.failover import ResumeToken


def content(value: bytes | None, properties: Mapping[str, str]) -> bytes:
    """The value of a record, or what stands for it in a deletion."""
    return properties.get(DELETION, "").encode() if value is None else value


def shown(batch: Any) -> list[Shown]:
    """The records of a batch as the history has them."""
    return [Shown(one.seqno, one.key, content(one.value, one.properties), one.position) for one in batch]


def changes_of(batch: ChangeBatch) -> list[Shown]:
    """The mutations of a batch as the history has them."""
    return [Shown(change.seqno, change.key, content(change.value, change.properties)) for change in batch]


class TopicApp(App):
    """An application that works on each topic by itself, from the time on at which the topic exists."""

    @property
    def topics(self) -> tuple[str, ...]:
        """What it works on."""
        return self.setting.topics

    async def work(self, client: Client) -> None:
        tasks = [asyncio.ensure_future(self._follow(client, topic)) for topic in self.topics]
        try:
            await asyncio.gather(*tasks)
        finally:  # the others must not go on with a client that is closed
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, client: Client, topic: str) -> None:
        while True:
            try:
                await self.take(client, topic)
            except TopicNotFound:
                await asyncio.sleep(PAUSE)

    async def take(self, client: Client, topic: str) -> None:
        raise NotImplementedError


class Reader(TopicApp):
    """Reads all topics from their beginnings; after an error, and sometimes without one, it starts again."""

    async def take(self, client: Client, topic: str) -> None:
        readings = self._readings(topic)  # before it opens: what it learns then may be lost before it shows anything
        async with await client.reader(topic) as reader:
            again = self.choose.random() < 0.02
            while not again:
                batch = await reader.read(timeout=2.0)
                if batch is None:
                    continue
                reading = readings[batch.topic]
                self.history.read(reading, shown(batch))
                if self.choose.random() < 0.1:
                    self.history.decided(reading, (await reader.lag())[batch.topic].decided_position)
                again = self.choose.random() < 0.02


@dataclass(slots=True, eq=False)
class Slice:
    """What a reader showed of a topic from a start on: everything that was sent after `opened` is after the start.

    `first`: the position at which it was told to start; None: at the end of that time.
    """

    reader: str
    topic: str
    opened: float
    first: Position | None
    records: list[Shown] = field(default_factory=list)


class LateReader(App):
    """Reads all topics with one reader, from their ends or from positions in their middle, again and again."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random) -> None:
        super().__init__(name, host, setting, choose)
        self.slices: list[Slice] = []
        self._positions: dict[str, list[Position]] = {}

    async def work(self, client: Client) -> None:
        while True:
            await asyncio.sleep(self.choose.uniform(0.0, 3.0))
            try:
                await self._read(client)
            except TopicNotFound:
                await asyncio.sleep(PAUSE)

    async def _read(self, client: Client) -> None:
        topics = [*self.setting.logs]
        starts = {topic: self._start(topic) for topic in topics}
        start = {topic: position or "end" for topic, position in starts.items()}
        async with await client.reader(topics, start=start) as reader:
            opened = self.host.world.now
            slices = {topic: Slice(self.name, topic, opened, position) for topic, position in starts.items()}
            self.slices += slices.values()
            while self.choose.random() > 0.05:
                batch = await reader.read(timeout=2.0)
                for record in shown(batch or ()):
                    topic = batch.topic
                    self.history.shown(self.name, topic, [record])
                    slices[topic].records.append(record)
                    self._positions.setdefault(topic, []).append(record.position or Position(0, 0))

    def _start(self, topic: str) -> Position | None:
        known = self._positions.get(topic)
        return None if not known or self.choose.random() < 0.5 else self.choose.choice(known)


class Follower(TopicApp):
    """Follows the change streams of all topics; it keeps some of its resume tokens for others, in `tokens`."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random) -> None:
        super().__init__(name, host, setting, choose)
        self.followings: dict[str, Following] = {}
        self.tokens: dict[str, list[ResumeToken]] = {}

    def following(self, topic: str) -> Following:
        """What it was shown of a topic so far, by all its processes."""
        if topic not in self.followings:
            self.followings[topic] = Following(self.name, topic)
            self.history.followings.append(self.followings[topic])
        return self.followings[topic]

    async def take(self, client: Client, topic: str) -> None:
        try:
            await self._take(client, topic)
        except StreamTrimmed:
            if not self.setting.trims:
                raise
            self.host.world.count("trimmed stream")
            for log in self.history.partitions.logs(topic):
                del self.followings[log]
                self.tokens[log].clear()

    async def _take(self, client: Client, topic: str) -> None:
        logs = self.history.partitions.logs(topic)
        followings = {log: self.following(log) for log in logs}
        async with self._stream(client, topic, {log: self.tokens.setdefault(log, []) for log in logs}) as stream:
            while True:
                try:
                    item = await stream.next(2.0)
                except TimeoutError:
                    continue
                if item is not None:
                    following, tokens = followings[item.topic], self.tokens[item.topic]
                if isinstance(item, Rollback):
                    following.rolled_back(item.seqno)
                    tokens[:] = [token for token in tokens if token.seqno <= item.seqno]
                elif item is not None:
                    self.apply(following, item)
                    tokens.append(item.token)

    @staticmethod
    def _stream(client: Client, topic: str, tokens: dict[str, list[ResumeToken]]) -> ChangeStream | PartitionedStream:
        """A stream of a topic, or one of all its partitions, that continues at the newest tokens."""
        newest = {log: of[-1] for log, of in tokens.items() if of}
        if topic in tokens:
            return client.stream(topic, from_=newest.get(topic, "beginning"))
        return stream_partitions(client, topic, from_=newest or "beginning")

    def apply(self, following: Following, item: ChangeBatch) -> None:
        """Note a batch."""
        changes = changes_of(item)
        self.history.shown(self.name, following.topic, changes)
        if not following.seqno:
            following.began = self.host.world.now
        following.changes |= {change.seqno: change for change in changes if change.seqno is not None}
        following.seqno, following.complete = item.token.seqno, item.complete
        following.note_state()


class AwayFollower(Follower):
    """Follows for a short time, closes its streams, stays away, and continues at its newest tokens."""

    async def take(self, client: Client, topic: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.choose.uniform(0.2, 3.0)):
                await super().take(client, topic)
        await asyncio.sleep(self.choose.uniform(0.0, 8.0))


class CursorFollower(Follower):
    """Follows with a durable cursor and a file of tokens: it continues after what it has acknowledged, never before."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random) -> None:
        super().__init__(name, host, setting, choose)
        self.acknowledged: dict[str, int] = {}

    @property
    def topics(self) -> tuple[str, ...]:
        return self.setting.logs

    async def take(self, client: Client, topic: str) -> None:
        try:
            await self._advance(client, topic)
        except (StreamTrimmed, UnknownCursor) as error:
            self.host.world.fail(f"{self.name} has a durable cursor on {topic}, and got {error!r}")

    async def _advance(self, client: Client, topic: str) -> None:
        following, store = self.following(topic), FileTokens(f"/{self.name}.json")
        async with client.stream(topic, cursor=f"{self.name}-cursor", store=store) as stream:
            opened = again = False
            while not again:
                try:
                    item = await stream.next(2.0)
                except TimeoutError:
                    item = None
                if opened:  # the token of the batch before is stored
                    self.acknowledged[topic] = following.seqno
                if isinstance(item, Rollback):
                    following.rolled_back(item.seqno)
                    self.acknowledged[topic] = min(self.acknowledged.get(topic, 0), item.seqno)
                elif item is not None:
                    self._check(topic, item)
                    self.apply(following, item)
                    opened = True
                if self.choose.random() < 0.1:
                    await asyncio.sleep(self.choose.uniform(0.0, 3.0))
                if again := self.choose.random() < 0.05:
                    await stream.done()
                    if opened:  # else what an earlier process was shown last may not be acknowledged
                        self.acknowledged[topic] = following.seqno

    def _check(self, topic: str, item: ChangeBatch) -> None:
        acknowledged = self.acknowledged.get(topic, 0)
        if item.token.seqno < acknowledged or any(change.seqno <= acknowledged for change in item):
            numbers = [change.seqno for change in item]
            text = f"{self.name} was shown {numbers} of {topic} up to {item.token.seqno}"
            self.host.world.fail(f"{text} after it had acknowledged everything up to {acknowledged}")


@dataclass(slots=True, eq=False)
class Stretch:
    """What a change stream showed of a topic after `start`, up to `seqno`; `to`: the end that was asked for."""

    follower: str
    topic: str
    start: int
    to: int | None
    seqno: int
    complete: bool = False
    ended: bool = False
    changes: dict[int, Shown] = field(default_factory=dict)


class Joiner(App):
    """Follows streams for a short time, from the tokens of another follower or from now on, some up to an end."""

    def __init__(self, name: str, host: Host, setting: Setting, choose: random.Random, source: Follower) -> None:
        super().__init__(name, host, setting, choose)
        self.stretches: list[Stretch] = []
        self._source = source

    async def work(self, client: Client) -> None:
        while True:
            await asyncio.sleep(self.choose.uniform(0.0, 2.0))
            topic = self.choose.choice(self.setting.logs)
            try:
                await self._join(client, topic)
            except TopicNotFound:
                await asyncio.sleep(PAUSE)

    async def _join(self, client: Client, topic: str) -> None:
        tokens = self._source.tokens.get(topic)
        token = self.choose.choice(tokens) if tokens and self.choose.random() < 0.8 else None
        to = None if token is None or self.choose.random() < 0.5 else token.seqno + self.choose.randint(1, 20)
        until = asyncio.get_running_loop().time() + self.choose.uniform(0.5, 6.0)
        async with client.stream(topic, from_=token or "now", to=to) as stream:
            stretch: Stretch | None = None
            while asyncio.get_running_loop().time() < until:
                try:
                    item = await stream.next(1.0)
                except TimeoutError:
                    continue
                if isinstance(item, Rollback):
                    return  # the source has to go back too
                if item is None:
                    if stretch is not None:
                        stretch.ended = True
                    return
                if stretch is None:
                    start = item.token.seqno if token is None else token.seqno
                    stretch = Stretch(self.name, topic, start, to, start)
                    self.stretches.append(stretch)
                    if token is None and len(item):
                        continue  # its start is not known exactly
                self._apply(stretch, item)

    def _apply(self, stretch: Stretch, item: ChangeBatch) -> None:
        changes = changes_of(item)
        self.history.shown(self.name, stretch.topic, changes)
        for change in changes:
            if change.seqno is not None and change.seqno <= stretch.start:
                text = f"{self.name} was shown {change} of {stretch.topic} after {stretch.start}"
                self.host.world.fail(f"{text}, where it began")
        stretch.changes |= {change.seqno: change for change in changes if change.seqno is not None}
        stretch.seqno, stretch.complete = item.token.seqno, item.complete
