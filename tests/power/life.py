"""A program on an embedded log, recorded for power cuts: `life.py LOG START`.

Each role below is a coroutine that runs with all others; a new one needs a line in ROLES. It notes a fact before it
asks for something and after it was answered, and facts.py checks what a power cut leaves against these facts. A later
start of the same log continues: START makes the labels of its transactions differ.

Files are small, so that a life has many of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from power.recording import note

from broker_io.filelog.log.broker import FileBroker
from txnbuffer import Client, Record, TopicInUse, Transaction, connect
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.service.engine.engine import Engine

ROUNDS = 12
SIZES = (0, 0, 30, 300, 6_000)
KEYS = ("a", "b", "c")


def fact(kind: str, **values: Any) -> None:
    note(json.dumps({"fact": kind, **values}))


class Life:
    """What the roles of one start share."""

    def __init__(self, client: Client, start: int) -> None:
        self.client = client
        self.start = start
        self.choose = random.Random(start)

    def labels(self, role: str) -> Iterator[str]:
        return (f"{role}-{self.start}-{number}" for number in itertools.count())

    def value(self, label: str, key: str) -> str:
        return f"{label}|{key}|{'x' * self.choose.choice(SIZES)}"

    async def send(self, txn: Transaction, label: str, topics: tuple[str, ...]) -> dict[str, list[str]]:
        """Send one to three records to each topic; return their values."""
        sent: dict[str, list[str]] = {topic: [] for topic in topics}
        for topic in topics:
            for key in self.choose.sample(KEYS, self.choose.randint(1, 3)):
                sent[topic].append(self.value(label, key))
                await txn.send(topic, sent[topic][-1], key=key)
        return sent

    async def commit(self, label: str, *topics: str, **options: Any) -> None:
        """Commit a transaction on topics."""
        async with self.client.transaction(**options) as txn:
            sent = await self.send(txn, label, topics)
            fact("asked", label=label, sent=sent, **options)
        fact("answered", label=label)


async def singles(life: Life) -> None:
    for label, _ in zip(life.labels("single"), range(2 * ROUNDS), strict=False):
        await life.commit(label, "orders")


async def several_topics(life: Life) -> None:
    for label, _ in zip(life.labels("several"), range(ROUNDS), strict=False):
        await life.commit(label, "orders", "stock", "audit")


async def several_in_flight(life: Life) -> None:
    labels = life.labels("flight")
    for _ in range(ROUNDS // 3):
        await asyncio.gather(*(life.commit(next(labels), *topics) for topics in [("busy",), ("busy", "audit")] * 8))


async def large_transactions(life: Life) -> None:
    """Each too large to be sent whole with its commit."""
    for label, _ in zip(life.labels("large"), range(2), strict=False):
        values = [f"{label}|{number}|{'x' * 10_000}" for number in range(8)]
        async with life.client.transaction() as txn:
            for topic in ("busy", "audit"):
                await txn.send_many(topic, values)
            fact("asked", label=label, sent={"busy": values, "audit": values})
        fact("answered", label=label)


async def named_producer(life: Life) -> None:
    committed = await life.client.committed_number("import")
    for number in range(committed + 1, committed + 1 + ROUNDS):
        await life.commit(f"named-{life.start}-{number}", "orders", "imported", name="import", number=number)


async def aborts(life: Life) -> None:
    for label, round_ in zip(life.labels("aborted"), range(ROUNDS), strict=False):
        txn = life.client.transaction()
        await txn.begin()
        await life.send(txn, label, ("orders", "stock"))
        if round_ < ROUNDS - 1:
            await txn.abort()  # the last one stays open


async def ordinary_sends(life: Life) -> None:
    for label, _ in zip(life.labels("ordinary"), range(ROUNDS), strict=False):
        value = life.value(label, KEYS[0])
        fact("asked", label=label, sent={"stock": [value]})
        await life.client.send("stock", value)
        fact("answered", label=label)


async def deleted_topic(life: Life) -> None:
    labels = life.labels("scratch")
    for _ in range(ROUNDS // 4):
        for _ in range(2):
            await life.commit(next(labels), "scratch", "audit")
        fact("deleting", topic="scratch")
        while True:
            try:
                await life.client.delete_topic("scratch")
                break
            except TopicInUse:  # on a slow machine its last markers take long
                continue
        fact("deleted", topic="scratch")
    await life.commit(next(labels), "scratch", "audit")


async def compacted_topic(life: Life) -> None:
    for label, round_ in zip(life.labels("table"), range(ROUNDS), strict=False):
        await life.commit(label, "table", "audit")
        if round_ % 4 == 3:
            await life.client.admin.ask("table", "Compact", {"topic": "table"})


async def consumer_group(life: Life) -> None:
    async def copy(txn: Transaction, record: Record) -> None:
        await txn.send("copies", record.value or b"")

    done = await life.client.process("orders", "copying", copy, batch=4, idle_timeout=0.3, wait=True)
    fact("copied", records=done.records)


Role = Callable[[Life], Awaitable[None]]
ROLES: tuple[Role, ...] = (
    singles, several_topics, several_in_flight, large_transactions, named_producer, aborts, ordinary_sends,
    deleted_topic, compacted_topic, consumer_group,
)  # fmt: skip


def make_files_small() -> None:
    defaults: dict[str, Any] = FileBroker.open.__kwdefaults__
    defaults.update(segment_bytes=20_000, journal_bytes=30_000)
    defaults = Engine.start.__kwdefaults__
    defaults.update(policy=SnapshotPolicy(changes=20, interval_ms=200))


async def main(log: str, start: int) -> None:
    async with connect(f"file:{log}") as client:
        life = Life(client, start)
        await asyncio.gather(*(role(life) for role in ROLES))


if __name__ == "__main__":
    make_files_small()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
