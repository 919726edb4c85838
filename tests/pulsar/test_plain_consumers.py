"""Plain consumers on a broker with the plug-in get what the committed reader gets, in the same order."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Callable

import pulsar
import pytest
from commands import txnbuf
from foreign_consumers import ForeignConsumers, java_command
from plain_world import (
    ENTRIES,
    ERROR,
    KINDS,
    QUIET,
    SETTINGS,
    Pair,
    Plain,
    World,
    by_key,
    committed,
    compare,
    internal_stats,
    read_to_end,
    state,
    stored,
    until,
    values,
    write,
)
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.position import Position
from broker_io.standalone import Standalone, ask
from snapshots.errors import SnapshotMissing
from txnbuffer.recordset import pack, unpack

BROKER = [*SETTINGS, ENTRIES]
"""Settings of its broker, which has the plug-in."""


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


@pytest.mark.parametrize("topic", ["raw", "__raw"])
async def test_raw_readers_end_with_the_log_and_plain_ones_with_what_is_visible(world: World, topic: str) -> None:
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send(topic, b"committed")
            await txn.commit(wait_visible=True)
        txn = await client.transaction().begin()
        await txn.send(topic, b"open")
        await until(lambda: state(world, topic)["state"] == "open")
        assert await asyncio.to_thread(read_to_end, world, topic) == 1
        assert len(await asyncio.to_thread(stored, world, topic)) == 2
        await txn.abort()


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


async def test_record_set_of_which_a_part_is_there_twice_arrives_with_the_rest(world: World) -> None:
    async with world.client(batching="records") as client:
        async with client.transaction() as registering:
            await registering.send_many("twice", ["first"])
        txn = await client.transaction(timeout=120).begin()
        producer = world.pulsar.create_producer(world.topic("twice"), batching_enabled=False)
        for seq, texts in ((1, [b"a", b"b"]), (2, [b"b", b"c", b"d"])):
            sent = pack(Batch.of([Message(None, text) for text in texts]), txn.id, seq, compress=True)
            producer.send(sent.value, properties=dict(sent.properties))
        producer.close()
        await txn.send_many("twice", ["again"])  # as number 1, when it commits
        await txn.commit()
        await client.send_many("twice", ["last"])
        plain = Plain(world, "twice", "Exclusive")
        sets = zip(values(await asyncio.to_thread(plain.read, 4)), plain.properties, strict=True)
        records = [[one.value for one in unpack(Position(1, 0), Message(None, *found))] for found in sets]
        assert records == [[b"first"], [b"a", b"b"], [b"c", b"d"], [b"last"]]


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
    await until(lambda: state(world, "stopped").get("state") == "stopped")
    assert "a message of version 9 of the protocol" in state(world, "stopped")["reason"]


async def test_stats_tell_what_holds_plain_consumers_back(world: World) -> None:
    async with world.client() as client:
        async with client.transaction() as txn:
            await txn.send("told", b"committed")
        await until(lambda: state(world, "told").get("state") == "ready")
        txn = await client.transaction(timeout=120).begin()
        await txn.send("told", b"open")
        await client.send("told", b"behind")
        before, first = (await asyncio.to_thread(stored, world, "told"))[:2]  # ledgers and entries
        await until(lambda: state(world, "told").get("state") == "open")
        found = state(world, "told")
        assert (found["transaction"], place(found["first"])[:2]) == (str(txn.id), first)
        assert before <= place(found["readable"]) < first
        await txn.commit()
        await until(lambda: state(world, "told").keys() == {"state", "readable"})
        assert state(world, "told")["state"] == "ready"


def place(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(":")))


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


@pytest.mark.parametrize("created", [False, True])
async def test_topics_without_transactions_are_served_as_they_are(world: World, *, created: bool) -> None:
    topic = f"plain-{created}"
    if created:  # by this library, but without a transaction
        with open_broker(world.address, admin_url=world.broker.admin) as opened:
            await asyncio.to_thread(opened.create_topic, topic)
    producer = world.pulsar.create_producer(world.topic(topic))
    producer.send(b"copied", properties={**COPIED, "REAL_TOPIC": "orders"})  # as dead-letter producers do
    producer.send(b"ordinary")
    producer.close()
    for kind in KINDS:
        assert values(await asyncio.to_thread(Plain(world, topic, kind).read, 2)) == [b"copied", b"ordinary"], kind
    async with world.client() as client:
        assert values(await committed(client, topic)) == [b"copied", b"ordinary"]


async def test_records_of_transactions_whose_snapshot_is_lost_are_not_delivered(
    broker: Standalone, world: World
) -> None:
    with open_broker(world.address, admin_url=world.broker.admin) as opened:
        await asyncio.to_thread(opened.create_topic, "lost")
    producer = world.pulsar.create_producer(world.topic("lost"))
    producer.send(b"before")
    producer.send(b"uncommitted", properties=COPIED)
    producer.send(b"behind")
    producer.close()
    for kind in KINDS:
        assert values(await asyncio.to_thread(Plain(world, "lost", kind).read, 1)) == [b"before"], kind
    assert "it has no snapshot, but records or markers of transactions" in broker.log()
    async with world.client() as client:
        with pytest.raises(SnapshotMissing):
            await committed(client, "lost")


COPIED = {"tb.v": "1", "tb.txn": "0:1", "tb.seq": "1"}


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


async def test_partitions_have_what_committed_readers_get(world: World) -> None:
    await asyncio.to_thread(ask, world.broker.admin, f"persistent/{world.namespace}/parts/partitions", "PUT", 3)
    async with world.client() as client:
        await write(client, "parts", 3, 1)
        wanted = await committed(client, "parts")
        got = await asyncio.to_thread(Plain(world, "parts", "Exclusive").read, len(wanted))
        assert by_key(got) == by_key(wanted)
        for number in range(3):
            found = await asyncio.to_thread(verify_plain, world, f"parts-partition-{number}")
            assert (found.returncode, json.loads(found.stdout)) == (0, []), found
        found = await asyncio.to_thread(verify_plain, world, "parts")
        assert (found.returncode, found.stdout) == (2, "")
        assert "name one of its partitions, such as 'parts-partition-0'" in found.stderr


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


async def test_command_compares_what_plain_consumers_get_with_the_log(world: World) -> None:
    async with world.client(batching="records") as packing, world.client() as client:
        await write(client, "verified", 10, 1)
        await packing.send_many("verified", ["a", "b"])
        ended, held = await client.transaction().begin(), await client.transaction(timeout=120).begin()
        await asyncio.gather(*(txn.send("verified", b"mixed") for _ in range(5) for txn in (ended, held)))
        await ended.commit()
        found = await asyncio.to_thread(verify_plain, world, "verified")
        assert (found.returncode, json.loads(found.stdout)) == (0, []), found
        assert re.match(r"plain consumers get the [\d,]+ committed records of verified, and nothing else", found.stderr)
        await held.abort()


def verify_plain(world: World, topic: str) -> subprocess.CompletedProcess[str]:
    setting = f"pulsar.admin_url={world.broker.admin}"
    return txnbuf("verify", world.address, topic, "--plain", "--set", setting, "--output", "json")


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
            found = await asyncio.to_thread(verify_plain, plain_world, "orders")
            assert found.returncode == 1
            assert "extra" in {one["what"] for one in json.loads(found.stdout)}
            assert "its broker has no plug-in: run txnbuf plugin check" in found.stderr
    finally:
        plain_world.close()
        cluster.drop(plain_world.namespace)
