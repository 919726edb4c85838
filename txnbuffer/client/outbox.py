"""Records to send: checked, collected as columns for each topic, and cut into sends

An `Outbox` collects the records that many transactions send to a topic, until a frame takes them. Records that are
given as a Batch are checked and cut without Python code per record.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from broker_io.batch import ROW_BYTES, Batch, Blobs, Labels, Numbers, PropertyColumn, property_column
from broker_io.errors import InvalidMessage, MessageTooLarge
from txnbuffer.client.serializers import Serializer
from txnbuffer.errors import Error
from txnbuffer.model import PROTOCOL_VERSION, TxnId
from txnbuffer.protocol import RESERVED, SEQ, TXN, VERSION, transactional
from txnbuffer.recordset import PROPERTY_ROOM, SET_ROOM, BatchSlice, pack_all
from txnbuffer.rpc.frames import SEND_BYTES, Send

CELL_BYTES = 9
"""Maximum bytes of a row in a property column, without its text; a missing property counts too."""
COLUMN_BYTES = 64
"""Maximum bytes of a property column, without its rows and its name."""
MAX_PROPERTIES = 500
"""Maximum number of different property names in one send; a service accepts twice as many."""

Waiter = Any
"""A value, such as a future, that the caller gets back with the result of its request."""


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


def weight(rows: SendColumns) -> int:
    """Return the approximate memory of rows in bytes."""
    return rows.size + ROW_BYTES * len(rows.values)


def width(names: int, rows: int) -> int:
    """Return the maximum bytes of property columns, without names and texts."""
    return names * (COLUMN_BYTES + CELL_BYTES * rows)


class OpenTransaction:
    """The client's state of a transaction.

    - `counts`: the number of records sent to each topic. `pending`: how many of all records are not settled.
    - `failure`: the error because of which it can only abort. `ending`: commit or abort was requested.
    - `start`: the tick in which it began. `announced`: the number of the request that announced it, or 0.
    - `then`: the EndPlan to execute once nothing is pending.
    """

    __slots__ = (
        "announced",
        "counts",
        "ending",
        "failure",
        "pending",
        "sequence",
        "start",
        "text",
        "then",
        "timeout",
        "txn",
    )

    def __init__(self, txn: TxnId, start: int, timeout: float | None, sequence: Any) -> None:
        self.txn = txn
        self.text = str(txn)
        self.start = start
        self.timeout = timeout
        self.sequence = sequence
        self.counts: dict[str, int] = {}
        self.pending = 0
        self.failure: Error | None = None
        self.ending = False
        self.announced = 0
        self.then: Any = None


class TransactionSlice(NamedTuple):
    """Consecutive records of one transaction."""

    transaction: OpenTransaction
    records: int


class SendInFlight(NamedTuple):
    """A send with its transactions, or with the waiters of ordinary sends. `size`: its approximate memory in bytes."""

    send: Send
    runs: list[TransactionSlice]
    waiters: list[Waiter]
    size: int


class Outbox:
    """Queued records of one topic: all transactional, or all ordinary."""

    __slots__ = (
        "_keys",
        "_names",
        "_properties",
        "_runs",
        "_seqs",
        "_set_bytes",
        "_times",
        "_topic",
        "_values",
        "_waiters",
        "_weight",
        "size",
    )

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._clear()

    def _clear(self) -> None:
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._properties: list[Mapping[str, str] | None] | None = None
        self._times: list[int] | None = None
        self._names: set[str] = set()
        self._runs: list[TransactionSlice] = []
        self._seqs: list[int] = []
        self._waiters: list[Waiter] = []
        self._set_bytes = 0
        self._weight = 0
        self.size = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter) -> None:
        """Add records of a transaction; or ordinary records (None) and their waiter."""
        before, count = len(self._values), len(rows.values)
        self._set_bytes = rows.set_bytes
        if transaction is None:
            self._waiters.append(waiter)
        else:
            seq = transaction.counts.get(self._topic, 0) + 1
            transaction.counts[self._topic] = seq + count - 1
            transaction.pending += count
            self._runs.append(TransactionSlice(transaction, count))
            if count == 1:
                self._seqs.append(seq)
            else:
                self._seqs += range(seq, seq + count)
        self._keys += rows.keys
        self._values += rows.values
        self._weight += weight(rows)
        if rows.properties is not None or self._properties is not None:
            self._add_properties(rows.properties, before, count)
        if rows.times is not None or self._times is not None:
            times = self._times = [0] * before if self._times is None else self._times
            times += [0] * count if rows.times is None else rows.times
        self.size = self._weight + width(len(self._names), len(self._values))

    def fits(self, rows: SendColumns) -> bool:
        """Return whether the records fit into the same send as the queued ones."""
        if not self._values:
            return True
        if rows.set_bytes != self._set_bytes:
            return False
        names = self._names.union(*filter(None, rows.properties or ()))
        size = self._weight + weight(rows) + width(len(names), len(self._values) + len(rows.values))
        return size <= SEND_BYTES and (len(names) <= MAX_PROPERTIES or len(names) == len(self._names))

    def take(self) -> SendInFlight:
        """Remove all records and return them as one send."""
        properties: dict[str, PropertyColumn] = {}
        if self._properties is not None:
            table = [row or {} for row in self._properties]
            properties = {name: property_column([row.get(name) for row in table]) for name in sorted(self._names)}
        if self._runs and not self._set_bytes:
            properties |= self._transaction_columns()
        times = None if self._times is None else np.array(self._times, np.int64)
        keys = Blobs.none(len(self)) if self._keys.count(None) == len(self) else Blobs.of(self._keys)
        batch = Batch(keys, Blobs.of(self._values), properties, times)
        if self._set_bytes:
            batch = self._packed(batch)
        flight = SendInFlight(Send(self._topic, batch), self._runs, self._waiters, self.size)
        self._clear()
        return flight

    def drop(self) -> list[Waiter]:
        """Remove all records; return their waiters."""
        waiters = self._waiters
        self._clear()
        return waiters

    def _add_properties(self, properties: Sequence[Mapping[str, str] | None] | None, before: int, count: int) -> None:
        if self._properties is None:
            self._properties = [None] * before
        self._properties += [None] * count if properties is None else properties
        for row in properties or ():
            if row:
                self._names.update(row)

    def _packed(self, records: Batch) -> Batch:
        """Return the records in record sets, the records of each transaction together."""
        if not self._runs:
            return pack_all(records, [BatchSlice(None, 1, len(records))], self._set_bytes)
        rows: dict[OpenTransaction, list[int]] = {}
        at = 0
        for transaction, count in self._runs:
            rows.setdefault(transaction, []).extend(range(at, at + count))
            at += count
        if 1 < len(rows) < len(self._runs):
            records = records.take(np.array([row for chosen in rows.values() for row in chosen], np.intp))
        slices = [BatchSlice(one.txn, self._seqs[chosen[0]], len(chosen)) for one, chosen in rows.items()]
        return pack_all(records, slices, self._set_bytes)

    def _transaction_columns(self) -> dict[str, PropertyColumn]:
        seen: dict[str, int] = {}
        codes = [seen.setdefault(transaction.text, len(seen)) for transaction, _ in self._runs]
        column = np.array(codes, np.int32)
        if len(codes) < len(self):
            column = np.repeat(column, [records for _, records in self._runs])
        return {
            VERSION: Labels.constant(str(PROTOCOL_VERSION), len(self)),
            TXN: Labels(column, tuple(seen)),
            SEQ: Numbers(np.array(self._seqs, np.int64)),
        }


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
    key = key if key is None or type(key) is bytes else key_bytes(key)
    size = len(data) + (0 if key is None else len(key))
    if properties is None and ordering_key is None and event_time is None:
        return SendColumns((key,), (data,), None, None, size)
    row = checked_properties(properties, ordering_key)
    size += _text_bytes(row)
    times = None if event_time is None else (milliseconds(event_time),)
    return SendColumns((key,), (data,), (row,) if row else None, times, size)


def deletion(key: Key) -> SendColumns:
    """Return the record that deletes a key. Raises InvalidMessage."""
    data = key_bytes(key)
    if data is None:
        raise InvalidMessage("cannot delete without a key: give bytes or text")
    return SendColumns((data,), (None,), None, None, len(data))


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
        return utf8(key, "a key")
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


def flight_of(topic: str, records: Batch, transaction: OpenTransaction, set_bytes: int) -> SendInFlight:
    """Return a send with the next records of a transaction for a topic; `set_bytes` as in SendColumns."""
    count = len(records)
    first = transaction.counts.get(topic, 0) + 1
    transaction.counts[topic] = first + count - 1
    transaction.pending += count
    size = int(records.sizes().sum()) + ROW_BYTES * count + width(len(records.properties), count)
    if set_bytes:
        messages = pack_all(records, [BatchSlice(transaction.txn, first, count)], set_bytes)
    else:
        messages = transactional(records, transaction.txn, first)
    return SendInFlight(Send(topic, messages), [TransactionSlice(transaction, count)], [], size)
