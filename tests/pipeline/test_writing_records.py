"""Arrow columns as records: each row becomes its record, with any slices, nulls and types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from broker_io.batch import NO_TIME, Batch, Message, PlacedBatch
from broker_io.errors import CallerError
from broker_io.position import Positions
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.arrow import record_batch, schema_of
from txnbuffer.pipeline.options import TRANSACTION_TIMEOUT, ReadOptions, WriteOptions
from txnbuffer.pipeline.reading import RecordRows
from txnbuffer.pipeline.spark.sink import batches_of, check_schema

TYPES = {
    "topic": [pa.string(), pa.large_string()],
    "key": [pa.binary(), pa.string(), pa.large_binary()],
    "value": [pa.binary(), pa.string(), pa.large_string()],
    "properties": [pa.map_(pa.string(), pa.string())],
    "event_time": [pa.timestamp("us", tz="UTC")],
}
SERVICE = {"broker": "txnbuf://h:1"}


def rows() -> st.SearchStrategy[list[dict[str, Any]]]:
    texts = st.sampled_from(["", "a", "b", "7", "-3", "ü"])
    properties = st.dictionaries(st.sampled_from(["p", "q", "r"]), texts | st.none())
    row = st.fixed_dictionaries(
        {
            "topic": st.sampled_from(["one", "two"]),
            "key": texts,
            "value": texts | st.none(),
            "properties": properties | st.none(),
            "event_time": st.integers(0, 2**50) | st.none(),
        }
    )
    return st.lists(row, min_size=1, max_size=12)


def record(row: dict[str, Any]) -> Message:
    texts = {name: text for name, text in (row["properties"] or {}).items() if text is not None}
    value = None if row["value"] is None else row["value"].encode()
    return Message(row["key"].encode(), value, texts, (row["event_time"] or 0) // 1000)


@given(rows=rows(), skipped=st.integers(0, 3), data=st.data())
def test_rows_become_records(rows: list[dict[str, Any]], skipped: int, data: st.DataObject) -> None:
    columns = {}
    for name, kinds in TYPES.items():
        kind = data.draw(st.sampled_from(kinds))
        cells = [row[name] for row in rows]
        if name in ("key", "value") and "binary" in str(kind):
            cells = [None if cell is None else cell.encode() for cell in cells]
        if name == "properties":
            cells = [None if cell is None else [*cell.items()] for cell in cells]
        columns[name] = pa.array(cells, kind)
    found: dict[str, list[Message]] = {}
    for topic, batch in batches_of(pa.RecordBatch.from_pydict(columns).slice(skipped), None):
        found.setdefault(topic, []).extend(batch)
    expected: dict[str, list[Message]] = {}
    for row in rows[skipped:]:
        expected.setdefault(row["topic"], []).append(record(row))
    assert found == expected


def test_the_epoch_is_no_event_time() -> None:
    """As on Pulsar; an export has null, which an audit treats as equal."""
    times = pa.array([0, 999, 1000, None, 1999], TYPES["event_time"][0])
    ((topic, records),) = batches_of(
        pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 5), "event_time": times}), "t"
    )
    assert [message.event_time for message in records] == [NO_TIME, NO_TIME, 1, NO_TIME, 1]
    for written in (records, Batch(records.keys, records.values)):
        placed = PlacedBatch(Positions.consecutive(1, 0, 5), np.ones(5, np.int64), written)
        rows = record_batch(RecordRows(topic, placed, None, None, None), schema_of(("event_time",)))
        expected = [None, None, 1000, None, 1000] if written is records else [None] * 5
        assert rows["event_time"].cast("int64").to_pylist() == expected


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array([b"v"]), **columns})


def test_the_option_topic_and_the_column_value_suffice() -> None:
    ((topic, records),) = batches_of(batch(), "t")
    assert (topic, [*records]) == ("t", [Message(None, b"v")])


def test_rows_with_many_different_properties_are_split() -> None:
    """The limit applies to one record: rows together may have any number of names."""
    count = 1200
    cells = [[(f"trace-{number}", "1")] for number in range(count)]
    columns = {"value": pa.array([b"v"] * count), "properties": pa.array(cells, TYPES["properties"][0])}
    topics = pa.array([("one", "two")[number % 2] for number in range(count)])
    for rows in (pa.RecordBatch.from_pydict(columns), pa.RecordBatch.from_pydict({**columns, "topic": topics})):
        found: dict[str, list[str]] = {}
        for topic, records in batches_of(rows, None if "topic" in rows.schema.names else "t"):
            assert len(records.properties) <= 500
            found.setdefault(topic, []).extend(name for record in records for name in record.properties)
        names = [f"trace-{number}" for number in range(count)]
        assert found == ({"one": names[::2], "two": names[1::2]} if "topic" in rows.schema.names else {"t": names})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"topic": pa.array([None], pa.string())}, "column topic of a row is null"),
        ({"value": pa.array([None], pa.binary())}, "key and value of a row are null"),
        ({"event_time": pa.array([-1], pa.timestamp("us", tz="UTC"))}, "before 1970"),
        ({"properties": pa.array([[("tb.txn", "0:1")]], TYPES["properties"][0])}, "has the reserved prefix"),
        ({"properties": pa.array([[(str(n), "") for n in range(501)]], TYPES["properties"][0])}, "501 different"),
    ],
)
def test_rows_that_are_no_records_are_rejected(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(CallerError, match=message):
        list(batches_of(batch(**columns), None if "topic" in columns else "t"))


def test_types_of_columns() -> None:
    text = StringType()
    kinds: dict[str, DataType] = {"topic": text, "key": text, "value": BinaryType(), "event_time": TimestampType()}
    kinds["properties"] = MapType(text, text)
    check_schema(StructType([StructField(name, kind) for name, kind in kinds.items()]), None)
    for names, topic, message in (
        (["value"], None, "one of the option topic and the column topic"),
        (["value", "topic"], "t", "one of the option topic and the column topic"),
        (["key"], "t", "column value is missing"),
        (["value", "kye"], "t", "unknown column kye"),
    ):
        with pytest.raises(CallerError, match=message):
            check_schema(StructType([StructField(name, text) for name in names]), topic)
    local = StructType([StructField("value", BinaryType()), StructField("event_time", TimestampNTZType())])
    with pytest.raises(CallerError, match="event_time must be timestamp, got timestamp_ntz: cast it"):
        check_schema(local, "t")


def test_options() -> None:
    options = WriteOptions.of({**SERVICE, "Topic": "t", "checkpointLocation": "/c", "path": "t"}, streaming=True)
    assert (options.topic, options.producer_number, options.batching) == ("t", None, "messages")
    assert options.timeout == TRANSACTION_TIMEOUT
    for path, topic in {"t": "t", " t ": "t", '["j"]': "j", '["a,b"]': "a,b", "x,": "x"}.items():
        assert WriteOptions.of({**SERVICE, "Path": path}, streaming=False).topic == topic
        assert ReadOptions.of({**SERVICE, "path": path}).topics == (topic,)
    for path in ("x,y", '["x","y"]', "[]", ","):
        with pytest.raises(InvalidRequest, match=r"^the path .* names (2|0) topics"):
            WriteOptions.of({**SERVICE, "path": path}, streaming=False)
    assert WriteOptions.of({**SERVICE, "topic": "x,y"}, streaming=False).topic == "x,y"
    cluster = {"broker": "pulsar://h:6650/t/n", "service": "h:1", "batching": "records", "pulsar.admin_url": "http://h"}
    options = WriteOptions.of({**cluster, "name": "n", "number": "7", "transaction_timeout": "5"}, streaming=False)
    assert (options.service, options.batching) == ("h:1", "records")
    assert (options.producer_number, options.timeout) == (("n", 7), 5.0)
    assert options.cluster is not None
    assert options.cluster["admin_url"] == "http://h"


@pytest.mark.parametrize(
    ("options", "streaming", "message"),
    [
        ({"broker": "file:log"}, False, "txnbuf serve file:log"),
        ({"topics": "t"}, False, "unknown option topics"),
        ({"topic": ""}, False, "topic"),
        ({"topic": "t", "path": "u"}, True, "the path is u and option topic is t: name the topic in one of them"),
        ({"path": ""}, False, "topic"),
        ({"name": "n"}, False, "both of the options name and number"),
        ({"name": "n", "number": "1"}, True, "for batch jobs"),
        ({"name": "n", "number": "x"}, False, "option number must be a whole number"),
        ({"name": "n", "number": "0"}, False, "integer from 1 to 2"),
        ({"transaction_timeout": "long"}, False, "option transaction_timeout must be a number of seconds"),
        ({"transaction_timeout": "-1"}, False, "option transaction_timeout must be a number of seconds"),
        ({"batching": "sets"}, False, "batching must be messages or records"),
        ({"service": "h:1"}, False, "option service is for clusters"),
        ({"pulsar.token": "x"}, False, "option pulsar.token is for clusters"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], streaming: bool, message: str) -> None:  # a row
    with pytest.raises(CallerError, match=message):
        WriteOptions.of({**SERVICE, **options}, streaming=streaming)
