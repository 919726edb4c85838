"""Records on their way: collected in columns a topic, over many transactions, until a frame takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from broker_io.batch import Batch, Blobs, Labels, Numbers, PropertyColumn, property_column
from txnbuffer.errors import Error
from txnbuffer.frames import SEND_BYTES, Send
from txnbuffer.model import PROTOCOL_VERSION, TxnId
from txnbuffer.protocol import SEQ, TXN, VERSION
from txnbuffer.recordset import Stretch, pack_all

ROW_BYTES = 64
"""What a record costs in memory besides its bytes, about."""
CELL_BYTES = 9
"""What a row takes in a column of properties, at most, besides its text: also where it lacks the property."""
COLUMN_BYTES = 64
"""What such a column takes besides its rows and its name, at most."""
MAX_PROPERTIES = 500
"""Different names of properties in one send; a service takes twice as many."""

Waiter = Any
"""Whatever the caller wants back with a result."""


class Rows(NamedTuple):
    """Records for one topic as columns of one length; `properties` and `times` are None where no record has any.

    `values` None: the key is deleted. `size` in bytes: keys, values and properties. `set_bytes`: they go into record
    sets of at most so many bytes; 0: into a message each.
    """

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    properties: Sequence[Mapping[str, str] | None] | None
    times: Sequence[int] | None
    size: int
    set_bytes: int = 0


def weight(rows: Rows) -> int:
    """About the bytes that rows hold in memory."""
    return rows.size + ROW_BYTES * len(rows.values)


def width(names: int, rows: int) -> int:
    """The bytes of so many columns of properties, at most, besides names and texts."""
    return names * (COLUMN_BYTES + CELL_BYTES * rows)


class OpenTransaction:
    """A transaction as its client sees it.

    - `counts`: records sent to each topic; `pending`: how many of them are not settled.
    - `failure`: why it can only abort. `ending`: commit or abort was asked for.
    - `start`: the tick in which it was begun; `announced`: the number of the request that told it, or 0.
    - `then`: how it is to end once nothing is pending.
    """

    __slots__ = (
        "announced",
        "counts",
        "ending",
        "failure",
        "naming",
        "pending",
        "start",
        "text",
        "then",
        "timeout",
        "txn",
    )

    def __init__(self, txn: TxnId, start: int, timeout: float | None, naming: Any) -> None:
        self.txn = txn
        self.text = str(txn)
        self.start = start
        self.timeout = timeout
        self.naming = naming
        self.counts: dict[str, int] = {}
        self.pending = 0
        self.failure: Error | None = None
        self.ending = False
        self.announced = 0
        self.then: Any = None


class Run(NamedTuple):
    """Records that follow one another and are of one transaction."""

    transaction: OpenTransaction
    records: int


class Flight(NamedTuple):
    """A send, and who is to hear of it: transactions, or the waiters of ordinary sends."""

    send: Send
    runs: list[Run]
    waiters: list[Waiter]
    size: int


class Outbox:
    """Records of one topic: all of them of transactions, or all ordinary."""

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
        self._runs: list[Run] = []
        self._seqs: list[int] = []
        self._waiters: list[Waiter] = []
        self._set_bytes = 0
        self._weight = 0
        self.size = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, rows: Rows, transaction: OpenTransaction | None, waiter: Waiter) -> None:
        """Records of a transaction, or ordinary ones with somebody who waits for them."""
        before, count = len(self._values), len(rows.values)
        self._set_bytes = rows.set_bytes
        if transaction is None:
            self._waiters.append(waiter)
        else:
            seq = transaction.counts.get(self._topic, 0) + 1
            transaction.counts[self._topic] = seq + count - 1
            transaction.pending += count
            self._runs.append(Run(transaction, count))
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

    def fits(self, rows: Rows) -> bool:
        """Whether the records can go into the same send as those before."""
        if not self._values:
            return True
        if rows.set_bytes != self._set_bytes:
            return False
        names = self._names.union(*filter(None, rows.properties or ()))
        size = self._weight + weight(rows) + width(len(names), len(self._values) + len(rows.values))
        return size <= SEND_BYTES and (len(names) <= MAX_PROPERTIES or len(names) == len(self._names))

    def take(self) -> Flight:
        """All records, as one send."""
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
        flight = Flight(Send(self._topic, batch), self._runs, self._waiters, self.size)
        self._clear()
        return flight

    def drop(self) -> list[Waiter]:
        """Forget all records; who waits for them."""
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
        """The records in record sets: those of a transaction together, whatever was sent between them."""
        if not self._runs:
            return pack_all(records, [Stretch(None, 1, len(records))], self._set_bytes)
        rows: dict[OpenTransaction, list[int]] = {}
        at = 0
        for transaction, count in self._runs:
            rows.setdefault(transaction, []).extend(range(at, at + count))
            at += count
        if 1 < len(rows) < len(self._runs):
            records = records.take(np.array([row for chosen in rows.values() for row in chosen], np.intp))
        stretches = [Stretch(one.txn, self._seqs[chosen[0]], len(chosen)) for one, chosen in rows.items()]
        return pack_all(records, stretches, self._set_bytes)

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
