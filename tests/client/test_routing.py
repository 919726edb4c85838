"""Partitioned topics: sends are routed to partitions, and readers of the topic read all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest
from client.direct_world import DirectWorld, in_direct_world
from client_world import until, values

from broker_io.errors import ServiceUnavailable, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.partitions import choose, partition_name
from broker_io.port import Broker
from txnbuffer import Client, CommittedReader, Outcome, Record, Transaction, connect
from txnbuffer.client.path import routing
from txnbuffer.client.reading import reader as reader_module
from txnbuffer.errors import InvalidRequest

WIDE = [partition_name("wide", number) for number in range(3)]


def everything(broker: Broker, topics: Iterable[str] = WIDE) -> list[list[bytes | None]]:
    return [values(broker, topic) for topic in topics]


async def wide(world: DirectWorld, count: int = 3) -> Client:
    world.broker.partition("wide", count)
    return await world.client()


@in_direct_world
async def test_records_with_keys_are_routed_by_key(world: DirectWorld) -> None:
    client = await wide(world)
    keys = [str(number).encode() for number in range(50)]
    async with client.transaction() as txn:
        await txn.send_many("wide", keys, keys=keys, properties=[{"p": "q"}] * 50, event_times=[*range(50)])
        await txn.send("wide", b"by itself", key=keys[7])
        await txn.delete("wide", keys[8])
        await txn.send("narrow", b"elsewhere")
    assert await client.outcome(txn.id) is Outcome.COMMIT
    chosen = choose(keys, 3).tolist()
    wanted: list[list[bytes | None]] = [
        [key for key, place in zip(keys, chosen, strict=True) if place == n] for n in range(3)
    ]
    wanted[chosen[7]].append(b"by itself")
    wanted[chosen[8]].append(None)
    await until(lambda: everything(world.broker) == wanted)
    await until(lambda: values(world.broker, "narrow") == [b"elsewhere"])
    assert "wide" not in world.broker.topics()
    with CommittedReader(world.broker, WIDE[chosen[20]]) as reader:
        batch = reader.read(timeout=60)
        assert batch is not None
        rows = {record.key: record for record in batch}
        assert (rows[b"20"].properties, rows[b"20"].event_time) == ({"p": "q"}, 20)


@in_direct_world
async def test_records_without_a_key_are_sent_to_partitions_in_turn(world: DirectWorld) -> None:
    client = await wide(world)
    for number in range(6):
        await client.send_many("wide", [str(number)] * 4, batching="records" if number % 2 else "messages")
    found = everything(world.broker)
    assert [len(one) for one in found] == [8, 8, 8]
    assert all(len(set(one)) == 2 for one in found)


@in_direct_world
async def test_partition_can_be_given(world: DirectWorld) -> None:
    client = await wide(world)
    await client.send("wide", b"1", key="k", partition=2)
    await client.send(WIDE[0], b"0")
    async with client.transaction() as txn:
        await txn.send_many("wide", [b"2", b"3"], partition=2)
        await txn.delete("wide", "k", partition=2)
        for wrong in (3, -1, "1"):
            with pytest.raises(InvalidRequest, match="partition"):
                await txn.send("wide", b"lost", partition=wrong)  # type: ignore[arg-type]  # one is none
        with pytest.raises(InvalidRequest, match="no partitions"):
            await txn.send("narrow", b"lost", partition=0)
    await until(lambda: everything(world.broker) == [[b"0"], [], [b"1", b"2", b"3", None]])
    world.broker.partition("wide", 4)
    await client.send("wide", b"4", partition=3)
    await client.delete("wide", "k", partition=3)
    assert values(world.broker, partition_name("wide", 3)) == [b"4", None]


@in_direct_world
async def test_first_sends_to_a_topic_keep_their_order(world: DirectWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    partitions = MemoryBroker.partitions

    def slow(broker: MemoryBroker, topic: str) -> int:
        asked.append(topic)
        if len(asked) == 1:
            time.sleep(0.2)  # a later request would overtake this one
        return partitions(broker, topic)

    client = await world.client()
    monkeypatch.setattr(MemoryBroker, "partitions", slow)
    await asyncio.gather(*(client.send("log", str(number)) for number in range(5)))
    assert values(world.broker, "log") == [b"0", b"1", b"2", b"3", b"4"]
    assert asked.count("log") == 1


def test_embedded_log_has_no_partitions() -> None:
    with connect("memory:") as client:
        with pytest.raises(InvalidRequest, match="no partitions"):
            client.send("log", b"1", partition=0)
        with pytest.raises(InvalidRequest, match="no partitions"), client.transaction() as txn:
            txn.send("log", b"1", partition=0)


@in_direct_world
async def test_new_partitions_are_found_and_an_outage_changes_nothing(
    world: DirectWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "REFRESH", 0.0)
    client = await wide(world, 1)
    await client.send("wide", b"first")
    (handle,) = world.handles
    counted, handle.partitions = handle.partitions, away  # type: ignore[method-assign]  # the cluster is away
    await client.send("wide", b"second")
    assert values(world.broker, WIDE[0]) == [b"first", b"second"]
    handle.partitions = counted  # type: ignore[method-assign]  # it is back
    world.broker.partition("wide", 2)
    while not values(world.broker, WIDE[1]):
        await client.send("wide", b"later")


def away(topic: str) -> int:
    raise ServiceUnavailable(f"nobody tells of {topic}")


@in_direct_world
async def test_transaction_that_ended_during_routing_rejects_the_send(world: DirectWorld) -> None:
    client = await wide(world)
    txn = await client.transaction().begin()
    sending = asyncio.ensure_future(txn.send("wide", b"late"))
    await asyncio.sleep(0)
    await txn.abort()
    with pytest.raises(InvalidRequest, match="has ended"):
        await sending


def test_reader_reads_existing_and_added_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PARTITION_CHECK_INTERVAL", 0.0)
    with MemoryBroker() as broker:
        broker.partition("wide", 2)
        write(broker, WIDE[0], b"a")
        write(broker, WIDE[1], b"b")
        with CommittedReader(broker, "wide") as reader, CommittedReader(broker, "wide", start="end") as late:
            found = [next_record(reader), next_record(reader)]
            assert sorted((record.topic, record.value) for record in found) == [(WIDE[0], b"a"), (WIDE[1], b"b")]
            assert late.read() is None
            broker.partition("wide", 3)
            write(broker, WIDE[2], b"c")
            for each in (reader, late):
                record = next_record(each)
                assert (record.topic, record.value) == (WIDE[2], b"c")
                assert each.read() is None
            assert {*reader.lag()} == {*WIDE}
        place = found[0].position
        with CommittedReader(
            broker, "wide", start={WIDE[0]: "end", "wide": datetime.now(UTC) + timedelta(hours=1)}
        ) as reader:
            assert reader.read() is None
        with pytest.raises(InvalidRequest, match="one partition"):
            CommittedReader(broker, "wide", start=place)
        with pytest.raises(InvalidRequest, match="narrow-partition-0"):
            CommittedReader(broker, "wide", start={"narrow-partition-0": place})
        with pytest.raises(TopicNotFound, match="narrow"):
            CommittedReader(broker, ["wide", "narrow"])


def test_reader_waits_until_the_first_partition_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PARTITION_CHECK_INTERVAL", 0.0)
    with MemoryBroker() as broker:
        broker.log.partitions["wide"] = 1
        with CommittedReader(broker, "wide") as reader:
            assert reader.read(timeout=0.02) is None
            broker.partition("wide", 1)
            write(broker, WIDE[0], b"a")
            assert next_record(reader).value == b"a"


def write(broker: MemoryBroker, topic: str, value: bytes) -> None:
    from broker_io.batch import Batch, Message

    with broker.writer(topic) as writer:
        writer.append(Batch.of([Message(None, value)])).result(60)


def next_record(reader: CommittedReader) -> Record:
    batch = reader.read(timeout=60.0)
    assert batch is not None
    (record,) = batch
    return record


@in_direct_world
async def test_group_continues_in_each_partition(world: DirectWorld) -> None:
    client = await wide(world)
    world.broker.create_topic("copied")

    async def copy(txn: Transaction, record: Record) -> None:
        await txn.send("copied", record.value)

    for first in (0, 20):
        numbers = [str(number).encode() for number in range(first, first + 20)]
        await client.send_many("wide", numbers, keys=numbers)
        work = asyncio.create_task(client.process("wide", "group", copy, batch=3))
        await until(lambda wanted=first + 20: len(values(world.broker, "copied")) == wanted)
        work.cancel()
        await asyncio.wait([work])
    assert sorted(values(world.broker, "copied"), key=lambda value: int(value or b"")) == [
        str(number).encode() for number in range(40)
    ]
