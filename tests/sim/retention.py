"""Retention: services drop the oldest ledgers of all topics, while durable cursors and groups hold what they need.

`docs/service.md` says what holds data, and which errors those get who hold none. An archive reads all topics and holds
what it has not read yet with a durable cursor on each. So everything that was ever committed is known in the end, and
the rules of all other seeds apply; what a reader or a stream has missed must have been dropped before it began.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from sim.apps import App
from sim.cluster_topics import StoredTopic
from sim.history import Fate, Shown
from sim.readers import shown
from sim.roles import Role, creating

from broker_io.errors import PositionTrimmed
from broker_io.filelog.log import FileBroker
from txnbuffer.client.client import Client
from txnbuffer.config import Config
from txnbuffer.errors import StreamTrimmed, UnknownCursor

if TYPE_CHECKING:
    from sim.world import World

TRIM = "trimmed ledgers"
COMPATIBLE = ("reader", "late reader", "follower", "cursors", "group", "rivals", "local log")
"""Roles that say what they miss when retention has dropped it, or hold what they need."""
HOLDERS = ("group", "cursors")
"""Roles that hold what they need."""


def retained(names: list[str], choose: random.Random) -> list[str]:
    """The roles of a seed with retention, at least one of which holds data."""
    kept = [name for name in names if name in COMPATIBLE]
    if not {*kept} & {*HOLDERS}:
        kept.append(choose.choice(HOLDERS))
    return [*kept, "retention"]


def before(archived: Iterable[Shown], first: Shown) -> list[Shown]:
    """The archived records before the first one that is still there."""
    return [record for record in archived if record.position and first.position and record.position < first.position]


class Trims:
    """What retention has dropped: by topic, when its first ledger became another one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._first: dict[str, list[tuple[float, int]]] = {}

    def dropped(self, topic: str, record: Shown, time: float) -> bool:
        """Whether a record had been dropped at a time, or was about to be."""
        trims = self._first.get(topic, ())
        return record.position is not None and any(at <= time and record.position.ledger < first for at, first in trims)

    def record(self) -> None:
        """Note all trims from now on."""
        trim_stored, trim_file = StoredTopic.trim, FileBroker.trim

        def stored(topic: StoredTopic) -> None:
            before = topic.ledgers[0].number
            trim_stored(topic)
            if topic.ledgers[0].number > before:
                self._note(topic.name.rpartition("/")[2], topic.ledgers[0].number, counts=True)

        def file(broker: FileBroker, topic: str, first_ledger: int) -> None:
            before = broker.ledgers(topic)[0].ledger
            self._note(topic, first_ledger)  # the process may be killed once this is durable
            trim_file(broker, topic, first_ledger)
            self._note(topic, first_ledger, counts=broker.ledgers(topic)[0].ledger > before)

        self._world.enter(mock.patch.object(StoredTopic, "trim", stored))
        self._world.enter(mock.patch.object(FileBroker, "trim", file))

    def _note(self, topic: str, first: int, *, counts: bool = False) -> None:
        self._first.setdefault(topic, []).append((self._world.now, first))
        if counts and not topic.startswith("__"):
            self._world.count(TRIM)
            self._world.log("retention", f"{topic} begins with ledger {first}")


class Archive(App):
    """Reads all topics, each from the place on that its durable cursor holds, now and then with long pauses."""

    CURSOR = "archive"

    def __init__(self, *arguments: Any, topics: tuple[str, ...]) -> None:
        super().__init__(*arguments)
        self.records: dict[str, list[Shown]] = {topic: [] for topic in topics}
        self.held: dict[str, int] = {}
        """The seqno of the cursor of each topic that has one, as far as it is known."""

    async def work(self, client: Client) -> None:
        if not self.held:
            await self._begin(client)
        tasks = [asyncio.ensure_future(self._archive(client, topic)) for topic in self.records]
        try:
            await asyncio.gather(*tasks)
        finally:  # the others must not go on next to those of the next client
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, client: Client) -> None:
        """Create all topics and a cursor at the beginning of each, before anything else happens."""
        for older in [one for one in self.history.attempts if one.client == self.name]:
            older.writes.clear()  # the same values are sent again
        attempt = self.history.attempt(self.name)
        async with client.transaction() as transaction:
            attempt.txn = transaction.id
            for topic in self.records:
                if topic in self.setting.topics:
                    self.history.sent(attempt, topic, creating(topic))
                await transaction.send(topic, creating(topic), key=b"archive")
            self.history.asked(attempt)
        self._ended(attempt, Fate.COMMITTED)
        for topic in self.records:
            self.held[topic] = await client.cursors.add(topic, self.CURSOR)

    async def _archive(self, client: Client, topic: str) -> None:
        try:
            while True:
                await self._read(client, topic)
        except (PositionTrimmed, StreamTrimmed, UnknownCursor) as error:
            self.host.world.fail(f"a durable cursor holds {topic} after seqno {self.held[topic]}, and got {error!r}")

    async def _read(self, client: Client, topic: str) -> None:
        """Read on from the last record, which the cursor still holds."""
        records = self.records[topic]
        last = records[-1].position if records else None
        async with await client.reader(topic, start=last or "beginning") as reader:
            while self.choose.random() > 0.05:
                batch = await reader.read(timeout=1.0)
                new = [record for record in shown(batch or ()) if not last or (record.position or last) > last]
                if topic in self.setting.topics:
                    self.history.shown(self.name, topic, new)
                records += new
                if len(records) > self.held[topic] + 1 and self.choose.random() < 0.5:
                    self.held[topic] = await client.cursors.advance(topic, self.CURSOR, len(records) - 1)
                if self.choose.random() < 0.1:
                    await asyncio.sleep(self.choose.uniform(0.0, 4.0))


class Retention(Role):
    """Small retention on all services, and the archive."""

    def begin(self) -> None:
        scenario, choose = self.scenario, self.choose
        scenario.setting.trims = True
        for service in scenario.services:
            service.config = self._configured(service.config, choose)
        self.trims = Trims(scenario.world)
        self.trims.record()
        scenario.history.dropped = self.trims.dropped

    @staticmethod
    def _configured(config: Config, choose: random.Random) -> Config:
        seconds, size = choose.choice(((2.0, 0), (5.0, 0), (0.0, 600), (0.0, 3000), (3.0, 3000)))
        retention = replace(config.retention, seconds=seconds, bytes=size, check_seconds=choose.choice((1.0, 3.0)))
        return replace(config, retention=retention)

    def prepare(self) -> None:
        """Let the archive hold all topics before anything else happens."""
        scenario, host = self.scenario, self.scenario.world.host("delta")
        topics = tuple(scenario.all_topics)
        self.archive = Archive(
            "archive", host, scenario.setting, scenario.world.random("app", "archive"), topics=topics
        )
        self.archive.start()
        scenario.wait(lambda: self.archive.held.keys() == {*topics}, "the archive has not begun")
        scenario.archived = self.archive.records

    def missing(self) -> Iterator[str]:
        for topic, records in self.archive.records.items():
            if len(records) < len(self.records(topic)):
                yield f"the archive has {len(records)} of {len(self.records(topic))} records of {topic}"

    def wrong(self) -> Iterator[str]:
        for topic, records in self.archive.records.items():
            found = self.records(topic)[: len(records)]
            if found != records:
                at = next(at for at, record in enumerate(records) if found[at : at + 1] != [record])
                yield f"the archive was shown {records[at]} of {topic}, and a later reader {found[at : at + 1]}"
