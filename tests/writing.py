"""Writes the log of one topic for tests: records, markers and epoch markers, as a coordinator and its clients do."""

from __future__ import annotations

from collections import Counter

from broker_io.batch import Batch, Message
from broker_io.port import Broker
from broker_io.position import Position, Positions
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import encode_marker, transactional
from txnbuffer.recordset import pack


class TopicWriter:
    """`txn` numbers are the `least` of coordinator 0; seqs and record counts are assigned automatically."""

    def __init__(self, broker: Broker, topic: str, epoch: int = 1) -> None:
        broker.create_topic(topic)
        self.epoch = epoch
        self.low_water_mark = 0
        self._writer = broker.writer(topic)
        self._written: Counter[int] = Counter()

    def plain(self, *values: str | None, key: str | None = None) -> Positions:
        return self._append(_batch(values, key))

    def records(self, txn: int, *values: str | None, key: str | None = None, first_seq: int | None = None) -> Positions:
        first = self._written[txn] + 1 if first_seq is None else first_seq
        self._written[txn] = max(self._written[txn], first + len(values) - 1)
        return self._append(transactional(_batch(values, key), TxnId(0, txn), first))

    def record_set(self, txn: int, *values: str | None, key: str | None = None) -> Positions:
        first = self._written[txn] + 1
        self._written[txn] += len(values)
        return self._append(Batch.of([pack(_batch(values, key), TxnId(0, txn), first)]))

    def commit(self, *txns: int) -> Position:
        return self._mark(Outcome.COMMIT, txns)

    def abort(self, *txns: int) -> Position:
        return self._mark(Outcome.ABORT, txns)

    def _mark(self, outcome: Outcome, txns: tuple[int, ...]) -> Position:
        items = tuple(MarkerItem(TxnId(0, txn), outcome, self._written[txn]) for txn in txns)
        return self._append(Batch.of([encode_marker(Marker(0, self.epoch, self.low_water_mark, True, items))])).last

    def _append(self, batch: Batch) -> Positions:
        return self._writer.append(batch).result(120)


def _batch(values: tuple[str | None, ...], key: str | None) -> Batch:
    encoded = None if key is None else key.encode()
    return Batch.of([Message(encoded, None if value is None else value.encode()) for value in values])
