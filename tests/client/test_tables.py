"""Topics as Arrow tables: columns, decoded keys and values, and streams for what memory does not hold."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from txnbuffer import InvalidMessage, JsonDeserializer, JsonSerializer, SyncClient, UndecodableValue, connect
from txnbuffer.errors import InvalidRequest


@pytest.fixture
def client() -> Iterator[SyncClient]:
    with connect("memory:", deserializers=JsonDeserializer()) as client:
        yield client


def send(client: SyncClient, *values: Any, topic: str = "orders") -> None:
    for number, value in enumerate(values):
        client.send(topic, value, key=f"k{number}", serializer=JsonSerializer())


def test_a_table_has_the_columns_that_are_asked_for(client: SyncClient) -> None:
    send(client, 1, 2)
    assert client.read_table("orders").num_columns == 9
    table = client.read_table("orders", columns=["seqno", "key"], decode={"key": "text"})
    assert table.to_pydict() == {"seqno": [1, 2], "key": ["k0", "k1"]}
    assert client.read_table("orders", columns=["value"]).to_pydict() == {"value": [b"1", b"2"]}


def test_json_of_all_records_has_one_type(client: SyncClient) -> None:
    send(client, {"price": 1, "tags": ["a"]}, {"price": 2})
    client.delete("orders", "k0")
    send(client, {"price": 2.5, "buyer": {"name": "b"}}, topic="other")
    for form in ("json", "deserializer"):
        table = client.read_table(["orders", "other"], columns=["value"], decode={"value": form})
        rows = [row for row in table["value"].to_pylist() if row is not None]
        assert {row["price"] for row in rows} == {1.0, 2.0, 2.5}
        assert rows[0] == {"price": 1.0, "tags": ["a"], "buyer": None}
        assert table["value"].null_count == 1
        assert pl.from_arrow(table).shape == (4, 1)
        assert table.to_pandas().shape == (4, 1)


def test_a_record_that_does_not_fit_is_named(client: SyncClient) -> None:
    send(client, *[{"price": number} for number in range(5)], {"price": "x"}, {"price": 7})
    (position,) = [record.position for record in committed(client) if record.seqno == 6]
    with pytest.raises(UndecodableValue, match=f"topic 'orders': the value of the record at {position} ") as caught:
        client.read_table("orders", decode={"value": "json"})
    assert caught.value.position == position
    send(client, *[{"price": "x"}] * 3, topic="other")
    with pytest.raises(UndecodableValue, match=r"does not fit .*string|does not fit .*int64"):
        client.read_table(["orders", "other"], until={"orders": position._replace(entry=0)}, decode={"value": "json"})


def committed(client: SyncClient) -> list[Any]:
    with client.reader("orders", until="now") as reader:
        return [*reader.records()]


@pytest.mark.parametrize(
    ("decode", "what"), [({"value": "json"}, "value"), ({"value": "text"}, "value"), ({"key": "text"}, "key")]
)
def test_a_record_that_cannot_be_decoded_is_named(decode: Any, what: str) -> None:
    with connect("memory:") as client:
        client.send("orders", b"1", key=b"k")
        client.send("orders", b"\xff{", key=b"\xff")
        position = client.last_visible("orders")
        with pytest.raises(UndecodableValue, match=f"the {what} of the record at {position} can't be decoded"):
            client.read_table("orders", decode=decode)
        assert client.read_table("orders", columns=["seqno"], decode=decode).num_rows == 2


def test_a_stream_of_batches_for_other_programs(client: SyncClient) -> None:
    send(client, *[{"price": number} for number in range(25)])
    with client.reader("orders", until="now") as reader:
        stream = reader.arrow_batches(columns=["seqno", "value"], decode={"value": "json"}, limit=10)
        assert hasattr(stream, "__arrow_c_stream__")
        frame = pl.DataFrame(stream)  # through the stream interface
        assert frame["value"].struct.field("price").sum() == sum(range(25))
        reader.seek("beginning")
        assert reader.arrow_batches().read_pandas().shape == (25, 9)
        reader.seek("beginning")
        assert [batch.num_rows for batch in reader.arrow_batches(limit=10)] == [10, 10, 5]
        assert reader.arrow_batches(decode={"value": "text"}).read_all().num_rows == 0
        send(client, {"price": 1.5})
        reader.seek("beginning")
        (*_, last) = committed(client)
        with pytest.raises(UndecodableValue, match=f"{last.position} can't be decoded: its type .*; read_table finds"):
            reader.arrow_batches(decode={"value": "json"}, limit=10).read_all()


def test_columns_that_are_not_asked_for_take_no_memory() -> None:
    with connect("memory:") as client:
        for number in range(40):
            client.send("orders", b"v" * 100_000, key=f"{number}")
        tracemalloc.start()
        try:
            table = client.read_table("orders", columns=["key"])
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (table.num_rows, table.nbytes < 1000, kept < 1_000_000) == (40, True, True)


def test_both_clients_read_tables() -> None:
    async def read() -> pa.Table:
        async with connect("memory:") as client:
            await client.send("orders", json.dumps({"a": 1}))
            return await client.read_table("orders", decode={"value": "json"})

    assert asyncio.run(read())["value"].to_pylist() == [{"a": 1}]


@pytest.mark.parametrize(
    "options",
    [{"columns": ["price"]}, {"columns": "key"}, {"columns": []},
     {"decode": {"value": "xml"}}, {"decode": {"txn": "text"}}, {"decode": {"key": "deserializer"}}],
)  # fmt: skip
def test_wrong_arguments_are_refused(client: SyncClient, options: Any) -> None:
    send(client, 1)
    with pytest.raises(InvalidRequest, match=r"columns must|decode gives"):
        client.read_table("orders", **options)


def test_a_table_needs_an_end(client: SyncClient) -> None:
    send(client, 1)
    with client.reader("orders") as reader, pytest.raises(InvalidRequest, match="a table needs an end"):
        reader.arrow_batches()


def test_columns_of_a_batch_can_be_sent_again(client: SyncClient) -> None:
    send(client, {"price": 1}, [2], "three")
    with client.reader("orders", until="now") as reader:
        [batch] = reader.batches()
    columns = batch.messages
    assert isinstance(columns.values, Sequence)
    with client.transaction() as txn:
        txn.send_many("copies", columns.values, keys=columns.keys)
        txn.send_many("copies", columns.values[1:], keys=columns.keys[1:])
    with client.reader("copies", until="now") as reader:
        found = [(record.key, record.value) for record in reader.records()]
    everything = [(b"k0", {"price": 1}), (b"k1", [2]), (b"k2", "three")]
    assert found == [*everything, *everything[1:]]
    client.delete("orders", "k0")
    with client.reader("orders", until="now") as reader:
        [batch] = reader.batches()
    with client.transaction() as txn, pytest.raises(InvalidMessage, match="call delete"):
        txn.send_many("copies", batch.messages.values, keys=batch.messages.keys)
