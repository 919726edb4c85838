"""Plain consumers on a broker with the plug-in get what the committed reader gets, in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from commands import txnbuf
from foreign_consumers import ForeignConsumers, java_command
from pulsar_cluster import Cluster
from service_process import ServiceProcess, kept_port

from broker_io import open_broker
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


@pytest.fixture(scope="module")
def broker(cluster: Cluster, plug_in: Path) -> Iterator[Standalone]:
    """A broker with the plug-in."""
    with cluster.private_standalone([*SETTINGS, ENTRIES], jar=plug_in) as started:
        yield started


class World:
    """A namespace of a broker with a service."""

    def __init__(self, broker: Standalone | Cluster) -> None:
        self.broker = broker
        self.namespace = broker.namespace()
        self.address = f"{broker.url}/{self.namespace}"
        self.port = kept_port()
        self.service = self.serve()
        self.pulsar = pulsar.Client(broker.url, logger=pulsar.FileLogger(ERROR, os.devnull))

    def serve(self) -> ServiceProcess:
        return ServiceProcess(self.address, "--admin-url", self.broker.admin, port=self.port).wait_serving()

    def client(self, **options: object) -> Client:
        return connect(self.address, broker_options={"admin_url": self.broker.admin}, max_unavailable=LONG, **options)

    def topic(self, name: str) -> str:
        return f"persistent://{self.namespace}/{name}"

    def unload(self, name: str) -> None:
        ask(self.broker.admin, f"persistent/{self.namespace}/{name}/unload", "PUT")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.pulsar.close()
        self.service.kill()


@pytest.fixture(scope="module")
def world(broker: Standalone) -> Iterator[World]:
    made = World(broker)
    yield made
    made.close()


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


async def committed(client: Client, topic: str) -> list[Pair]:
    rows: list[Pair] = []
    async with await client.reader(topic) as reader:
        while batch := await reader.read(timeout=3.0):
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


async def test_plain_consumers_get_what_committed_readers_get(world: World) -> None:
    async with world.client() as client:
        await write(client, "orders", 2, 1)
        plains = [Plain(world, "orders", kind) for kind in KINDS]
        await write(client, "orders", 10, 2)
        await asyncio.to_thread(world.unload, "orders")
        await write(client, "orders", 10, 3)
        wanted = await committed(client, "orders")
        assert len(wanted) > 50
        for plain in [*plains, Plain(world, "orders", "reader")]:
            await asyncio.to_thread(compare, plain, wanted)


async def test_open_transactions_hold_back_what_follows_also_after_a_kill(broker: Standalone, world: World) -> None:
    async with world.client() as client:
        plains = [Plain(world, "held", kind) for kind in KINDS]
        first = await client.transaction(timeout=120).begin()
        second = await client.transaction(timeout=120).begin()
        await client.send("held", b"before", key=b"k")
        await first.send("held", b"first", key=b"k")
        await second.send("held", b"second", key=b"k")
        await until(lambda: len(stored(world, "held")) == 3)
        await client.send("held", b"after", key=b"k")
        for plain in plains:
            assert values(await asyncio.to_thread(plain.read, 1)) == [b"before"], plain.kind
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await first.abort()
        for plain in plains:
            assert values(await asyncio.to_thread(plain.read, 1)) == [b"before"], plain.kind
        await second.commit()
        for plain in plains:
            assert values(await asyncio.to_thread(plain.read, 3)) == [b"before", b"second", b"after"], plain.kind


def values(pairs: list[Pair]) -> list[bytes]:
    return [value for _, value in pairs]


async def test_plain_reader_finds_the_end_where_the_end_of_a_batch_is_hidden(world: World) -> None:
    async with world.client() as client:
        for number in range(20):
            kept, gone = await client.transaction().begin(), await client.transaction().begin()
            sends = [txn.send("ends", b"%d" % number) for _ in range(5) for txn in (kept, gone)]
            await asyncio.gather(*sends)
            await gone.abort()
            await kept.commit()
            await until(lambda wanted=5 * (number + 1): read_to_end(world, "ends") == wanted)
            places = await asyncio.to_thread(stored, world, "ends")
            if places.count(places[-1]) > 5:
                return
    raise AssertionError("no entry had records of both transactions")


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


async def test_record_sets_arrive_as_one_message_once_they_are_committed(world: World) -> None:
    async with world.client(batching="records") as client:
        kept, gone = await client.transaction().begin(), await client.transaction().begin()
        await kept.send_many("sets", ["a", "b", "c"])
        await gone.send_many("sets", ["d", "e"])
        await gone.abort()
        await kept.commit()
        await client.send_many("sets", ["f", "g"])
        plain = Plain(world, "sets", "Exclusive")
        await asyncio.to_thread(plain.read, 2)
        assert [one["tb.records"] for one in plain.properties] == ["3", "2"]


async def test_message_of_a_newer_version_stops_plain_consumers(broker: Standalone, world: World) -> None:
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("stopped", b"committed")
        await until(lambda: read_to_end(world, "stopped") == 1)
    producer = world.pulsar.create_producer(world.topic("stopped"))
    producer.send(b"newer", properties={"tb.v": "9"})
    producer.send(b"behind")
    producer.close()
    for kind in KINDS:
        assert values(await asyncio.to_thread(Plain(world, "stopped", kind).read, 1)) == [b"committed"], kind
    await asyncio.to_thread(world.unload, "stopped")
    assert values(await asyncio.to_thread(Plain(world, "stopped", "reader").read, 1)) == [b"committed"]
    assert await asyncio.to_thread(read_to_end, world, "stopped") == 1
    assert "a message of version 9 of the protocol" in broker.log()


async def test_subscription_that_keeps_messages_has_no_consumers(world: World) -> None:
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("kept", b"committed")
        cursor = internal_stats(world, "kept")["__txnbuffer"]["markDeletePosition"]
        for name in ("__txnbuffer", "role-__txnbuffer"):
            with pytest.raises(pulsar.PulsarException):
                world.pulsar.subscribe(world.topic("kept"), name)
        assert values(await asyncio.to_thread(Plain(world, "kept", "Exclusive").read, 1)) == [b"committed"]
        assert internal_stats(world, "kept")["__txnbuffer"]["markDeletePosition"] == cursor


def internal_stats(world: World, topic: str) -> dict[str, Any]:
    answer = ask(world.broker.admin, f"persistent/{world.namespace}/{topic}/internalStats")
    return dict(answer["cursors"])


@pytest.mark.parametrize("created", [False, True])
async def test_topics_without_transactions_are_served_as_they_are(world: World, *, created: bool) -> None:
    topic = f"plain-{created}"
    if created:  # by this library, but without a transaction
        with open_broker(world.address, admin_url=world.broker.admin) as opened:
            await asyncio.to_thread(opened.create_topic, topic)
    producer = world.pulsar.create_producer(world.topic(topic))
    producer.send(b"copied", properties={"tb.v": "1", "tb.txn": "0:1", "tb.seq": "1"})  # as dead-letter producers do
    producer.send(b"ordinary")
    producer.close()
    for kind in KINDS:
        assert values(await asyncio.to_thread(Plain(world, topic, kind).read, 2)) == [b"copied", b"ordinary"], kind


async def test_no_topic_is_served_without_the_setting_for_filters(broker: Standalone, world: World) -> None:
    setting = "brokers/configuration/allowOverrideEntryFilters"
    impatient = pulsar.Client(broker.url, operation_timeout_seconds=3, logger=pulsar.FileLogger(ERROR, os.devnull))

    def reader(topic: str) -> object:
        return impatient.create_reader(world.topic(topic), pulsar.MessageId.earliest)

    assert not refused(lambda: reader("setting"))
    await asyncio.to_thread(ask, broker.admin, f"{setting}/false", "POST")
    try:
        await until(lambda: refused(lambda: reader("setting")))
        assert refused(lambda: reader("new"))
    finally:
        await asyncio.to_thread(ask, broker.admin, f"{setting}/true", "POST")
    await until(lambda: not refused(lambda: reader("setting")))
    await asyncio.to_thread(impatient.close)
    assert "set allowOverrideEntryFilters=true in broker.conf" in broker.log()


def refused(opening: Callable[[], object]) -> bool:
    try:
        opening()
    except pulsar.PulsarException:
        return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a change of a setting, which a broker hears a moment later."""
    deadline = time.monotonic() + LONG
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline


async def test_partitions_have_what_committed_readers_get(world: World) -> None:
    await asyncio.to_thread(ask, world.broker.admin, f"persistent/{world.namespace}/parts/partitions", "PUT", 3)
    async with world.client() as client:
        await write(client, "parts", 3, 1)
        wanted = await committed(client, "parts")
        got = await asyncio.to_thread(Plain(world, "parts", "Exclusive").read, len(wanted))
        assert by_key(got) == by_key(wanted)


@pytest.mark.parametrize("kind", ["Shared", "Exclusive"])
async def test_negative_acknowledgements_bring_the_same_messages_again(world: World, kind: str) -> None:
    topic = f"nacked-{kind}"
    async with world.client() as client:
        await write(client, topic, 3, 2)
        wanted = values(await committed(client, topic))
    consumer = world.pulsar.subscribe(
        world.topic(topic), "nacked", consumer_type=getattr(pulsar.ConsumerType, kind),
        initial_position=pulsar.InitialPosition.Earliest, negative_ack_redelivery_delay_ms=100,
    )  # fmt: skip
    assert set(await asyncio.to_thread(acknowledge, consumer, set(wanted[::3]), len(wanted))) == set(wanted)
    stats = f"persistent/{world.namespace}/{topic}/stats"
    await until(lambda: ask(world.broker.admin, stats)["subscriptions"]["nacked"]["msgBacklog"] == 0)
    consumer.close()


def acknowledge(consumer: pulsar.Consumer, first_refused: set[bytes], count: int) -> list[bytes]:
    """Acknowledge all messages, some of them negatively at first; the values of all that came."""
    came: list[bytes] = []
    while True:
        try:
            message = consumer.receive(2000)
        except pulsar.Timeout:
            if len(set(came)) >= count:
                return came
            continue
        value = bytes(message.data())
        if value in first_refused and value not in came:
            consumer.negative_acknowledge(message)
        else:
            consumer.acknowledge(message)
        came.append(value)


def test_command_tells_which_brokers_have_the_plug_in(broker: Standalone, cluster: Cluster) -> None:
    found = txnbuf("plugin", "check", broker.url, "--set", f"pulsar.admin_url={broker.admin}", "--output", "json")
    assert (found.returncode, json.loads(found.stdout)[0]["missing"]) == (0, "")
    found = txnbuf("plugin", "check", cluster.url, "--set", f"pulsar.admin_url={cluster.admin}", "--output", "json")
    assert found.returncode == 1
    assert "topicFactoryClassName=txnbuffer.broker.TxnTopicFactory" in json.loads(found.stdout)[0]["missing"]


def test_command_about_brokers_needs_a_cluster(tmp_path: Path) -> None:
    found = txnbuf("plugin", "check", "memory:")
    assert found.returncode == 2
    assert "is not a Pulsar cluster" in found.stderr


async def test_consumers_of_the_java_client_get_what_committed_readers_get(world: World) -> None:
    async with world.client() as client:
        await client.send("java", b"first")
        with ForeignConsumers(await asyncio.to_thread(java_command), world.broker.url, world.topic("java")) as java:
            await write(client, "java", 3, 1)
            kept, gone = await client.transaction(timeout=120).begin(), await client.transaction(timeout=120).begin()
            sends = [txn.send("java", b"open-%d" % number) for number in range(5) for txn in (kept, gone)]
            await asyncio.gather(*sends, client.send("java", b"behind"))
            await compare_foreign(java, await committed(client, "java"))
            await gone.abort()
            await kept.commit()
            await compare_foreign(java, await committed(client, "java"))


async def compare_foreign(foreign: ForeignConsumers, wanted: list[Pair]) -> None:
    await until(lambda: foreign.have(len(wanted)))
    await asyncio.sleep(QUIET)
    for kind, got in foreign.got.items():
        if kind == "Key_Shared":
            assert by_key(got) == by_key(wanted)
        else:
            assert got == wanted, kind


async def test_difference_without_the_plug_in(cluster: Cluster) -> None:
    plain_world = World(cluster)
    try:
        async with plain_world.client() as client:
            await write(client, "orders", 3, 1)
            wanted = await committed(client, "orders")
            plain = Plain(plain_world, "orders", "Exclusive")
            assert len(await asyncio.to_thread(plain.read, len(wanted) + 1)) > len(wanted)
            assert [one for one in plain.properties if "tb.marker" in one]
    finally:
        plain_world.close()
        cluster.drop(plain_world.namespace)
