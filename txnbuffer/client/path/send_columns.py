"""Records to send, as columns: made of the arguments of sends, checked, and cut into slices that fit into a send

Values are converted to bytes by a serializer. Records that are given as a Batch are checked and cut without Python code
per record.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from broker_io.batch import ROW_BYTES, Batch
from broker_io.errors import InvalidMessage, MessageTooLarge
from broker_io.position import maker
from txnbuffer.client.serializers import Serializer
from txnbuffer.protocol import RESERVED
from txnbuffer.recordset import PROPERTY_ROOM, SET_ROOM
from txnbuffer.rpc.frames import SEND_BYTES

CELL_BYTES = 9
"""Maximum bytes of a row in a property column, without its text; a missing property counts too."""
COLUMN_BYTES = 64
"""Maximum bytes of a property column, without its rows and its name."""
MAX_PROPERTIES = 500
"""Maximum number of different property names in one send; a service accepts twice as many."""

Key: TypeAlias = "bytes | str | None"
Properties: TypeAlias = "Mapping[str, str] | None"
EventTime: TypeAlias = "int | datetime | None"

Batching: TypeAlias = Literal["messages", "records"]
"""How records are stored on a cluster: each as a message, or in record sets, which are messages of many records."""
BATCHINGS = ("messages", "records")

PROPERTY_BYTES = 80
"""Maximum bytes of the properties that make a record transactional."""
ORDERING_KEY = "ordering_key"
"""The property that stores the ordering key."""


class SendColumns(NamedTuple):
    """n records for one topic, as columns of length n; `properties` and `times` are None if no record has any.

    A value of None deletes the key. `times`: event times in milliseconds since 1970, 0 for none. `size`: bytes of keys,
    values and properties. `set_bytes`: the size limit of record sets; 0: each record is a message.
    """

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    properties: Sequence[Mapping[str, str] | None] | None
    times: Sequence[int] | None
    size: int
    set_bytes: int = 0


as_columns = maker(SendColumns)


def weight(rows: SendColumns) -> int:
    """Return the approximate memory of rows in bytes."""
    return rows.size + ROW_BYTES * len(rows.values)


def width(names: int, rows: int) -> int:
    """Return the maximum bytes of property columns, without names and texts."""
    return names * (COLUMN_BYTES + CELL_BYTES * rows)


def one_row(
    value: Any,
    key: Key,
    ordering_key: str | None,
    event_time: EventTime,
    properties: Properties,
    serializer: Serializer | None,
) -> SendColumns:
    """Return one record as columns. Raises InvalidMessage, and the errors of the serializer."""
    data = value if type(value) is bytes else value_bytes(value, serializer)
    if type(key) is str and key.isascii():
        key = key.encode()
    elif key is not None and type(key) is not bytes:
        key = key_bytes(key)
    size = len(data) + (0 if key is None else len(key))
    if properties is None and ordering_key is None and event_time is None:
        return as_columns(((key,), (data,), None, None, size, 0))
    row = checked_properties(properties, ordering_key)
    size += _text_bytes(row)
    times = None if event_time is None else (milliseconds(event_time),)
    return SendColumns((key,), (data,), (row,) if row else None, times, size)


def deletion(key: Key, properties: Properties = None) -> SendColumns:
    """Return the record that deletes a key. Raises InvalidMessage."""
    data = key_bytes(key)
    if data is None:
        raise InvalidMessage("cannot delete without a key: give bytes or text")
    row = checked_properties(properties, None)
    return SendColumns((data,), (None,), (row,) if row else None, None, len(data) + _text_bytes(row))


def many_rows(
    values: Sequence[Any],
    keys: Sequence[Key] | None,
    event_times: Sequence[EventTime] | None,
    properties: Sequence[Properties] | None,
    serializer: Serializer | None,
) -> SendColumns:
    """Return records as columns. Raises InvalidMessage, and the errors of the serializer."""
    count = _check_column("values", values)
    for name, column in (("keys", keys), ("event_times", event_times), ("properties", properties)):
        if column is not None and _check_column(name, column) != count:
            raise InvalidMessage(f"{name} must have {count} items as values has, got {len(column)}")
    data = [value if type(value) is bytes else value_bytes(value, serializer) for value in values]
    size = sum(map(len, data))
    all_keys: list[bytes | None] = [None] * count
    if keys is not None:
        all_keys = [key if type(key) is bytes else key_bytes(key) for key in keys]
        size += sum(len(key) for key in all_keys if key is not None)
    rows = None if properties is None else [checked_properties(row, None) for row in properties]
    size += sum(map(_text_bytes, rows or ()))
    times = None if event_times is None else [0 if time is None else milliseconds(time) for time in event_times]
    return SendColumns(all_keys, data, rows, times, size)


def _check_column(name: str, column: Any) -> int:
    """Return the length of a column. Raises InvalidMessage if it is not a list, but for example text."""
    if isinstance(column, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(column, Collection):
        raise InvalidMessage(f"{name} must be a list with an item for each record, got {type(column).__name__}")
    return len(column)


def slices(rows: SendColumns, records: int = sys.maxsize) -> Iterator[SendColumns]:
    """Cut the rows into slices that each fit into a send, of at most `records` records."""
    count = len(rows.values)
    names = set[str]().union(*filter(None, rows.properties or ()))
    if count <= records and len(names) <= MAX_PROPERTIES and weight(rows) + width(len(names), count) <= SEND_BYTES:
        yield rows
        return
    start, size, names = 0, 0, set()
    for row in range(count):
        one, named = _bytes_of(rows, row) + ROW_BYTES, names.union(_row(rows, row))
        fits = size + one + width(len(named), row - start + 1) <= SEND_BYTES and len(named) <= MAX_PROPERTIES
        if row > start and (not fits or row - start == records):
            yield _slice(rows, start, row, size)
            start, size, named = row, 0, set(_row(rows, row))
        size, names = size + one, named
    yield _slice(rows, start, count, size)


def _slice(rows: SendColumns, start: int, end: int, size: int) -> SendColumns:
    which = slice(start, end)
    properties = None if rows.properties is None else rows.properties[which]
    times = None if rows.times is None else rows.times[which]
    size -= ROW_BYTES * (end - start)
    return SendColumns(rows.keys[which], rows.values[which], properties, times, size, rows.set_bytes)


def _bytes_of(rows: SendColumns, index: int) -> int:
    size = len(rows.values[index] or b"") + len(rows.keys[index] or b"")
    return size + _text_bytes(_row(rows, index))


def _text_bytes(properties: Mapping[str, str]) -> int:
    """Return the bytes of names and values in UTF-8."""
    size = 0
    for name, text in properties.items():
        size += len(name) if name.isascii() else len(name.encode())
        size += len(text) if text.isascii() else len(text.encode())
    return size


def take_rows(rows: SendColumns, which: Sequence[int]) -> SendColumns:
    """Return the rows with these indexes."""
    keys, values = [rows.keys[row] for row in which], [rows.values[row] for row in which]
    properties = None if rows.properties is None else [rows.properties[row] for row in which]
    times = None if rows.times is None else [rows.times[row] for row in which]
    size = sum(map(len, filter(None, values))) + sum(map(len, filter(None, keys)))
    size += sum(_text_bytes(row) for row in properties or () if row)
    return SendColumns(keys, values, properties, times, size, rows.set_bytes)


def check_size(rows: SendColumns, limit: int, extra: int = 0) -> None:
    """Raises MessageTooLarge if a record and `extra` bytes exceed the limit; 0: the limit is not known yet."""
    if rows.set_bytes:
        extra += SET_ROOM + PROPERTY_ROOM * max(map(len, filter(None, rows.properties or ())), default=0)
    if not limit or rows.size + extra <= limit:
        return
    for index in range(len(rows.values)):
        size = _bytes_of(rows, index)
        if size + extra > limit:
            raise MessageTooLarge(f"a record of {size} bytes exceeds the limit of {limit - extra} bytes: split it")


def _row(rows: SendColumns, index: int) -> Mapping[str, str]:
    return {} if rows.properties is None else rows.properties[index] or {}


def value_bytes(value: Any, serializer: Serializer | None) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if serializer is not None and value is not None:
        return serializer.dumps(value)
    if isinstance(value, str):
        return utf8(value, "a value")
    hint = "call delete to delete a key" if value is None else "give connect a serializer"
    raise InvalidMessage(f"a value must be bytes or text, got {type(value).__name__}: {hint}")


def key_bytes(key: Key) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return key.encode() if key.isascii() else utf8(key, "a key")
    raise InvalidMessage(f"a key must be bytes or text, got {type(key).__name__}")


def checked_properties(properties: Properties, ordering_key: str | None) -> dict[str, str]:
    if not isinstance(properties, (Mapping, NoneType)):
        raise InvalidMessage(f"properties must be a mapping of text to text, got {type(properties).__name__}")
    row = dict(properties or {})
    if ordering_key is not None:
        row[ORDERING_KEY] = ordering_key
    for name, text in row.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise InvalidMessage(f"property {name!r} has value {text!r}: names and values must be text")
        utf8(name + text, "a property")
        if name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r} uses the reserved prefix {RESERVED!r}: use another name")
    return row


def utf8(text: str, what: str) -> bytes:
    """Encode text; `what` names it in the error. Raises InvalidMessage for an unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{what} cannot be encoded as UTF-8: {error}") from None


def milliseconds(time: int | datetime) -> int:
    """Return milliseconds since 1970. Raises InvalidMessage for a datetime without a time zone."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidMessage(f"event time {time} has no time zone: set one, such as datetime.UTC")
        time = round(time.timestamp() * 1000)
    if type(time) is not int or not 0 <= time < 2**63:
        raise InvalidMessage(f"an event time must be a datetime, or milliseconds since 1970, got {time!r}")
    return time


def check_batch(records: Batch, limit: int, *, in_sets: bool) -> None:
    """Raises MessageTooLarge if a record exceeds the size limit of a message; 0: the limit is not known yet."""
    extra = PROPERTY_BYTES + (SET_ROOM + PROPERTY_ROOM * len(records.properties) if in_sets else 0)
    largest = int(records.sizes().max(initial=0))
    if limit and largest + extra > limit:
        raise MessageTooLarge(f"a record of {largest} bytes exceeds the limit of {limit - extra} bytes: split it")


def split(records: Batch) -> Iterator[Batch]:
    """Cut the records into slices that each fit into a send."""
    ends = np.cumsum(records.sizes() + ROW_BYTES + CELL_BYTES * len(records.properties))
    start = 0
    while start < len(records):
        base = 0 if start == 0 else int(ends[start - 1])
        stop = max(int(np.searchsorted(ends, base + SEND_BYTES, side="right")), start + 1)
        yield records if stop - start == len(records) else records.take(slice(start, stop))
        start = stop
