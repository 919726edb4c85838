"""Visible records as a reader returns them: columns, or single records"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from broker_io.batch import Batch, PlacedBatch, PropertyColumn, Which
from broker_io.position import Int64s, Positions
from txnbuffer.model import Position, TxnId
from txnbuffer.protocol import RESERVED, TXN


class Record(NamedTuple):
    """One visible record.

    `value` is None if the record deletes its key. `seqno` numbers the visible records of the topic from 1; None as in
    RecordBatch. Times are milliseconds since 1970; `event_time` is 0 if the sender gave none. `txn` is None if the
    record was sent outside of a transaction.
    """

    topic: str
    position: Position
    seqno: int | None
    key: bytes | None
    value: bytes | None
    properties: Mapping[str, str]
    event_time: int
    publish_time: int
    txn: TxnId | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch:
    """n visible records of one topic in log order, as columns of length n; iterate it for single records.

    - `positions`: where the records are in the log of the topic.
    - `seqnos`: int64[n], the numbers of the topic's visible records, from 1. None if the topic has had no transactions,
      or if the reader is not read_committed.
    - `publish_times`: int64[n], milliseconds since 1970.
    - `messages`: keys, values, properties and event times.
    - `txns`: transaction ids as text `most:least`; None if the batch has no transactional records.
    """

    topic: str
    positions: Positions
    seqnos: Int64s | None
    publish_times: Int64s
    messages: Batch
    txns: PropertyColumn | None

    @classmethod
    def of(cls, topic: str, placed: PlacedBatch, seqnos: Int64s | None) -> RecordBatch:
        messages = placed.messages
        properties = {name: column for name, column in messages.properties.items() if not name.startswith(RESERVED)}
        return cls(
            topic,
            placed.positions,
            seqnos,
            placed.publish_times,
            Batch(messages.keys, messages.values, properties, messages.event_times),
            messages.properties.get(TXN),
        )

    def take(self, which: Which) -> RecordBatch:
        """Return the records that a mask, an index array or a slice selects."""
        return RecordBatch(
            self.topic,
            self.positions.take(which),
            None if self.seqnos is None else self.seqnos[which],
            self.publish_times[which],
            self.messages.take(which),
            None if self.txns is None else self.txns.take(which),
        )

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Record]:
        seqnos = [None] * len(self) if self.seqnos is None else self.seqnos.tolist()
        txns = [None] * len(self) if self.txns is None else self.txns.to_list()
        rows = zip(self.positions, seqnos, self.messages, self.publish_times.tolist(), txns, strict=True)
        for position, seqno, message, publish_time, txn in rows:
            key, value, properties, event_time = message
            yield Record(
                self.topic,
                position,
                seqno,
                key,
                value,
                properties,
                event_time,
                publish_time,
                None if txn is None else TxnId.parse(txn),
            )
