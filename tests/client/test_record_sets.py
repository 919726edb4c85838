"""Record sets as applications send and read them: fewer messages, the same records."""

from __future__ import annotations

import asyncio
import random

import pytest
from client.direct_world import DirectWorld, in_direct_world
from client_world import until, values

from broker_io.batch import Message
from broker_io.errors import DiskFailed
from broker_io.port import Broker
from txnbuffer import CommittedReader, InvalidMessage, MessageTooLarge, Record, connect
from txnbuffer.client.reading import followers
from txnbuffer.errors import InvalidRequest
from txnbuffer.protocol import MARKER, RECORDS
from txnbuffer.recordset import SET_BYTES


def written(broker: Broker, topic: str = "log") -> list[Message]:
    """The messages of a topic as they stand in its log, without markers."""
    found: list[Message] = []
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            found += [message for message in placed.messages if MARKER not in message.properties]
    return found


def seen(broker: Broker, isolation: str = "read_committed") -> list[Record]:
    records: list[Record] = []
    with CommittedReader(broker, "log", isolation=isolation) as reader:
        while (batch := reader.read(limit=70)) is not None:
            assert len(batch) <= 70
            records += batch
    return records


@in_direct_world
async def test_records_of_a_transaction_are_packed_into_few_messages(world: DirectWorld) -> None:
    client = await world.client()
    sent = [str(number).encode() for number in range(5000)]
    async with client.transaction() as txn:
        await txn.send_many("log", sent, batching="records")
        for number in range(3):
            await txn.send("log", b"single", key=str(number), properties={"p": "q"}, batching="records")
    await until(lambda: values(world.broker, "log") == [*sent, *[b"single"] * 3])
    assert len(written(world.broker)) <= 3
    assert {message.properties["tb.txn"] for message in written(world.broker)} == {str(txn.id)}
    records = seen(world.broker)
    assert [record.seqno for record in records] == [*range(1, 5004)]
    assert all(record.position.batch >= 0 for record in records)
    assert [(record.key, record.properties) for record in records[-3:]] == [
        (b"0", {"p": "q"}),
        (b"1", {"p": "q"}),
        (b"2", {"p": "q"}),
    ]


@in_direct_world
async def test_default_is_one_message_per_record_and_can_be_changed(world: DirectWorld) -> None:
    client = await world.client()
    await client.send_many("log", [b"1", b"2"])
    client.batching = "records"
    await client.send_many("log", [b"3", b"4"])
    await client.send("log", b"5", batching="messages")
    async with client.transaction() as txn:
        await txn.send_many("log", [b"6", b"7"])
        await txn.delete("log", "k")
    await until(lambda: values(world.broker, "log") == [b"1", b"2", b"3", b"4", b"5", b"6", b"7", None])
    assert [message.properties.get(RECORDS) for message in written(world.broker)] == [None, None, "2", None, "3"]
    with pytest.raises(InvalidRequest, match="got 'all'"):
        await client.send("log", b"6", batching="all")  # type: ignore[arg-type]  # that is what it is about


@in_direct_world
async def test_messages_and_record_sets_keep_their_order_after_failures(world: DirectWorld) -> None:
    client = await world.client()
    await asyncio.gather(
        *(
            client.send("log", str(number), batching="records" if number % 3 == 0 else "messages")
            for number in range(60)
        )
    )
    assert values(world.broker, "log") == [str(number).encode() for number in range(60)]
    world.handles[0].faults.fail_append(DiskFailed("gone"), topic="log")
    results = await asyncio.gather(
        *(client.send("log", b"lost", batching="records" if number % 2 else "messages") for number in range(4)),
        return_exceptions=True,
    )
    assert any(isinstance(result, Exception) for result in results)
    await client.send("log", b"next", batching="records")
    await client.send("log", b"last")
    assert values(world.broker, "log")[-2:] == [b"next", b"last"]


@in_direct_world
async def test_record_set_waits_for_acknowledgement_of_earlier_messages(world: DirectWorld) -> None:
    client = await world.client()
    await client.send("log", b"0", batching="records")
    await client.send("log", b"1")
    faults = world.handles[0].faults
    faults.hold(topic="log")
    sends = [
        asyncio.ensure_future(client.send("log", b"2")),
        asyncio.ensure_future(client.send("log", b"3", batching="records")),
    ]
    await until(lambda: len(faults.held) == 1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(faults.held) == 1
    faults.release()
    await asyncio.gather(*sends)
    assert values(world.broker, "log") == [b"0", b"1", b"2", b"3"]


@in_direct_world
async def test_concurrent_transactions_share_a_send_but_not_a_record_set(world: DirectWorld) -> None:
    client = await world.client()
    async with client.transaction() as before:
        await before.send("log", b"registered")
    async with client.transaction() as one, client.transaction() as other:
        for number in range(10):
            await one.send("log", f"one {number}", batching="records")
            await other.send("log", f"other {number}", batching="records")
        await other.abort()
    await until(lambda: len(values(world.broker, "log")) == 11)
    assert values(world.broker, "log")[1:] == [f"one {number}".encode() for number in range(10)]
    assert len(written(world.broker)) < 10


@in_direct_world
async def test_record_set_respects_the_limit_unless_it_has_one_record(world: DirectWorld) -> None:
    client = await world.client()
    limit, chance = client.max_message_bytes, random.Random(1)
    large = [chance.randbytes(300_000) for _ in range(10)]
    largest = chance.randbytes(limit - 2000)
    async with client.transaction() as txn:
        await txn.send_many("log", large, properties=[{"p": "q"}] * 10, batching="records")
        await txn.send("log", largest, properties={"p": "q"}, batching="records")
        with pytest.raises(MessageTooLarge):
            await txn.send("log", chance.randbytes(limit - 500), batching="records")
    await until(lambda: values(world.broker, "log") == [*large, largest])
    sizes = [len(message.value or b"") for message in written(world.broker)]
    assert len(sizes) == 5
    assert max(sizes[:-1]) <= SET_BYTES


@in_direct_world
async def test_read_uncommitted_returns_large_record_sets_in_slices(
    world: DirectWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "TOGETHER", 25)
    client = await world.client()
    for first in range(0, 100, 10):
        numbers = [str(number) for number in range(first, first + 10)]
        await client.send_many("log", numbers, batching="records" if first < 80 else "messages")
    records = seen(world.broker, "read_uncommitted")
    assert [int(record.value or b"") for record in records] == [*range(100)]
    middle = records[34]
    with CommittedReader(world.broker, "log", start=middle.position, isolation="read_uncommitted") as reader:
        batch = reader.read()
        assert batch is not None
        assert next(iter(batch)).value == b"34"


def test_embedded_log_accepts_the_same_calls() -> None:
    with connect("memory:", batching="records") as client:
        with client.transaction() as txn:
            txn.send("log", b"1")
            txn.send_many("log", [b"2", b"3"], batching="records")
            txn.send("log", b"4", batching="messages")
        client.send("log", b"5", batching="records")
        with pytest.raises(InvalidMessage):
            client.send("log", 5, batching="records")
        with client.reader("log") as reader:
            found: list[bytes | None] = []
            while len(found) < 5 and (batch := reader.read(timeout=60.0)) is not None:
                found += [record.value for record in batch]
        assert found == [b"1", b"2", b"3", b"4", b"5"]
    with pytest.raises(InvalidRequest, match="batching must be"):
        connect("memory:", batching="sets")  # type: ignore[arg-type]  # that is what it is about
