"""Features of Pulsar's clients that plain consumers use, on topics with transactions."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar
import pytest
from certificates import openssl
from foreign_consumers import HERE as CLIENTS
from foreign_consumers import go_command, java_command
from plain_world import ENTRIES, SETTINGS, Pair, Plain, World, committed, read_to_end, stored, until, values, write
from pulsar_cluster import Cluster

from broker_io.standalone import Standalone, ask
from broker_plugin.build import SOURCES, compile_into, pack
from txnbuffer import Client

BROKER = [
    *SETTINGS,
    "acknowledgmentAtBatchIndexLevelEnabled=true",
    "managedLedgerMaxUnackedRangesToPersistInMetadataStore=0",  # else places in batches are lost with an unload
    "exposingBrokerEntryMetadataToClientEnabled=true",
    f"{ENTRIES},org.apache.pulsar.common.intercept.AppendBrokerTimestampMetadataInterceptor",
]


FILTER = """
name: cluster
entryFilterClass: ClusterFilter
"""


FULL = os.environ.get("SOAK") == "full"
LANGUAGES = ["java", *(["go"] if FULL else [])]
CODECS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")


@pytest.fixture(scope="module")
def broker(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """With the plug-in and an entry filter of the cluster, which are in the same file."""
    classes = tmp_path_factory.mktemp("classes")
    compile_into(classes, [SOURCES, CLIENTS / "filter"])
    (classes / "META-INF" / "services").mkdir(parents=True)
    (classes / "META-INF" / "services" / "entry_filter.yml").write_text(FILTER)
    jar = pack(classes, tmp_path_factory.mktemp("filters") / "plugin.nar")
    settings = [*BROKER, f"entryFiltersDirectory={jar.parent}", "entryFilterNames=cluster"]
    with cluster.private_standalone(settings, jar=jar) as started:
        yield started


async def ended(world: World, topic: str) -> dict[str, str]:
    """Begin a topic with a committed record `start`; properties of a record that is late there, and so hidden."""
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send(topic, b"start", key=b"start")
        await until(lambda: read_to_end(world, topic) == 1)  # so its marker is in the topic
    return {"tb.v": "1", "tb.txn": str(txn.id), "tb.seq": "9"}


def send_entry(
    world: World, topic: str, late: dict[str, str], pattern: str, name: str = "m", **options: Any
) -> list[bytes]:
    """Send a batch, one message for each letter of `pattern`, `-` for a hidden one; the visible values."""
    producer = world.pulsar.create_producer(
        world.topic(topic), batching_enabled=True, batching_max_publish_delay_ms=60_000, **options
    )
    visible = []
    failures = []

    def done(result: pulsar.Result, _: object) -> None:
        if result != pulsar.Result.Ok:
            failures.append(result)

    for number, letter in enumerate(pattern):
        value = f"{name}{number}".encode()
        if letter != "-":
            visible.append(value)
        producer.send_async(value, done, properties=late if letter == "-" else None, partition_key=letter)
    producer.flush()
    producer.close()
    assert not failures
    return visible


async def test_batches_of_each_compression_are_rewritten(world: World) -> None:
    late = await ended(world, "codecs")
    wanted = [b"start"]
    for codec in CODECS:
        kind = getattr(pulsar.CompressionType, codec)
        wanted += send_entry(world, "codecs", late, "-a-bc-", codec, compression_type=kind)
    for kind in ("Exclusive", "Shared", "reader"):
        assert values(Plain(world, "codecs", kind).read(len(wanted))) == wanted


def subscription(world: World, topic: str, name: str) -> dict[str, Any]:
    return dict(ask(world.broker.admin, f"persistent/{world.namespace}/{topic}/stats")["subscriptions"][name])


def rest(reader: pulsar.Reader) -> list[pulsar.Message]:
    found = []
    while reader.has_message_available():
        found.append(reader.read_next(60_000))
    return found


def take(consumer: pulsar.Consumer, wanted: list[bytes], acknowledged: slice = slice(None)) -> None:
    """Receive exactly these messages, acknowledge some of them, and close the consumer."""
    messages = [consumer.receive(60_000) for _ in wanted]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)
    assert [message.data() for message in messages] == wanted
    for message in messages[acknowledged]:
        consumer.acknowledge(message)
    consumer.close()


@pytest.mark.parametrize("kind", ["Shared", "Exclusive"])
async def test_acknowledged_messages_of_rewritten_batches_do_not_come_again(world: World, kind: str) -> None:
    topic = f"indexes-{kind}"
    late = await ended(world, topic)
    wanted = [b"start"]
    for number in range(5):
        wanted += send_entry(world, topic, late, "-a-bcd-e-", f"{number}-")
        send_entry(world, topic, late, "--", "hidden")

    def consumer() -> pulsar.Consumer:
        return world.pulsar.subscribe(
            world.topic(topic), "indexes", consumer_type=getattr(pulsar.ConsumerType, kind),
            initial_position=pulsar.InitialPosition.Earliest, batch_index_ack_enabled=True,
        )  # fmt: skip

    take(consumer(), wanted, slice(2, None, 2))
    rest = [wanted[0], *wanted[1::2]]
    take(consumer(), rest, slice(1))
    await asyncio.to_thread(world.unload, topic)
    take(consumer(), rest[1:])
    await until(lambda: subscription(world, topic, "indexes")["msgBacklog"] == 0)
    take(consumer(), [])


async def test_seeks_and_ends_are_those_of_what_is_visible(world: World) -> None:
    late = await ended(world, "seeks")
    first = send_entry(world, "seeks", late, "-a-bc--", "first-")
    await asyncio.sleep(0.05)
    between = time.time_ns() // 1_000_000
    await asyncio.sleep(0.05)
    second = send_entry(world, "seeks", late, "-a-bc--", "second-")
    send_entry(world, "seeks", late, "--", "hidden-")
    reader = world.pulsar.create_reader(world.topic("seeks"), pulsar.MessageId.earliest)

    everything = rest(reader)
    assert [one.data() for one in everything] == [b"start", *first, *second]
    reader.seek(between)
    assert [one.data() for one in rest(reader)] == second
    for at, message in enumerate(everything):
        reader.seek(message.message_id())
        assert [one.data() for one in rest(reader)] == [one.data() for one in everything[at + 1 :]], at
    reader.seek(pulsar.MessageId.latest)
    assert not rest(reader)
    reader.close()
    reader = world.pulsar.create_reader(world.topic("seeks"), pulsar.MessageId.latest)
    assert not rest(reader)
    async with world.client() as client, client.transaction() as txn:
        await txn.send("seeks", b"next")
    last = reader.read_next(60_000)
    assert last.data() == b"next"
    reader.close()
    send_entry(world, "seeks", late, "--", "hidden-")
    consumer = world.pulsar.subscribe(world.topic("seeks"), "seeks", initial_position=pulsar.InitialPosition.Earliest)
    assert consumer.get_last_message_id() == last.message_id()
    consumer.seek(between)
    take(consumer, [*second, b"next"])


async def test_compacted_reads_end_where_other_reads_end(world: World) -> None:
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("compacted", b"1", key=b"k")
        txn = await client.transaction(timeout=120).begin()
        await txn.send("compacted", b"gone", key=b"k")
        reader = world.pulsar.create_reader(world.topic("compacted"), pulsar.MessageId.earliest, is_read_compacted=True)
        assert reader.read_next(60_000).data() == b"1"
        assert not reader.has_message_available()
        with pytest.raises(pulsar.Timeout):
            reader.read_next(500)
        await txn.abort()
        await client.send("compacted", b"2", key=b"k")
        assert reader.read_next(60_000).data() == b"2"
        await until(lambda: not reader.has_message_available())


async def test_compaction_of_a_topic_with_transactions_is_refused(world: World) -> None:
    await ended(world, "compaction")
    path = f"persistent/{world.namespace}/compaction/compaction"
    await asyncio.to_thread(ask, world.broker.admin, path, "PUT")
    await until(lambda: ask(world.broker.admin, path)["status"] != "RUNNING")
    status = ask(world.broker.admin, path)
    assert status["status"] == "ERROR"
    assert "the broker's compaction ignores transactions" in status["lastError"]


async def test_delayed_messages_wait_behind_open_transactions_too(world: World) -> None:
    late = await ended(world, "delayed")
    consumer = world.pulsar.subscribe(
        world.topic("delayed"), "delayed", consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
    )  # fmt: skip
    assert consumer.receive(60_000).data() == b"start"
    producer = world.pulsar.create_producer(world.topic("delayed"))
    async with world.client() as client:
        producer.send(b"later", deliver_after=datetime.timedelta(seconds=2))
        producer.send(b"late", properties=late, deliver_after=datetime.timedelta(seconds=1))
        wanted = send_entry(world, "delayed", late, "-ab-")
        take_some(consumer, wanted)
        txn = await client.transaction(timeout=120).begin()
        count = len(stored(world, "delayed"))
        await txn.send("delayed", b"open")
        await until(lambda: len(stored(world, "delayed")) > count)
        await asyncio.to_thread(producer.send, b"behind", deliver_after=datetime.timedelta(milliseconds=100))
        take_some(consumer, [b"later"])
        with pytest.raises(pulsar.Timeout):
            consumer.receive(500)
        await txn.commit()
        take(consumer, [b"open", b"behind"])


def take_some(consumer: pulsar.Consumer, wanted: list[bytes]) -> None:
    for one in wanted:
        message = consumer.receive(60_000)
        assert message.data() == one, (message.data(), message.message_id())
        consumer.acknowledge(message)


async def test_backlog_counts_what_is_not_passed_over(world: World) -> None:
    late = await ended(world, "backlog")
    consumer = world.pulsar.subscribe(
        world.topic("backlog"), "backlog", initial_position=pulsar.InitialPosition.Earliest
    )
    take(consumer, [b"start"])
    wanted = send_entry(world, "backlog", late, "-ab-")
    send_entry(world, "backlog", late, "--")
    wanted += send_entry(world, "backlog", late, "a")
    assert subscription(world, "backlog", "backlog")["msgBacklog"] == 3
    path = f"persistent/{world.namespace}/backlog/subscription/backlog/analyzeBacklog"
    found = await asyncio.to_thread(ask, world.broker.admin, path, "POST")
    assert (found["entries"], found["filterAcceptedEntries"], found["filterRejectedEntries"]) == (3, 2, 1)
    take(world.pulsar.subscribe(world.topic("backlog"), "backlog"), wanted)
    await until(lambda: subscription(world, "backlog", "backlog")["msgBacklog"] == 0)


async def test_filters_of_the_cluster_see_what_consumers_see(world: World) -> None:
    late = await ended(world, "filtered")
    wanted = [b"start", *send_entry(world, "filtered", {**late, "unwanted": "yes"}, "-ab-", "hidden")]
    send_entry(world, "filtered", {"unwanted": "yes"}, "-ab-", "filtered")
    wanted += send_entry(world, "filtered", late, "ab", "last")
    for kind in ("Exclusive", "Shared", "reader"):
        assert values(await asyncio.to_thread(Plain(world, "filtered", kind).read, len(wanted))) == wanted


async def test_many_consumers_share_what_is_visible(world: World) -> None:
    got: dict[str, list[Pair]] = {"Shared": [], "KeyShared": []}

    def listener(kind: str) -> Callable[[pulsar.Consumer, pulsar.Message], None]:
        def receive(consumer: pulsar.Consumer, message: pulsar.Message) -> None:
            got[kind].append((message.partition_key().encode(), message.data()))
            consumer.acknowledge(message)

        return receive

    consumers = [
        world.pulsar.subscribe(
            world.topic("many"), kind, consumer_type=getattr(pulsar.ConsumerType, kind), receiver_queue_size=5,
            message_listener=listener(kind),
        )
        for kind in got
        for _ in range(10)
    ]  # fmt: skip
    async with world.client() as client:
        await write(client, "many", 4, 1)
        wanted = await committed(client, "many")
    for kind, pairs in got.items():
        await until(lambda kind=kind: subscription(world, "many", kind)["msgBacklog"] == 0)
        assert sorted(pairs) == sorted(wanted)
    for consumer in consumers:
        consumer.close()


async def test_dead_letters_in_a_topic_with_transactions_are_ordinary_records(world: World) -> None:
    dead = "failing-workers-DLQ"
    await ended(world, dead)
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("failing", b"bad", key=b"k", properties={"mine": "1"})
        policy = pulsar.ConsumerDeadLetterPolicy(1, initial_subscription_name="kept")
        consumer = world.pulsar.subscribe(
            world.topic("failing"), "workers", consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest, negative_ack_redelivery_delay_ms=100,
            dead_letter_policy=policy,
        )  # fmt: skip
        for _ in range(2):
            consumer.negative_acknowledge(consumer.receive(60_000))
        with pytest.raises(pulsar.Timeout):
            consumer.receive(1000)
        plain = Plain(world, dead, "Exclusive")
        assert await asyncio.to_thread(plain.read, 2) == [(b"start", b"start"), (b"k", b"bad")]
        copied = plain.properties[1]
        assert {name for name in copied if name.startswith("tb.")} == {"tb.v"}
        assert copied["mine"] == "1"
        assert await committed(client, dead, 2) == plain.got


async def test_dead_letters_that_are_sent_back_are_ordinary_records(world: World) -> None:
    late = await ended(world, "redriven")
    dead = {**late, "ORIGIN_MESSAGE_ID": "1:2:3", "REAL_TOPIC": "redriven"}
    unknown = {**dead, "tb.txn": "0:7"}  # would hold back all that follows
    wanted = [b"start"]
    for codec in (pulsar.CompressionType.NONE, pulsar.CompressionType.LZ4):
        for properties in (dead, unknown):
            send_entry(world, "redriven", properties, "-a-", f"batch-{codec}-", compression_type=codec)
            wanted += [f"batch-{codec}-{number}".encode() for number in range(3)]
        producer = world.pulsar.create_producer(world.topic("redriven"), compression_type=codec)
        producer.send(b"single", properties=unknown)
        producer.close()
        wanted.append(b"single")
    send_entry(world, "redriven", late, "--", "late")
    plain = Plain(world, "redriven", "Shared")
    assert values(await asyncio.to_thread(plain.read, len(wanted))) == wanted
    async with world.client() as client:
        assert await committed(client, "redriven", len(wanted)) == plain.got


async def test_large_and_encrypted_messages_arrive_whole(world: World, tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    openssl("genrsa", "-out", private, "2048")
    openssl("rsa", "-in", private, "-pubout", "-out", public)
    secret = {"encryption_key": "key", "crypto_key_reader": pulsar.CryptoKeyReader(str(public), str(private))}
    late = await ended(world, "secret")
    large = random.Random(1).randbytes(12_000_000)
    async with world.client() as client:
        txn = await client.transaction(timeout=120).begin()
        await txn.send("secret", b"open", key=b"k")
        await until(lambda: len(stored(world, "secret")) == 2)
        producer = world.pulsar.create_producer(world.topic("secret"), chunking_enabled=True)
        producer.send(large)
        wanted = [b"start", b"open", large, *send_entry(world, "secret", late, "abc", "batch", **secret)]
        producer = world.pulsar.create_producer(world.topic("secret"), **secret)
        producer.send(b"late", properties=late)
        producer.send(b"single")
        await txn.commit()
    consumer = world.pulsar.subscribe(
        world.topic("secret"), "keys", initial_position=pulsar.InitialPosition.Earliest,
        crypto_key_reader=secret["crypto_key_reader"],
    )  # fmt: skip
    await asyncio.to_thread(take, consumer, [*wanted, b"single"])


class AnyUse:
    """Random entries and transactions in a topic, and random use of it by a Shared consumer and readers."""

    def __init__(self, world: World, client: Client, topic: str, late: dict[str, str], seed: int) -> None:
        self.world, self.client, self.topic, self.late = world, client, topic, late
        self.chance = random.Random(seed)
        self.wanted = [b"start"]
        self.got: set[bytes] = set()
        self.consumer = self.subscribe()

    def subscribe(self) -> pulsar.Consumer:
        return self.world.pulsar.subscribe(
            self.world.topic(self.topic), "any", consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest, batch_index_ack_enabled=True,
            negative_ack_redelivery_delay_ms=100, receiver_queue_size=self.chance.choice([1, 5, 100]),
        )  # fmt: skip

    async def batch(self) -> None:
        pattern = "".join(self.chance.choice("-ab") for _ in range(self.chance.randint(1, 9)))
        kind = getattr(pulsar.CompressionType, self.chance.choice(CODECS))
        name = f"{len(self.wanted)}-"
        arguments = (self.world, self.topic, self.late, pattern, name)
        self.wanted += await asyncio.to_thread(send_entry, *arguments, compression_type=kind)

    async def transactions(self) -> None:
        """Two with records in the same batches, of which one aborts."""
        kept, gone = [await self.client.transaction(timeout=120).begin() for _ in range(2)]
        values = [b"%d-%d" % (len(self.wanted), number) for number in range(5)]
        await asyncio.gather(*(txn.send(self.topic, value, key=b"k") for value in values for txn in (kept, gone)))
        await gone.abort()
        await kept.commit()
        self.wanted += values
        await until(lambda: read_to_end(self.world, self.topic) == len(self.wanted))

    async def take(self) -> None:
        for _ in range(self.chance.randint(1, 30)):
            try:
                message = await asyncio.to_thread(self.consumer.receive, 300)
            except pulsar.Timeout:
                return
            self.got.add(message.data())
            if self.chance.random() < 0.7:
                self.consumer.acknowledge(message)
            elif self.chance.random() < 0.5:
                self.consumer.negative_acknowledge(message)

    async def reconnect(self) -> None:
        self.consumer.close()
        self.consumer = self.subscribe()

    async def unload(self) -> None:
        await asyncio.to_thread(self.world.unload, self.topic)

    async def read(self) -> None:
        await asyncio.to_thread(self.read_now)

    def read_now(self) -> None:
        """Read all, then again from one of the messages on, with the same reader and with a new one."""
        topic = self.world.topic(self.topic)
        reader = self.world.pulsar.create_reader(topic, pulsar.MessageId.earliest)
        everything = rest(reader)
        assert [one.data() for one in everything] == self.wanted
        at = self.chance.randrange(len(everything))
        place = everything[at].message_id()
        reader.seek(place)
        another = self.world.pulsar.create_reader(topic, place)
        for each in (reader, another):
            assert [one.data() for one in rest(each)] == self.wanted[at + 1 :]
            each.close()

    async def finish(self) -> None:
        await self.reconnect()
        while self.got != {*self.wanted}:
            message = await asyncio.to_thread(self.consumer.receive, 60_000)
            self.got.add(message.data())
            self.consumer.acknowledge(message)
        await self.reconnect()
        await until(self.is_empty)

    def is_empty(self) -> bool:
        with contextlib.suppress(pulsar.Timeout):
            self.consumer.acknowledge(self.consumer.receive(100))
        return bool(subscription(self.world, self.topic, "any")["msgBacklog"] == 0)


async def test_any_use_of_a_topic(world: World) -> None:
    seed = time.time_ns() % 10**6 if FULL else 1
    print("seed", seed)
    late = await ended(world, "any")
    async with world.client() as client:
        use = AnyUse(world, client, "any", late, seed)
        steps = [use.batch, use.batch, use.transactions, use.take, use.take, use.reconnect, use.unload, use.read]
        for _ in range(1000 if FULL else 30):
            await use.chance.choice(steps)()
        await use.finish()
        assert values(await committed(client, "any", len(use.wanted))) == use.wanted


@pytest.mark.parametrize("language", LANGUAGES)
async def test_features_of_other_clients(world: World, tmp_path: Path, language: str) -> None:
    topic = f"foreign-{language}"
    late = await ended(world, topic)
    await ended(world, f"{topic}-{language}-dead-DLQ")
    first = send_entry(world, topic, late, "-a-bc--", "first-")
    await asyncio.sleep(0.05)
    between = time.time_ns() // 1_000_000
    await asyncio.sleep(0.05)
    second = send_entry(world, topic, late, "-a-bd--", "second-")
    send_entry(world, topic, late, "--", "hidden-")
    wanted = [b"start", *first, *second]

    command = java_command("PlainFeatures") if language == "java" else go_command(tmp_path, "./features")
    command += [world.broker.url, world.topic(topic), str(between), str(len(wanted))]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    got: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        feature, _, value = line.partition("\t")
        got.setdefault(feature, []).append(value)

    texts = [one.decode() for one in wanted]
    indexes = [int(one) for one in got.pop("index")]
    assert indexes == sorted({*indexes})
    latest = {"start": "start", "a": texts[4], "b": texts[5], "c": texts[3], "d": texts[6]}
    assert {*got.pop("table")} == {f"{key}={value}" for key, value in latest.items()}
    assert {*got.pop("refused")} == {*texts[1::2]}
    assert got == {
        "read": texts,
        "last": ["true"],
        "seek-time": texts[4:],
        "seek-id": texts[3:],
        "latest": ["0"],
        "unacknowledged": texts[1::2],
        "refused-more": ["false"],
        "dead": ["start"],
        "dead-property": ["tb.v"],
    }
