"""What applications send, checked and brought into columns."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, Literal, TypeAlias

from broker_io.errors import InvalidMessage, MessageTooLarge
from txnbuffer.client.outbox import MAX_PROPERTIES, ROW_BYTES, Rows, weight, width
from txnbuffer.client.serializers import Serializer
from txnbuffer.frames import SEND_BYTES
from txnbuffer.recordset import PROPERTY_ROOM, SET_ROOM

Key: TypeAlias = "bytes | str | None"
Properties: TypeAlias = "Mapping[str, str] | None"
EventTime: TypeAlias = "int | datetime | None"

Batching: TypeAlias = Literal["messages", "records"]
"""What a record becomes on a cluster: a message, or a member of a record set, which is one message of many."""
BATCHINGS = ("messages", "records")

PROPERTY_BYTES = 80
"""The most that the properties which make a record part of a transaction add to it."""
RESERVED = "tb."
ORDERING_KEY = "ordering_key"
"""The property under which an ordering key is kept."""


def one_row(
    value: Any,
    key: Key,
    ordering_key: str | None,
    event_time: EventTime,
    properties: Properties,
    serializer: Serializer | None,
) -> Rows:
    """One record. Raises InvalidMessage, or what the serializer raises."""
    data = value if type(value) is bytes else value_bytes(value, serializer)
    key = key if key is None or type(key) is bytes else key_bytes(key)
    size = len(data) + (0 if key is None else len(key))
    if properties is None and ordering_key is None and event_time is None:
        return Rows((key,), (data,), None, None, size)
    row = checked_properties(properties, ordering_key)
    size += _text_bytes(row)
    times = None if event_time is None else (milliseconds(event_time),)
    return Rows((key,), (data,), (row,) if row else None, times, size)


def deletion(key: Key) -> Rows:
    """The record that deletes a key."""
    data = key_bytes(key)
    if data is None:
        raise InvalidMessage("a deletion needs the key that it deletes")
    return Rows((data,), (None,), None, None, len(data))


def many_rows(
    values: Sequence[Any],
    keys: Sequence[Key] | None,
    event_times: Sequence[EventTime] | None,
    properties: Sequence[Properties] | None,
    serializer: Serializer | None,
) -> Rows:
    """Records as columns of one length. Raises InvalidMessage."""
    count = _check_column("values", values)
    for name, column in (("keys", keys), ("event_times", event_times), ("properties", properties)):
        if column is not None and _check_column(name, column) != count:
            raise InvalidMessage(f"{name} has {len(column)} rows for {count} values")
    data = [value if type(value) is bytes else value_bytes(value, serializer) for value in values]
    size = sum(map(len, data))
    all_keys: list[bytes | None] = [None] * count
    if keys is not None:
        all_keys = [key if type(key) is bytes else key_bytes(key) for key in keys]
        size += sum(len(key) for key in all_keys if key is not None)
    rows = None if properties is None else [checked_properties(row, None) for row in properties]
    size += sum(map(_text_bytes, rows or ()))
    times = None if event_times is None else [0 if time is None else milliseconds(time) for time in event_times]
    return Rows(all_keys, data, rows, times, size)


def _check_column(name: str, column: Any) -> int:
    """The length of a column. Raises InvalidMessage for what is none: a text would pass for one of its characters."""
    if isinstance(column, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(column, Collection):
        raise InvalidMessage(f"{name} is a list with an item for each record, not {type(column).__name__}")
    return len(column)


def pieces(rows: Rows, records: int = sys.maxsize) -> Iterator[Rows]:
    """The rows in pieces that fit into a send each, of at most so many records."""
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
            yield _part(rows, start, row, size)
            start, size, named = row, 0, set(_row(rows, row))
        size, names = size + one, named
    yield _part(rows, start, count, size)


def _part(rows: Rows, start: int, end: int, size: int) -> Rows:
    which = slice(start, end)
    properties = None if rows.properties is None else rows.properties[which]
    times = None if rows.times is None else rows.times[which]
    size -= ROW_BYTES * (end - start)
    return Rows(rows.keys[which], rows.values[which], properties, times, size, rows.set_bytes)


def _bytes_of(rows: Rows, index: int) -> int:
    size = len(rows.values[index] or b"") + len(rows.keys[index] or b"")
    return size + _text_bytes(_row(rows, index))


def _text_bytes(properties: Mapping[str, str]) -> int:
    """Bytes of names and texts."""
    size = 0
    for name, text in properties.items():
        size += len(name) if name.isascii() else len(name.encode())
        size += len(text) if text.isascii() else len(text.encode())
    return size


def pick(rows: Rows, which: Sequence[int]) -> Rows:
    """The rows of these numbers."""
    keys, values = [rows.keys[row] for row in which], [rows.values[row] for row in which]
    properties = None if rows.properties is None else [rows.properties[row] for row in which]
    times = None if rows.times is None else [rows.times[row] for row in which]
    size = sum(map(len, filter(None, values))) + sum(map(len, filter(None, keys)))
    size += sum(_text_bytes(row) for row in properties or () if row)
    return Rows(keys, values, properties, times, size, rows.set_bytes)


def check_size(rows: Rows, limit: int, extra: int = 0) -> None:
    """Raises MessageTooLarge for a record that with `extra` bytes is above the limit; 0 is not known yet."""
    if rows.set_bytes:
        extra += SET_ROOM + PROPERTY_ROOM * max(map(len, filter(None, rows.properties or ())), default=0)
    if not limit or rows.size + extra <= limit:
        return
    for index in range(len(rows.values)):
        size = _bytes_of(rows, index)
        if size + extra > limit:
            raise MessageTooLarge(f"a record of {size} bytes is over the limit of {limit - extra}: split it")


def _row(rows: Rows, index: int) -> Mapping[str, str]:
    return {} if rows.properties is None else rows.properties[index] or {}


def value_bytes(value: Any, serializer: Serializer | None) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if serializer is not None and value is not None:
        return serializer.dumps(value)
    if isinstance(value, str):
        return utf8(value, "a value")
    hint = "to delete a key call delete" if value is None else "give a serializer to connect"
    raise InvalidMessage(f"a value is bytes or text, not {type(value).__name__}: {hint}")


def key_bytes(key: Key) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return utf8(key, "a key")
    raise InvalidMessage(f"a key is bytes or text, not {type(key).__name__}")


def checked_properties(properties: Properties, ordering_key: str | None) -> dict[str, str]:
    if not isinstance(properties, (Mapping, NoneType)):
        raise InvalidMessage(f"the properties of a record are a mapping of texts, not {type(properties).__name__}")
    row = dict(properties or {})
    if ordering_key is not None:
        row[ORDERING_KEY] = ordering_key
    for name, text in row.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise InvalidMessage(f"property {name!r} is {text!r}: names and values of properties are texts")
        utf8(name + text, "a property")
        if name.startswith(RESERVED):
            raise InvalidMessage(f"property {name!r} is under {RESERVED!r}, which is the log's own: use another name")
    return row


def utf8(text: str, what: str) -> bytes:
    """Raises InvalidMessage for half a surrogate pair, the one thing that no UTF-8 can say."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{what} can't be written as UTF-8: {error}") from None


def milliseconds(time: int | datetime) -> int:
    """Since 1970. Raises InvalidMessage for a time without a zone: it would mean another one elsewhere."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise InvalidMessage(f"event time {time} has no time zone: give one, such as datetime.UTC")
        time = round(time.timestamp() * 1000)
    if type(time) is not int or not 0 <= time < 2**63:
        raise InvalidMessage(f"an event time is a datetime, or milliseconds since 1970, not {time!r}")
    return time
