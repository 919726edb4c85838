"""Rows of a data frame as records to send: Arrow columns become columns of a batch, their bytes not copied.

topic        string, unless the option `topic` names one for all
key          binary or string; null: the record has no key
value        binary or string; null: the key is deleted
properties   map of strings
event_time   timestamp
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from broker_io.batch import NO_TIME, Batch, Blobs, Labels, PropertyColumn, as_numbers
from broker_io.errors import InvalidMessage
from broker_io.position import Int64s
from txnbuffer.client.outbox import MAX_PROPERTIES
from txnbuffer.client.records import RESERVED
from txnbuffer.errors import InvalidRequest

Column: TypeAlias = "pa.Array"

COLUMNS = {
    "topic": ("string",),
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "properties": ("map<string,string>",),
    "event_time": ("timestamp",),
}
"""The columns that there may be, and their types as Spark names them."""


def check_schema(schema: StructType, topic: str | None) -> None:
    """Raises InvalidRequest for a data frame whose rows are no records."""
    for field in schema:
        known = COLUMNS.get(field.name)
        if known is None:
            raise InvalidRequest(
                f"column {field.name} is none of a record, which has {', '.join(COLUMNS)}: select these"
            )
        if not any(field.dataType.simpleString() == kind for kind in known):
            found = field.dataType.simpleString()
            raise InvalidRequest(f"column {field.name} is {found}, not {' or '.join(known)}: cast it")
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest("there is no column value: a record has one, null where its key is deleted")
    if ("topic" in names) == (topic is not None):
        raise InvalidRequest("say where to write by one of the option topic and the column topic")


def batches_of(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, Batch]]:
    """The records by topic, each topic's in their order; fewer at a time where many have properties of their own.

    Raises InvalidMessage.
    """
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    values = _blobs(columns["value"])
    keys = _blobs(columns["key"]) if "key" in columns else Blobs.none(len(values))
    if (keys.absent_mask() & values.absent_mask()).any():
        raise InvalidMessage("a row has neither key nor value: a value that is null deletes a key")
    named = _Named(columns["properties"]) if "properties" in columns else None
    if named is not None and len(named.names) > MAX_PROPERTIES and len(rows) > 1:
        half = len(rows) // 2
        yield from batches_of(rows[:half], topic)
        yield from batches_of(rows[half:], topic)
        return
    properties = {} if named is None else _properties(named)
    times = _times(columns["event_time"]) if "event_time" in columns else None
    records = Batch(keys, values, properties, times)
    if topic is not None:
        yield topic, records
        return
    topics = columns["topic"].dictionary_encode()
    if topics.null_count:
        raise InvalidMessage("column topic of a row is null: say where to write it")
    codes = topics.indices.to_numpy()
    names = topics.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], records
        return
    for code, name in enumerate(names):
        yield name, records.take(np.flatnonzero(codes == code))


def _blobs(column: Column) -> Blobs:
    if column.type not in (pa.binary(), pa.string()):
        column = column.cast(pa.binary())
    absent = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    _, offsets, data = column.buffers()
    found = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return Blobs(memoryview(data).cast("B") if data is not None else b"", found, absent)


def _times(column: Column) -> Int64s | None:
    """Milliseconds since 1970; a row without a time has none."""
    times: Int64s = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(NO_TIME).to_numpy() // 1000
    if len(times) and times.min() < 0:
        raise InvalidMessage("column event_time of a row is before 1970, which no record can have")
    return times


class _Named:
    """The entries of a column of properties: which row each is of, its name by number, and its text."""

    def __init__(self, column: Column) -> None:
        self.count = len(column)
        offsets = column.offsets.to_numpy()
        self.rows: Int64s = np.repeat(np.arange(self.count), np.diff(offsets))
        wanted = slice(int(offsets[0]), int(offsets[-1])) if self.count else slice(0, 0)
        names = column.keys[wanted].dictionary_encode()
        self.texts: Column = column.items[wanted]
        self.codes: Int64s = names.indices.to_numpy()
        self.names: list[str] = names.dictionary.to_pylist()


def _properties(named: _Named) -> dict[str, PropertyColumn]:
    if len(named.names) > MAX_PROPERTIES:
        raise InvalidMessage(f"a row has {len(named.names)} different properties: {MAX_PROPERTIES} may be")
    for name in named.names:
        if name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r} is under {RESERVED!r}, which is the log's own: use another name")
    columns = {}
    for code, name in enumerate(named.names):
        which = np.flatnonzero(named.codes == code)
        columns[name] = _property(named.count, named.rows[which], named.texts.take(pa.array(which)))
    return columns


def _property(count: int, rows: Int64s, texts: Column) -> PropertyColumn:
    """One property: the texts that these rows have; one that is null is none."""
    encoded = texts.dictionary_encode()
    codes = np.full(count, -1, np.int32)
    codes[rows] = encoded.indices.fill_null(-1).to_numpy()
    labels = Labels(codes, tuple(encoded.dictionary.to_pylist()))
    many = len(labels.values) * 2 > len(rows)
    return (as_numbers(labels) if many else None) or labels
