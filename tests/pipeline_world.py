"""Logs for tests of the pipeline: topics with random content, and the records that a committed reader gets."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, ClassVar

from bench.log_owner import LogOwner
from broker_io.batch import Batch, Message
from broker_io.port import Broker
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import Record
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId
from txnbuffer.pipeline.arrow import record_batch, schema_of
from txnbuffer.pipeline.options import COLUMNS, OUTCOME
from txnbuffer.pipeline.pinned import PinnedTopic
from txnbuffer.pipeline.ranges import RecordRange
from txnbuffer.pipeline.reading import RecordFilter, read_range
from txnbuffer.protocol import encode_marker, transactional
from txnbuffer.recordset import pack

Row = tuple[Any, ...]


class Life:
    """Random steps on one topic, with few transactions at a time, so that rare interleavings are frequent."""

    WEIGHTS: ClassVar = {
        "plain": 3, "records": 8, "whole": 3, "again": 1, "late": 1, "end": 5, "roll": 2, "snapshot": 1, "pump": 1,
    }  # fmt: skip

    def __init__(self, broker: Broker, manager: LogOwner, topic: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = broker
        self.manager = manager
        self.topic = topic
        self.sent: dict[int, int] = {}
        self.ended: list[int] = []
        self.least = 0
        self.count = 0
        manager.register(topic)
        self.writer = broker.writer(topic)

    def run(self, steps: int) -> None:
        names, weights = list(self.WEIGHTS), list(self.WEIGHTS.values())
        for name in self.random.choices(names, weights, k=steps):
            getattr(self, name)()

    def plain(self) -> None:
        batch = self._batch()
        self._append(Batch.of([pack(batch)]) if self.random.random() < 0.3 else batch)

    def records(self) -> None:
        if len(self.sent) < 3 and self.random.random() < 0.5:
            self.least += 1
            self.sent[self.least] = 0
        if self.sent:
            txn = self.random.choice([*self.sent])
            batch = self._batch()
            self._send(txn, self.sent[txn] + 1, batch)
            self.sent[txn] += len(batch)

    def whole(self) -> None:
        """Write a record set of a transaction."""
        if self.sent:
            txn = self.random.choice([*self.sent])
            batch = self._batch()
            self._append(Batch.of([pack(batch, TxnId(0, txn), self.sent[txn] + 1)]))
            self.sent[txn] += len(batch)

    def again(self) -> None:
        """Write records that partly repeat earlier ones."""
        if self.sent:
            txn = self.random.choice([*self.sent])
            first = max(1, self.sent[txn] - 1)
            batch = self._batch()
            if self.random.random() < 0.5:
                self._append(Batch.of([pack(batch, TxnId(0, txn), first)]))
            else:
                self._send(txn, first, batch)
            self.sent[txn] = max(self.sent[txn], first + len(batch) - 1)

    def late(self) -> None:
        if self.ended:
            self._send(self.random.choice(self.ended), 1, self._batch())

    def end(self) -> None:
        if self.sent:
            txn = self.random.choice([*self.sent])
            outcome = self.random.choice([Outcome.COMMIT, Outcome.ABORT])
            item = MarkerItem(TxnId(0, txn), outcome, self.sent.pop(txn))
            self.ended.append(txn)
            self._append(Batch.of([encode_marker(Marker(0, 1, 0, True, (item,)))]))

    def roll(self) -> None:
        self.broker.roll(self.topic)

    def pump(self) -> None:
        self.manager.pump()

    def snapshot(self) -> None:
        self.manager.pump()
        self.manager.snapshot(self.topic)

    def _send(self, txn: int, first: int, batch: Batch) -> None:
        self._append(transactional(batch, TxnId(0, txn), first))

    def _append(self, batch: Batch) -> None:
        self.writer.append(batch).result(60)

    def _batch(self) -> Batch:
        return Batch.of([self._message() for _ in range(self.random.randint(1, 4))])

    def _message(self) -> Message:
        self.count += 1
        key = self.random.choice([None, b"", b"a", b"b", b"\xff"])
        value = None if self.random.random() < 0.1 else b"%d" % self.count
        properties = self.random.choice([{}, {}, {"n": str(self.count)}, {"kind": "x", "n": "7"}, {"kind": ""}])
        return Message(key, value, properties, self.random.choice([0, 0, -5, 1_700_000_000_123]))


def records_of(broker: Broker, topic: str, **options: Any) -> list[Record]:
    """All records that a new reader gets."""
    records: list[Record] = []
    with CommittedReader(broker, topic, **options) as reader:
        while (batch := reader.read()) is not None:
            records += batch
    return records


def row_of(record: Record, *, seqno: bool = True) -> Row:
    """A record as a row of the data source: COLUMNS, times in milliseconds."""
    txn = None if record.txn is None else str(record.txn)
    number = record.seqno if seqno else None
    event_time = record.event_time or None
    properties = tuple(sorted(record.properties.items()))
    return (
        record.topic, tuple(record.position), number, record.key, record.value, properties, txn, event_time,
        record.publish_time,
    )  # fmt: skip


def rows_of_spark(frame: Any) -> list[Row]:
    """The rows of a data frame with COLUMNS and optionally the outcome, in the order of their positions.

    Sorting in Spark would run the frame twice.
    """
    times = [f"unix_millis({name}) {name}" if name.endswith("_time") else name for name in frame.columns]
    rows = sorted(frame.selectExpr(*times).collect(), key=lambda row: (row.topic, row.position))
    return [
        (row[0], tuple(row[1]), row[2], *(_bytes(item) for item in row[3:5]), tuple(sorted(row[5].items())), *row[6:])
        for row in rows
    ]


def _bytes(item: Any) -> bytes | None:
    return None if item is None else bytes(item)


def rows_read(
    broker: Broker,
    pinned: PinnedTopic,
    ranges: Iterable[RecordRange],
    *,
    keep_hidden: bool = False,
    isolated: bool = True,
) -> list[Row]:
    """The rows that tasks read of ranges, one range after the other."""
    schema = schema_of((*COLUMNS, OUTCOME) if keep_hidden else COLUMNS)
    record_filter = filter_of(pinned, isolated=isolated, keep_hidden=keep_hidden)
    rows: list[Row] = []
    for one in ranges:
        for found in read_range(broker, one, record_filter):
            batch = record_batch(found, schema)
            batch.validate(full=True)
            rows += rows_of_batch(batch)
    return rows


def filter_of(pinned: PinnedTopic, *, isolated: bool = True, keep_hidden: bool = False) -> RecordFilter:
    return RecordFilter(
        pinned.topic,
        pinned.incarnation,
        pinned.visibility,
        pinned.registered,
        isolated=isolated,
        keep_hidden=keep_hidden,
    )


def rows_of_batch(batch: Any) -> list[Row]:
    """The rows of an Arrow record batch with COLUMNS and optionally the outcome."""
    return [_plain(row) for row in zip(*(column.to_pylist() for column in _milliseconds(batch)), strict=True)]


def _milliseconds(batch: Any) -> list[Any]:
    return [
        column.cast("int64") if name.endswith("_time") else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]


def _plain(row: Row) -> Row:
    topic, position, seqno, key, value, properties, txn, event_time, publish_time, *outcome = row
    place = (position["ledger"], position["entry"], position["batch"])
    times = (None if event_time is None else event_time // 1000, publish_time // 1000)
    return (topic, place, seqno, key, value, tuple(sorted(properties)), txn, *times, *outcome)
