"""Records as Arrow record batches, built by column without a step per record

The columns, as named in `options.COLUMNS`:

    topic          string
    position       struct of ledger, entry and batch, int64 each; batch -1: the message is one record
    seqno          int64, null if it is unknown and for records that are not visible
    key, value     binary; a null value deletes the key
    properties     map of strings, without those of the log protocol
    txn            string `most:least`, null for an ordinary record
    event_time,
    publish_time   timestamp in microseconds, UTC; null for a record without an event time
    outcome        string: committed, aborted or suppressed; an ordinary record is committed if it is visible
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from broker_io.batch import NO_TIME, Blobs
from broker_io.position import Int64s
from txnbuffer.client.reading.arrow import (
    POSITION,
    PROPERTIES,
    Column,
    binary,
    fixed,
    positions,
    properties,
    strings,
    text,
)
from txnbuffer.pipeline.reading import RecordOutcome, RecordRows
from txnbuffer.protocol import RESERVED, TXN

TIMESTAMP = pa.timestamp("us", tz="UTC")
TYPES = {
    "topic": pa.string(),
    "position": POSITION,
    "seqno": pa.int64(),
    "key": pa.binary(),
    "value": pa.binary(),
    "properties": PROPERTIES,
    "txn": pa.string(),
    "event_time": TIMESTAMP,
    "publish_time": TIMESTAMP,
    "outcome": pa.string(),
}
LARGEST_TIME = np.iinfo(np.int64).max // 1000


def schema_of(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, TYPES[name]) for name in columns])


def record_batch(rows: RecordRows, schema: pa.Schema) -> pa.RecordBatch:
    """The records chosen by the mask, with the columns of the schema."""
    batch = pa.RecordBatch.from_arrays([_MAKERS[name](rows) for name in schema.names], schema=schema)
    if rows.mask is None:
        return batch
    bits = pa.py_buffer(np.packbits(rows.mask, bitorder="little"))
    return batch.filter(pa.Array.from_buffers(pa.bool_(), len(rows), [None, bits]))


def _topic(rows: RecordRows) -> Column:
    name, count = rows.topic.encode(), len(rows)
    return binary(Blobs(name * count, np.arange(count + 1, dtype=np.int32) * len(name), None), pa.string())


def _seqno(rows: RecordRows) -> Column:
    if rows.seqnos is None:
        return pa.nulls(len(rows), pa.int64())
    return fixed(rows.seqnos, pa.int64(), rows.seqnos == 0)


def _properties(rows: RecordRows) -> Column:
    found = rows.placed.messages.properties.items()
    return properties({name: column for name, column in found if not name.startswith(RESERVED)}, len(rows))


def _txn(rows: RecordRows) -> Column:
    column = rows.placed.messages.properties.get(TXN)
    return pa.nulls(len(rows), pa.string()) if column is None else text(column)


def _timestamp(milliseconds: Int64s, absent: NDArray[np.bool_] | None = None) -> Column:
    return fixed(np.clip(milliseconds, -LARGEST_TIME, LARGEST_TIME) * 1000, TIMESTAMP, absent)


def _event_time(rows: RecordRows) -> Column:
    times = rows.placed.messages.event_times
    return pa.nulls(len(rows), TIMESTAMP) if times is None else _timestamp(times, times == NO_TIME)


def _outcome(rows: RecordRows) -> Column:
    if rows.outcomes is None:
        return pa.nulls(len(rows), pa.string())
    return strings([outcome.name.lower() for outcome in RecordOutcome]).take(fixed(rows.outcomes, pa.int8()))


_MAKERS: Mapping[str, Callable[[RecordRows], Column]] = {
    "topic": _topic,
    "position": lambda rows: positions(rows.placed.positions),
    "seqno": _seqno,
    "key": lambda rows: binary(rows.placed.messages.keys),
    "value": lambda rows: binary(rows.placed.messages.values),
    "properties": _properties,
    "txn": _txn,
    "event_time": _event_time,
    "publish_time": lambda rows: _timestamp(rows.placed.publish_times),
    "outcome": _outcome,
}
