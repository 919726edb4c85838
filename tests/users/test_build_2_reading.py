"""Build 2: reading as people read. Records and batches by name, data frames, deserializers, and seeks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pydantic
import pytest
from client_world import World, in_world
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from broker_io.errors import MissingDependency, PositionTrimmed
from txnbuffer import (
    AvroDeserializer,
    AvroSerializer,
    ChangeBatch,
    CommittedReader,
    JsonDeserializer,
    JsonSerializer,
    Position,
    ProtobufDeserializer,
    ProtobufSerializer,
    PydanticDeserializer,
    PydanticSerializer,
    Seqno,
    SyncClient,
    UndecodableValue,
    connect,
    dead_letter,
)
from txnbuffer.client.serializers import Deserializers
from txnbuffer.errors import InvalidRequest


@pytest.fixture
def client() -> Iterator[SyncClient]:
    """A client of a log whose topic `log` has the committed records 1 to 10, between aborted ones."""
    with connect("memory:") as client:
        for number in range(1, 11):
            aborted = client.transaction()
            with client.transaction() as txn:
                txn.send("log", b"%d" % number, key=f"k{number}", properties={"n": str(number)}, event_time=number)
            with aborted:
                aborted.send("log", b"no")
                aborted.abort()
        yield client


def numbers(records: Any) -> list[int]:
    return [int(record.value) for record in records]


def test_records_and_batches_are_iterated_by_name(client: SyncClient) -> None:
    with client.reader("log") as reader:
        assert numbers(reader.records(timeout=0.1)) == [*range(1, 11)]
    with client.reader("log") as reader:
        batches = [numbers(batch) for batch in reader.batches(limit=4, timeout=0.1)]
    assert max(map(len, batches)) <= 4
    assert [number for batch in batches for number in batch] == [*range(1, 11)]
    with client.reader("log") as reader:
        assert numbers(next(iter(reader)))[0] == 1


def test_a_loop_that_ends_early_loses_no_record(client: SyncClient) -> None:
    with client.reader("log") as reader:
        for record in reader.records():
            if record.value == b"3":
                break
        assert numbers(reader.read(limit=2) or ()) == [4, 5]
        assert next(reader.records()).value == b"6"
        assert [numbers(batch) for batch in reader.batches(timeout=0.1)] == [[7, 8, 9, 10]]


def test_records_that_come_later_are_yielded(client: SyncClient) -> None:
    with client.reader("log", start="latest") as reader:
        records = reader.records(timeout=60.0)
        client.send("log", b"11")
        assert next(records).value == b"11"


async def test_asyncio_readers_iterate_too() -> None:
    async with connect("memory:") as client:
        await client.send_many("log", [b"%d" % number for number in range(1, 8)])
        async with await client.reader("log", start="earliest") as reader:
            found = []
            async for record in reader.records(timeout=0.1):
                found.append(record)
                if len(found) == 2:
                    break
            assert numbers(found) == [1, 2]
            assert numbers(await reader.read(limit=2) or ()) == [3, 4]
            assert [numbers(batch) async for batch in reader.batches(timeout=0.1)] == [[5, 6, 7]]
            await reader.seek(Seqno(6))
            assert numbers([record async for record in reader.records(timeout=0.1)]) == [6, 7]


async def test_tasks_that_share_the_records_of_a_reader_get_each_once() -> None:
    async with connect("memory:") as client:
        await client.send_many("log", [b"%d" % number for number in range(100)])
        found: list[int] = []
        async with await client.reader("log") as reader:

            async def work() -> None:
                async for record in reader.records(timeout=0.2):
                    found.append(int(record.value))
                    await asyncio.sleep(0)

            await asyncio.gather(work(), work(), work())
        assert sorted(found) == [*range(100)]


async def test_a_seek_forgets_what_a_cancelled_read_has_read() -> None:
    async with connect("memory:") as client:
        await client.send_many("log", [b"%d" % number for number in range(1, 8)])
        async with await client.reader("log") as reader:
            reading = asyncio.ensure_future(reader.read(timeout=60.0))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await reader.seek(Seqno(5))
            assert numbers(await reader.read(timeout=60.0) or ()) == [5, 6, 7]


# Data frames


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def test_arrow_shares_the_columns_of_the_batch(client: SyncClient) -> None:
    with client.reader("log") as reader:
        batch = reader.read()
    assert batch is not None
    found = batch.to_arrow()
    assert found.schema.names == [
        "topic", "position", "seqno", "key", "value", "properties", "event_time", "publish_time", "txn",
    ]  # fmt: skip
    rows = found.to_pylist()
    assert [row["value"] for row in rows] == [b"%d" % number for number in range(1, 11)]
    assert [row["seqno"] for row in rows] == [*range(1, 11)]
    assert [row["position"] for row in rows] == [
        {"ledger": at.ledger, "entry": at.entry, "batch": at.batch} for at in batch.positions
    ]
    assert rows[2]["properties"] == [("n", "3")]
    assert rows[2]["event_time"] == datetime.fromtimestamp(0.003, UTC)
    assert {row["topic"] for row in rows} == {"log"}
    assert [row["txn"] for row in rows] == [str(record.txn) for record in batch]
    for name, own in (
        ("seqno", batch.seqnos), ("publish_time", batch.publish_times), ("event_time", batch.messages.event_times),
    ):  # fmt: skip
        assert found.column(name).buffers()[1].address == address(own)
    for name, blobs in (("key", batch.messages.keys), ("value", batch.messages.values)):
        _, offsets, data = found.column(name).buffers()
        assert (offsets.address, data.address) == (address(blobs.offsets), address(blobs.data))
    axes = zip(found.column("position").flatten(), (batch.positions.ledgers, batch.positions.entries), strict=False)
    assert all(axis.buffers()[1].address == address(own) for axis, own in axes)


def test_pandas_and_polars_get_the_same_rows(client: SyncClient) -> None:
    client.delete("log", "gone")
    with client.reader("log", start=Seqno(10)) as reader:
        batch = reader.read()
    assert batch is not None
    frame = batch.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame["value"].tolist() == [b"10", None]
    assert frame["seqno"].tolist() == [10, 11]
    assert frame["position.entry"].tolist() == batch.positions.entries.tolist()
    assert frame["properties"].tolist() == [{"n": "10"}, {}]
    assert frame["event_time"].isna().tolist() == [False, True]
    polars = batch.to_polars()
    assert isinstance(polars, pl.DataFrame)
    assert polars["value"].to_list() == [b"10", None]
    assert polars["seqno"].to_list() == [10, 11]
    assert polars["position"].struct.field("entry").to_list() == batch.positions.entries.tolist()
    assert polars["txn"].is_null().to_list() == [False, True]


def test_records_without_seqnos_have_null_in_frames(client: SyncClient) -> None:
    with client.reader("log", isolation="read_uncommitted") as reader:
        batch = reader.read(limit=3)
    assert batch is not None
    assert batch.seqnos is None
    assert batch.to_arrow().column("seqno").null_count == 3
    assert batch.to_pandas()["seqno"].isna().all()
    assert isinstance(batch.to_arrow(), pa.RecordBatch)


@pytest.mark.parametrize(
    ("library", "extra", "convert"),
    [
        ("pyarrow", "arrow", lambda batch: batch.to_arrow()),
        ("pandas", "pandas", lambda batch: batch.to_pandas()),
        ("pyarrow", "pandas", lambda batch: batch.to_pandas()),
        ("polars", "polars", lambda batch: batch.to_polars()),
        ("pydantic", "pydantic", lambda _: PydanticDeserializer(int)),
    ],
)
def test_a_missing_library_is_one_error_that_names_the_extra(
    library: str, extra: str, convert: Any, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.reader("log") as reader:
        batch = reader.read()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"needs {library}.*pip install 'txnbuffer\[{extra}\]'"):
        convert(batch)


# Deserializers


class Order(pydantic.BaseModel):
    apples: int


AVRO = {"type": "record", "name": "Order", "fields": [{"name": "apples", "type": "long"}]}


@pytest.mark.parametrize(
    ("serializer", "deserializer", "value", "wrong", "damaged"),
    [
        (JsonSerializer(), JsonDeserializer(), {"apples": 3}, {3}, b"{"),
        (AvroSerializer(AVRO), AvroDeserializer(AVRO), {"apples": 3}, {"pears": 3}, b""),
        (PydanticSerializer(Order), PydanticDeserializer(Order), Order(apples=3), {"apples": "x"}, b'{"apples":"x"}'),
        (ProtobufSerializer(StringValue), ProtobufDeserializer(StringValue), StringValue(value="3"), "3", b"\xff"),
    ],
)
def test_deserializers_mirror_serializers(
    serializer: Any, deserializer: Any, value: Any, wrong: Any, damaged: bytes
) -> None:
    assert deserializer.loads(serializer.dumps(value)) == value
    assert serializer.loads(serializer.dumps(value)) == value
    with pytest.raises(InvalidRequest):
        serializer.dumps(wrong)
    with pytest.raises(InvalidRequest):
        deserializer.loads(damaged)
    with connect("memory:", serializer={"typed": serializer}, deserializers={"typed": deserializer}) as client:
        client.send("typed", value)
        client.delete("typed", "key")
        client.send("bytes", b"raw")
        with client.reader(["typed", "bytes"]) as reader:
            found = [(record.topic, record.value) for record in reader.records(timeout=0.1)]
        assert [value for topic, value in found if topic == "typed"] == [value, None]
        assert [value for topic, value in found if topic == "bytes"] == [b"raw"]


async def test_one_deserializer_for_all_topics_serves_asyncio_readers() -> None:
    async with connect("memory:", serializer=JsonSerializer(), deserializers=JsonDeserializer()) as client:
        await client.send("a", [1])
        await client.send("b", {"x": 2})
        async with await client.reader(["a", "b"]) as reader:
            found = [record.value async for record in reader.records(timeout=0.1)]
        assert sorted(found, key=str) == [[1], {"x": 2}]


def test_columns_keep_the_values_as_stored() -> None:
    with connect("memory:", deserializers=JsonDeserializer()) as client:
        client.send("log", b"[1]")
        with client.reader("log") as reader:
            batch = reader.read()
        assert batch is not None
        assert [record.value for record in batch] == [[1]]
        assert [record.value for record in batch.as_stored()] == [b"[1]"]
        assert batch.to_arrow().column("value").to_pylist() == [b"[1]"]


def test_a_value_that_cannot_be_decoded_is_named_and_can_be_passed() -> None:
    with connect("memory:", deserializers=JsonDeserializer()) as client:
        client.send_many("log", [b"1", b"{", b"3"])
        with client.reader("log") as reader:
            found = []
            with pytest.raises(UndecodableValue, match=r"topic 'log': the value of the record at \d+:1 can't"):
                found += [record.value for record in reader.records(timeout=0.1)]
            found += [record.value for record in reader.records(timeout=0.1)]
            assert found == [3]


def test_a_handler_gets_decoded_values_and_the_rest_goes_to_the_dead_letters() -> None:
    with connect("memory:", deserializers=JsonDeserializer()) as client:
        client.send_many("log", [b"1", b"{", b"3"], keys=["a", "b", "c"])
        found: list[Any] = []
        done = client.process(
            "log", "group", lambda txn, record: found.append(record.value),
            on_error=dead_letter("dead"), idle_timeout=0.5,
        )  # fmt: skip
        assert (done.records, done.dead_letters) == (2, 1)
        assert found[-1] == 3
        assert set(found) == {1, 3}
        with CommittedReader(client.client.open_broker(), "dead") as reader:
            (letter,) = reader.read() or ()
        assert (letter.key, letter.value) == (b"b", b"{")
        assert "UndecodableValue" in letter.properties["dead_letter_error"]


@pytest.mark.parametrize("wrong", [JsonDeserializer, 3, {"log": "json"}, {3: JsonDeserializer()}])
def test_what_is_no_deserializer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="deserializer"):
        connect("memory:", deserializers=wrong)


def test_partitions_have_the_deserializer_of_their_topic() -> None:
    mine, other = JsonDeserializer(), JsonDeserializer()
    chosen = Deserializers({"orders": mine, "stock": other})
    assert chosen.of("orders-partition-3") is mine
    assert chosen.of("stock") is other
    assert chosen.of("more") is None


def test_wrong_types_are_invalid_requests() -> None:
    with connect("memory:") as client, pytest.raises(InvalidRequest, match="a serializer needs a method dumps"):
        client.send("log", b"x", serializer=5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match="Avro schema"):
        AvroSerializer(5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        JsonDeserializer().loads(5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match="open_broker"):
        CommittedReader("file:x", "log")  # type: ignore[arg-type]  # on purpose


def test_classes_that_are_no_models_or_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="message class"):
        ProtobufDeserializer(Order)  # type: ignore[type-var]  # on purpose
    with pytest.raises(InvalidRequest, match="pydantic model"):
        PydanticDeserializer(asyncio)  # type: ignore[arg-type]  # on purpose


# Starts and seeks


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("earliest", [*range(1, 11)]),
        ("beginning", [*range(1, 11)]),
        ("latest", []),
        ("end", []),
        (Seqno(1), [*range(1, 11)]),
        (Seqno(8), [8, 9, 10]),
        (Seqno(11), []),
        ({"log": Seqno(9)}, [9, 10]),
        ({"log": "earliest"}, [*range(1, 11)]),
    ],
)
def test_readers_start_and_seek_at_the_same_places(client: SyncClient, start: Any, found: list[int]) -> None:
    with client.reader("log", start=start) as reader:
        assert numbers(reader.records(timeout=0.05)) == found
    with client.reader("log") as reader:
        for record in reader.records():
            if record.seqno == 5:
                break
        reader.seek(start)
        assert numbers(reader.records(timeout=0.05)) == found


def test_seek_takes_positions_and_times(client: SyncClient) -> None:
    with client.reader("log") as reader:
        records = [*reader.records(timeout=0.05)]
        reader.seek(records[6].position)
        assert numbers(reader.records(timeout=0.05)) == [7, 8, 9, 10]
        reader.seek(datetime.fromtimestamp(records[0].publish_time / 1000, UTC))
        assert numbers(reader.records(timeout=0.05))[-1] == 10
        reader.seek(datetime.now(UTC) + timedelta(hours=1))
        assert numbers(reader.records(timeout=0.05)) == []


def test_seek_of_some_topics_leaves_the_others_where_they_are(client: SyncClient) -> None:
    client.send_many("more", [b"1", b"2"])
    with client.reader(["log", "more"]) as reader:
        for record in reader.records(timeout=0.05):
            assert record.value
        reader.seek({"more": "beginning"})
        assert [record.topic for record in reader.records(timeout=0.05)] == ["more", "more"]


@pytest.mark.parametrize("wrong", ["start", 5, None, {"other": "end"}, {"log": "first"}])
def test_a_refused_seek_moves_nothing(client: SyncClient, wrong: Any) -> None:
    with client.reader("log") as reader:
        assert next(reader.records()).seqno == 1
        with pytest.raises(InvalidRequest):
            reader.seek(wrong)
        assert next(reader.records()).seqno == 2


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1", True, 2**63])
def test_invalid_seqnos_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a seqno is an integer"):
        Seqno(wrong)


def test_readers_of_uncommitted_records_have_no_seqnos(client: SyncClient) -> None:
    with pytest.raises(InvalidRequest, match="has no seqnos"):
        client.reader("log", isolation="read_uncommitted", start=Seqno(3))


def test_groups_start_at_seqnos_and_with_both_words(client: SyncClient) -> None:
    for start, found in ((Seqno(9), [9, 10]), ("latest", []), ("earliest", [*range(1, 11)])):
        handled: list[int] = []
        client.process(
            "log", f"group {start}", lambda _, record: handled.append(int(record.value)),  # noqa: B023
            start=start, idle_timeout=0.3,
        )  # fmt: skip
        assert handled == found


def test_change_streams_start_with_both_words(client: SyncClient) -> None:
    with client.stream("log", from_="earliest", to="now") as stream:
        assert sum(len(batch) for batch in stream if isinstance(batch, ChangeBatch)) == 10
    with client.stream("log", from_="latest", to="now") as stream:
        assert sum(len(batch) for batch in stream if isinstance(batch, ChangeBatch)) == 0


@in_world
async def test_a_trimmed_seqno_is_an_error(world: World) -> None:
    client = await world.client()
    for number in range(3):
        async with client.transaction() as txn:
            await txn.send("log", b"%d" % number)
        world.broker.roll("log")
    last = world.broker.ledgers("log")[2].ledger
    for _ in range(2):  # two snapshots keep what they need
        await world.engine.snapshots.snapshot(["log"])
    world.broker.trim("log", last)
    await world.engine.snapshots.snapshot(["log"])
    with CommittedReader(world.broker, "log", start=Seqno(3)) as reader:
        assert numbers(reader.records(timeout=0.0)) == [2]
    with pytest.raises(PositionTrimmed, match="topic log begins at seqno 3: seqno 2 was trimmed"):
        CommittedReader(world.broker, "log", start=Seqno(2))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("seek"), st.integers(1, 14)),
            st.tuples(st.just("place"), st.integers(0, 9)),
            st.tuples(st.just("read"), st.integers(1, 4)),
            st.tuples(st.just("next"), st.integers(1, 3)),
        ),
        max_size=12,
    )
)
def test_reads_and_seeks_agree_with_a_list(steps: list[tuple[str, int]]) -> None:
    with connect("memory:") as client:
        with client.transaction() as txn:
            txn.send_many("log", [b"%d" % number for number in range(1, 11)])
        with client.reader("log") as reader:
            positions: list[Position] = [record.position for record in reader.records(timeout=0.0)]
            reader.seek("earliest")
            at = 1
            for step, number in steps:
                if step == "seek":
                    reader.seek(Seqno(number))
                    at = number
                elif step == "place":
                    reader.seek(positions[number])
                    at = number + 1
                elif step == "read":
                    batch = reader.read(limit=number)
                    expected = [*range(at, min(at + number, 11))]
                    got = [] if batch is None else numbers(batch)
                    assert got == expected[: len(got)]
                    assert bool(got) == bool(expected)
                    at += len(got)
                else:
                    records = reader.records(timeout=0.0)
                    for _ in range(number):
                        record = next(records, None)
                        assert (None if record is None else record.seqno) == (at if at <= 10 else None)
                        at += record is not None


def test_batches_and_readers_say_what_they_are(client: SyncClient) -> None:
    with client.reader("log") as reader:
        assert repr(reader) == "<CommittedReader of 'log', open>"
        batch = reader.read(limit=1)
        assert batch is not None
        at = batch.positions.first
        assert repr(batch) == f"<RecordBatch of 'log': 1 record from {at} to {at}, seqnos 1 to 1>"
        assert repr(batch.take(slice(0))) == "<RecordBatch of 'log': 0 records>"
    assert repr(reader) == "<CommittedReader of 'log', closed>"
