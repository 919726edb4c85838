"""The asyncio client on an engine in the same process: what an application can rely on."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from client_world import World, in_world, read_all, run, until, values

from broker_io.errors import InvalidAddress, InvalidMessage, InvalidTopicName, MessageTooLarge
from txnbuffer import (
    AvroSerializer,
    JsonSerializer,
    Outcome,
    connect,
)
from txnbuffer.client.path.send_columns import PROPERTY_BYTES
from txnbuffer.client.transaction import CHUNK
from txnbuffer.errors import InvalidRequest, TransactionCommitted


@in_world
async def test_records_of_a_transaction_become_visible_together(world: World) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        await txn.send("orders", b"one", key="a")
        await txn.send("stock", "zwölf", key=b"b", properties={"colour": "red"}, ordering_key="o", event_time=7)
        await until(lambda: "orders" in world.broker.topics())
        assert read_all(world.broker, "orders") == []
    (order,), (item,) = read_all(world.broker, "orders"), read_all(world.broker, "stock")
    assert (order.key, order.value, order.properties, order.txn) == (b"a", b"one", {}, txn.id)
    assert (item.value, item.properties) == ("zwölf".encode(), {"colour": "red", "ordering_key": "o"})
    assert item.event_time == 7
    assert await client.outcome(txn.id) is Outcome.COMMIT
    assert await client.outcome(str(txn.id)) is Outcome.COMMIT


@in_world
async def test_an_exception_aborts(world: World) -> None:
    client = await world.client()
    with pytest.raises(ZeroDivisionError):
        async with client.transaction() as txn:
            await txn.send("orders", b"never")
            await txn.send_many("orders", [b"never"] * 3)
            raise ZeroDivisionError
    async with client.transaction() as other:
        await other.send("orders", b"visible")
    assert values(world.broker, "orders") == [b"visible"]
    assert await client.outcome(txn.id) is Outcome.ABORT


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("abort_first", [False, True])
@in_world
async def test_one_of_a_commit_and_an_abort_at_the_same_time_takes_effect(
    world: World, named: bool, abort_first: bool
) -> None:
    client = await world.client()
    txn = await client.transaction(**({"name": "n", "number": 1} if named else {})).begin()
    await txn.send("orders", b"one")
    calls = [txn.abort(), txn.commit()] if abort_first else [txn.commit(), txn.abort()]
    winner, loser = await asyncio.gather(*calls, return_exceptions=True)
    assert winner is None
    if abort_first:
        assert isinstance(loser, InvalidRequest)
        assert f"{txn.id} has ended" in str(loser)
    else:
        assert isinstance(loser, TransactionCommitted)
    assert await client.outcome(txn.id) is (Outcome.ABORT if abort_first else Outcome.COMMIT)
    stored = values(world.broker, "orders") if "orders" in world.broker.topics() else []
    assert stored == ([] if abort_first else [b"one"])


@in_world
async def test_an_abort_during_a_commit_that_fails_does_nothing(world: World) -> None:
    client = await world.client()
    txn = await client.transaction().begin()
    await txn.send("orders", b"one")
    txn.fail(MessageTooLarge("too large"))
    committed, aborted = await asyncio.gather(txn.commit(), txn.abort(), return_exceptions=True)
    assert isinstance(committed, MessageTooLarge)
    assert aborted is None


@in_world
async def test_block_may_commit_or_abort_explicitly(world: World) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        await txn.send("orders", b"one")
        await txn.commit(wait_visible=True)
        assert values(world.broker, "orders") == [b"one"]
        with pytest.raises(InvalidRequest, match="has ended"):
            await txn.send("orders", b"two")
        with pytest.raises(InvalidRequest, match="has ended"):
            await txn.commit()
        with pytest.raises(TransactionCommitted):
            await txn.abort()
    async with client.transaction() as aborted:
        await aborted.send("orders", b"never")
        await aborted.abort()
        assert await client.outcome(aborted.id) is Outcome.ABORT
    assert await client.outcome(txn.id) is Outcome.COMMIT


@in_world
async def test_a_commit_behind_an_older_open_transaction_is_visible_once_that_has_ended(world: World) -> None:
    client = await world.client()
    async with client.transaction() as older:
        await older.send("orders", b"older")
        await until(lambda: "orders" in world.broker.topics() and world.broker.last_position("orders") is not None)
        async with client.transaction() as txn:
            await txn.send("orders", b"newer")
            await txn.commit()
        assert values(world.broker, "orders") == []
        await older.abort()
    await until(lambda: values(world.broker, "orders") == [b"newer"])


@in_world
async def test_a_transaction_without_records_commits(world: World) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        pass
    assert await client.outcome(txn.id) is Outcome.COMMIT


@in_world
async def test_records_keep_their_order_within_a_transaction_and_topic(world: World) -> None:
    client = await world.client()

    async def write(name: str) -> None:
        async with client.transaction() as txn:
            for index in range(20):
                await txn.send("log", f"{name}{index}")
                if index % 7 == 0:
                    await asyncio.sleep(0)

    await asyncio.gather(*(write(name) for name in "abcdef"))
    found = [(value or b"").decode() for value in values(world.broker, "log")]
    for name in "abcdef":
        assert [value for value in found if value[0] == name] == [f"{name}{index}" for index in range(20)]


@in_world
async def test_send_many_and_delete(world: World) -> None:
    client = await world.client()
    count = CHUNK * 2 + 5
    async with client.transaction() as txn:
        await txn.send_many("log", [b"%d" % index for index in range(count)], keys=[None] * (count - 1) + ["k"])
        await txn.send_many("log", [])
        await txn.delete("log", "k", properties={"a": "1"})
    found = read_all(world.broker, "log")
    assert [record.value for record in found] == [*(b"%d" % index for index in range(count)), None]
    assert [record.key for record in found[-3:]] == [None, b"k", b"k"]
    assert found[-1].properties == {"a": "1"}
    assert [record.seqno for record in found] == list(range(1, count + 2))


@in_world
async def test_send_many_with_all_columns(world: World) -> None:
    client = await world.client()
    time = datetime(2026, 1, 2, tzinfo=UTC)
    async with client.transaction() as txn:
        await txn.send_many("log", ["x", "y"], event_times=[None, time], properties=[{"a": "1"}, None])
        await txn.send("log", "z", properties={"b": "2"})
        with pytest.raises(InvalidMessage, match="keys must have 2 items as values has, got 1"):
            await txn.send_many("log", ["x", "y"], keys=["k"])
    found = read_all(world.broker, "log")
    assert [record.properties for record in found] == [{"a": "1"}, {}, {"b": "2"}]
    assert [record.event_time for record in found] == [0, round(time.timestamp() * 1000), 0]


@in_world
async def test_ordinary_records_and_transactions_on_one_topic(world: World) -> None:
    client = await world.client()
    await client.send("log", b"first", key="k", properties={"a": "1"})
    async with client.transaction() as txn:
        await txn.send("log", b"second")
    await client.send_many("log", [b"third", b"fourth"])
    await client.delete("log", "k", properties={"b": "2"})
    found = read_all(world.broker, "log")
    assert [record.value for record in found] == [b"first", b"second", b"third", b"fourth", None]
    assert (found[4].key, found[4].properties) == (b"k", {"b": "2"})
    assert [record.txn for record in found] == [None, txn.id, None, None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": 1}, "bytes or text, got int"),
        ({"value": None}, "call delete to delete a key"),
        ({"value": b"", "key": 1}, "a key must be bytes or text"),
        ({"value": b"", "properties": {"tb.txn": "0:1"}}, "reserved prefix 'tb.'"),
        ({"value": b"", "properties": {"a": 1}}, "must be text"),
        ({"value": b"", "event_time": datetime(2026, 1, 1)}, "no time zone"),
        ({"value": b"", "event_time": -1}, "milliseconds since 1970"),
        ({"value": b"", "event_time": True}, "milliseconds since 1970"),
    ],
)
@in_world
async def test_invalid_record_is_rejected_and_the_transaction_commits(
    world: World, arguments: dict[str, object], message: str
) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        with pytest.raises(InvalidMessage, match=message):
            await txn.send("log", **arguments)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(InvalidMessage, match=message):
            await client.send("log", **arguments)  # type: ignore[arg-type]  # wrong on purpose
        await txn.send("log", b"right")
    assert values(world.broker, "log") == [b"right"]


@in_world
async def test_too_large_record_is_rejected_before_it_is_sent(world: World) -> None:
    client = await world.client()
    limit = world.engine.limits.max_message_bytes - PROPERTY_BYTES
    async with client.transaction() as txn:
        with pytest.raises(MessageTooLarge, match=f"exceeds the limit of {limit}"):
            await txn.send("log", bytes(limit + 1))
        with pytest.raises(MessageTooLarge):
            await txn.send_many("log", [b"small", bytes(limit + 1)])
        await txn.send_many("log", [bytes(limit), b"small", bytes(limit)])
    assert [len(value or b"") for value in values(world.broker, "log")] == [limit, 5, limit]


@in_world
async def test_invalid_topic_name_is_rejected(world: World) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        with pytest.raises(InvalidTopicName):
            await txn.send("", b"v")
        await txn.send("log", b"v")
    async with client.transaction() as internal:
        for send in (internal.send("__txnbuffer_snapshots", b"v"), internal.send_many("__txnbuffer_x", [b"v"])):
            with pytest.raises(InvalidTopicName, match="does not begin with __txnbuffer"):
                await send
        with pytest.raises(InvalidTopicName, match="does not begin with __txnbuffer"):
            await internal.delete("__txnbuffer_x", b"k")
    with pytest.raises(InvalidTopicName, match="__txnbuffer"):
        await client.send("__txnbuffer_decisions", b"v")
    assert values(world.broker, "log") == [b"v"]


@in_world
async def test_many_different_properties_are_sent_in_several_sends(world: World) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        for index in range(1500):
            await txn.send("log", b"v", properties={f"p{index}": "1"})
    assert len(values(world.broker, "log")) == 1500


async def test_serializers() -> None:
    async with connect("memory:client-serializers", serializer=JsonSerializer()) as client:
        avro = AvroSerializer({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]})
        async with client.transaction() as txn:
            await txn.send("log", {"n": 1})
            await txn.send("log", b"bytes stay bytes")
            await txn.send_many("log", ["text", 2, [None]])
            await txn.send("log", {"n": 3}, serializer=avro)
            with pytest.raises(InvalidRequest, match="JSON"):
                await txn.send("log", {1, 2})
            with pytest.raises(InvalidRequest, match="Avro"):
                await txn.send("log", {"m": 3}, serializer=avro)
        async with await client.reader("log") as reader:
            batch = await reader.read(timeout=60)
        assert batch is not None
        found = [record.value or b"" for record in batch]
        assert found[:5] == [b'{"n":1}', b"bytes stay bytes", b'"text"', b"2", b"[null]"]
        assert avro.loads(found[5]) == {"n": 3}
        assert JsonSerializer().loads(found[0]) == {"n": 1}
        with pytest.raises(InvalidRequest):
            JsonSerializer().loads(found[1])
        with pytest.raises(InvalidRequest):
            avro.loads(found[1])


@in_world
async def test_thousands_of_concurrent_transactions(world: World) -> None:
    client = await world.client()

    async def one(index: int) -> None:
        async with client.transaction() as txn:
            await txn.send("log", b"%d" % index)

    await asyncio.gather(*(one(index) for index in range(3000)))
    assert sorted(int(value or b"") for value in values(world.broker, "log")) == list(range(3000))


def test_file_log_is_persistent(tmp_path: object) -> None:
    address = f"file:{tmp_path}/log"

    async def write(value: bytes) -> None:
        async with connect(address) as client, client.transaction() as txn:
            await txn.send("log", value)

    async def read() -> list[bytes | None]:
        client = await connect(address)
        try:
            async with await client.reader("log") as reader:
                batch = await reader.read(timeout=60)
                assert batch is not None
                # The new owner's border may come behind them at any moment; it holds no records.
                async with asyncio.timeout(60):
                    while (lag := (await reader.lag())["log"]) and (lag.behind, lag.undecided) != (0, 0):
                        assert await reader.read(timeout=0.1) is None
                return [record.value for record in batch]
        finally:
            await client.close()

    run(write(b"one"))
    run(write(b"two"))
    assert run(read()) == [b"one", b"two"]


@pytest.mark.parametrize("address", ["nowhere:", "txnbuf://host", "txnbuf://:1", "txnbuf://host:port"])
def test_invalid_address_is_rejected(address: str) -> None:
    async def test() -> None:
        async with connect(address):
            raise AssertionError

    with pytest.raises(InvalidAddress):
        run(test())
