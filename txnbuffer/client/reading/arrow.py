"""Record batches as Arrow record batches, built by column without a step per record

The columns of `arrow_batch`:

    topic          dictionary of strings
    position       struct of ledger, entry and batch, int64 each; batch -1: the message is one record
    seqno          int64, null if it is unknown
    key, value     binary, as stored; a null value deletes the key
    properties     map of strings
    event_time,
    publish_time   timestamp in milliseconds, UTC; null for a record without an event time
    txn            string `most:least`, null for an ordinary record

The buffers of positions, seqnos, keys, values and times are those of the record batch: nothing is copied.

Columns are built from buffers: `pa.array` imports pandas, which takes longer than a small task of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from broker_io.batch import NO_TIME, Batch, Blobs, Labels, PropertyColumn
from broker_io.position import Int64s, Positions
from txnbuffer.protocol import present

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Column: TypeAlias = "pa.Array"

POSITION = pa.struct([("ledger", pa.int64()), ("entry", pa.int64()), ("batch", pa.int64())])
PROPERTIES = pa.map_(pa.string(), pa.string())
TIME = pa.timestamp("ms", tz="UTC")
TOPIC = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("topic", TOPIC),
        ("position", POSITION),
        ("seqno", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("properties", PROPERTIES),
        ("event_time", TIME),
        ("publish_time", TIME),
        ("txn", pa.string()),
    ]
)


class RecordColumns(Protocol):
    """The columns of a RecordBatch, which `txnbuffer.client.reading.records` describes."""

    @property
    def topic(self) -> str: ...

    @property
    def positions(self) -> Positions: ...

    @property
    def seqnos(self) -> Int64s | None: ...

    @property
    def publish_times(self) -> Int64s: ...

    @property
    def messages(self) -> Batch: ...

    @property
    def txns(self) -> PropertyColumn | None: ...

    def __len__(self) -> int: ...


def arrow_batch(batch: RecordColumns, names: Sequence[str] = SCHEMA.names) -> pa.RecordBatch:
    """The records with the columns of SCHEMA, or some of them."""
    messages, count = batch.messages, len(batch)
    times = messages.event_times
    columns: dict[str, Callable[[], Column]] = {
        "topic": lambda: pa.DictionaryArray.from_arrays(
            fixed(np.zeros(count, np.int32), pa.int32()), strings([batch.topic])
        ),
        "position": lambda: positions(batch.positions),
        "seqno": lambda: pa.nulls(count, pa.int64()) if batch.seqnos is None else fixed(batch.seqnos, pa.int64()),
        "key": lambda: binary(messages.keys),
        "value": lambda: binary(messages.values),
        "properties": lambda: properties(messages.properties, count),
        "event_time": lambda: pa.nulls(count, TIME) if times is None else fixed(times, TIME, times == NO_TIME),
        "publish_time": lambda: fixed(batch.publish_times, TIME),
        "txn": lambda: pa.nulls(count, pa.string()) if batch.txns is None else text(batch.txns),
    }
    schema = SCHEMA if names is SCHEMA.names else pa.schema([SCHEMA.field(name) for name in names])
    return pa.RecordBatch.from_arrays([columns[name]() for name in schema.names], schema=schema)


def pandas_frame(batch: RecordColumns) -> pd.DataFrame:
    """As `RecordBatch.to_pandas`."""
    table = pa.Table.from_batches([arrow_batch(batch)])
    at = table.schema.get_field_index("position")
    for name, axis in zip(("ledger", "entry", "batch"), table.column(at).flatten(), strict=True):
        table = table.add_column(table.schema.get_field_index("position"), f"position.{name}", axis)
    frame = table.drop_columns(["position"]).to_pandas(split_blocks=True, maps_as_pydicts="strict")
    return frame if batch.seqnos is not None else frame.assign(seqno=frame["seqno"].astype("Int64"))


def polars_frame(polars: ModuleType, batch: RecordColumns) -> pl.DataFrame:
    """As `RecordBatch.to_polars`."""
    frame: pl.DataFrame = polars.from_arrow(pa.Table.from_batches([arrow_batch(batch)]))
    return frame


def fixed(values: NDArray[Any], kind: pa.DataType, absent: NDArray[np.bool_] | None = None) -> Column:
    """A column of numbers with the width of the type, null where `absent`."""
    return pa.Array.from_buffers(kind, len(values), [_validity(absent), pa.py_buffer(np.ascontiguousarray(values))])


def binary(blobs: Blobs, kind: pa.DataType | None = None) -> Column:
    """A column of strings, of bytes unless `kind` says otherwise; the bytes are not copied."""
    offsets = pa.py_buffer(np.ascontiguousarray(blobs.offsets, np.int32))
    buffers = [_validity(blobs.absent), offsets, pa.py_buffer(blobs.data)]
    return pa.Array.from_buffers(kind or pa.binary(), len(blobs), buffers)


def strings(texts: Sequence[str | None]) -> Column:
    return binary(Blobs.of([None if text is None else text.encode() for text in texts]), pa.string())


def text(column: PropertyColumn) -> Column:
    """A property as a column of strings."""
    if isinstance(column, Labels):
        absent = column.codes < 0
        return strings(column.values).take(fixed(np.where(absent, 0, column.codes), pa.int32(), absent))
    return fixed(column.values, pa.int64(), None if column.present is None else ~column.present).cast(pa.string())


def positions(places: Positions) -> Column:
    axes = [fixed(axis, pa.int64()) for axis in (places.ledgers, places.entries, places.indexes)]
    return pa.StructArray.from_arrays(axes, fields=[*POSITION])


def properties(columns: Mapping[str, PropertyColumn], count: int) -> Column:
    """Properties by name as a column of maps."""
    there = np.zeros((count, len(columns)), np.bool_)
    for index, column in enumerate(columns.values()):
        there[:, index] = present(column, count)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(there.sum(axis=1), out=offsets[1:])
    row, which = np.nonzero(there)
    names = strings([*columns]).take(fixed(which, pa.int64()))
    texts = pa.concat_arrays([strings([]), *map(text, columns.values())])
    values = texts.take(fixed(which * count + row, pa.int64()))
    return pa.MapArray.from_arrays(fixed(offsets, pa.int32()), names, values)


def _validity(absent: NDArray[np.bool_] | None) -> pa.Buffer | None:
    return None if absent is None or not absent.any() else pa.py_buffer(np.packbits(~absent, bitorder="little"))
