"""A namespace of a broker with the plug-in, and plain consumers of its topics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pulsar
from pulsar_cluster import Cluster
from service_process import ServiceProcess, kept_port
from several_brokers import Brokers

from broker_io.standalone import Standalone, ask
from txnbuffer import Client, connect

SETTINGS = ["topicFactoryClassName=txnbuffer.broker.TxnTopicFactory", "allowOverrideEntryFilters=true"]
ENTRIES = "brokerEntryMetadataInterceptors=org.apache.pulsar.common.intercept.AppendIndexMetadataInterceptor"
"""With this setting entries have data of the broker before them, as with some features of Pulsar."""
ERROR = pulsar.LoggerLevel.Error
LONG = 60.0
QUIET = 0.5
"""Seconds without a message after which a consumer counts as waiting."""
KINDS = ("Exclusive", "Shared", "Failover", "KeyShared", "reader")
Pair = tuple[bytes | None, bytes]
"""Key and value."""


class World:
    """A namespace of a broker with a service, or one for each shard, with these settings."""

    def __init__(self, broker: Standalone | Cluster | Brokers, settings: Sequence[str] = (), shards: int = 1) -> None:
        self.broker = broker
        self.namespace = broker.namespace()
        self.address = f"{broker.url}/{self.namespace}"
        self.port = kept_port()
        self._flags = [word for setting in settings for word in ("--set", setting)] + ["--shards", str(shards)]
        self.service = self.serve()
        self._others = [self.serve(shard) for shard in range(1, shards)]
        self.pulsar = pulsar.Client(broker.url, logger=pulsar.FileLogger(ERROR, os.devnull))

    def serve(self, shard: int = 0, settings: Sequence[str] = ()) -> ServiceProcess:
        flags = ["--admin-url", self.broker.admin, *self._flags, "--shard", str(shard)]
        flags += [word for setting in settings for word in ("--set", setting)]
        return ServiceProcess(self.address, *flags, port=0 if shard else self.port).wait_serving()

    def client(self, **options: object) -> Client:
        return connect(self.address, broker_options={"admin_url": self.broker.admin}, max_unavailable=LONG, **options)

    def topic(self, name: str) -> str:
        return f"persistent://{self.namespace}/{name}"

    def unload(self, name: str) -> None:
        ask(self.broker.admin, f"persistent/{self.namespace}/{name}/unload", "PUT")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.pulsar.close()
        for service in (self.service, *self._others):
            service.kill()


def closing(world: World) -> Iterator[World]:
    """For fixtures."""
    yield world
    world.close()


class Plain:
    """A consumer or reader of the Pulsar library; `got` has what came, without what was delivered again."""

    def __init__(self, world: World, topic: str, kind: str) -> None:
        self.kind = kind
        self.got: list[Pair] = []
        self.places: dict[tuple[int, int, int], None] = {}
        self.properties: list[dict[str, str]] = []
        if kind == "reader":
            self.source = world.pulsar.create_reader(world.topic(topic), pulsar.MessageId.earliest)
        else:
            self.source = world.pulsar.subscribe(
                world.topic(topic), f"plain-{kind}", consumer_type=getattr(pulsar.ConsumerType, kind),
                initial_position=pulsar.InitialPosition.Earliest,
            )  # fmt: skip

    def read(self, count: int, quiet: float = QUIET) -> list[Pair]:
        """Read until there are `count` messages, and for a while longer."""
        deadline = time.monotonic() + LONG
        while True:
            enough = len(self.got) >= count
            try:
                wait = round(1000 * (quiet if enough else 1.0))
                message = self.source.read_next(wait) if self.kind == "reader" else self.source.receive(wait)
            except pulsar.Timeout:
                if enough or time.monotonic() > deadline:
                    return self.got
                continue
            place = message.message_id()
            identity = (place.ledger_id(), place.entry_id(), place.batch_index())
            if identity not in self.places:
                self.places[identity] = None
                key = message.partition_key()
                self.got.append((key.encode() if key else None, bytes(message.data())))
                self.properties.append(dict(message.properties()))
            if self.kind != "reader":
                self.source.acknowledge(message)


def by_key(pairs: list[Pair]) -> dict[bytes | None, list[bytes]]:
    found: dict[bytes | None, list[bytes]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


async def committed(client: Client, topic: str, count: int = 0) -> list[Pair]:
    """What the committed reader gets: at least `count` records, and what comes in a moment more."""
    rows: list[Pair] = []
    async with await client.reader(topic) as reader:
        while batch := await reader.read(timeout=LONG if len(rows) < count else QUIET if count else 3.0):
            rows += [(record.key, record.value or b"") for record in batch]
    return rows


async def write(client: Client, topic: str, rounds: int, seed: int) -> None:
    """Transactions that are open together, so that batches hold records of several; about half of them abort."""
    chance, numbers = random.Random(seed), itertools.count(1)
    for _ in range(rounds):
        txns = [await client.transaction(timeout=120).begin() for _ in range(chance.randint(1, 8))]
        sends = []
        for _ in range(chance.randint(1, 4)):
            for txn in txns:
                for _ in range(chance.randint(0, 3)):
                    number = next(numbers)
                    sends.append(txn.send(topic, b"%d-%d" % (seed, number), key=b"k%d" % (number % 17)))
            if chance.random() < 0.5:
                sends.append(client.send(topic, b"%d-ordinary-%d" % (seed, next(numbers)), key=b"ordinary"))
        await asyncio.gather(*sends)
        chance.shuffle(txns)
        for txn in txns:
            await (txn.abort() if chance.random() < 0.5 else txn.commit())


def compare(plain: Plain, wanted: list[Pair]) -> None:
    got = plain.read(len(wanted))
    if plain.kind == "KeyShared":
        assert by_key(got) == by_key(wanted), plain.kind
    else:
        assert got == wanted, plain.kind
    assert not [one for one in plain.properties if "tb.marker" in one]


def values(pairs: list[Pair]) -> list[bytes]:
    return [value for _, value in pairs]


def read_to_end(world: World, topic: str) -> int:
    reader = world.pulsar.create_reader(world.topic(topic), pulsar.MessageId.earliest)
    try:
        count = 0
        while reader.has_message_available():
            reader.read_next(round(1000 * LONG))
            count += 1
        return count
    finally:
        reader.close()


def stored(world: World, topic: str) -> list[tuple[int, int]]:
    """Ledger and entry of each record in the log, decided or not."""
    reader = world.pulsar.create_reader(
        world.topic(topic), pulsar.MessageId.earliest, subscription_role_prefix="role-__txnbuffer"
    )
    try:
        places = []
        while reader.has_message_available():
            message = reader.read_next(round(1000 * LONG))
            if "tb.marker" not in message.properties():
                places.append((message.message_id().ledger_id(), message.message_id().entry_id()))
        return places
    finally:
        reader.close()


def internal_stats(world: World, topic: str) -> dict[str, Any]:
    answer = ask(world.broker.admin, f"persistent/{world.namespace}/{topic}/internalStats")
    return dict(answer["cursors"])


def state(world: World, topic: str) -> dict[str, str]:
    """What the plug-in tells of a topic in its stats; empty if it tells nothing."""
    stats = ask(world.broker.admin, f"persistent/{world.namespace}/{topic}/stats")
    properties = stats["subscriptions"].get("__txnbuffer", {}).get("subscriptionProperties", {})
    return {name.removeprefix("txnbuffer."): value for name, value in properties.items()}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a change of a setting, which a broker hears a moment later, or for a broker that is starting."""
    deadline = time.monotonic() + 2 * LONG
    while True:
        with contextlib.suppress(pulsar.Timeout):
            if await asyncio.to_thread(condition):
                return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
