"""Records that come as columns already: checked and cut into sends without a step per record."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from broker_io.batch import Batch
from broker_io.errors import MessageTooLarge
from txnbuffer.client.outbox import CELL_BYTES, ROW_BYTES, Flight, OpenTransaction, Run, width
from txnbuffer.client.rows import PROPERTY_BYTES
from txnbuffer.frames import SEND_BYTES, Send
from txnbuffer.protocol import transactional
from txnbuffer.recordset import PROPERTY_ROOM, SET_ROOM, Stretch, pack_all


def check_batch(records: Batch, limit: int, *, in_sets: bool) -> None:
    """Raises MessageTooLarge for a record that is above the limit of a message; 0 is not known yet."""
    extra = PROPERTY_BYTES + (SET_ROOM + PROPERTY_ROOM * len(records.properties) if in_sets else 0)
    largest = int(records.sizes().max(initial=0))
    if limit and largest + extra > limit:
        raise MessageTooLarge(f"a record of {largest} bytes is over the limit of {limit - extra}: split it")


def split(records: Batch) -> Iterator[Batch]:
    """The records in pieces that fit into a send each."""
    ends = np.cumsum(records.sizes() + ROW_BYTES + CELL_BYTES * len(records.properties))
    start = 0
    while start < len(records):
        base = 0 if start == 0 else int(ends[start - 1])
        stop = max(int(np.searchsorted(ends, base + SEND_BYTES, side="right")), start + 1)
        yield records if stop - start == len(records) else records.take(slice(start, stop))
        start = stop


def flight_of(topic: str, records: Batch, transaction: OpenTransaction, set_bytes: int) -> Flight:
    """A send of records of a transaction, the next ones that it has there; `set_bytes` as in Rows."""
    count = len(records)
    first = transaction.counts.get(topic, 0) + 1
    transaction.counts[topic] = first + count - 1
    transaction.pending += count
    size = int(records.sizes().sum()) + ROW_BYTES * count + width(len(records.properties), count)
    if set_bytes:
        messages = pack_all(records, [Stretch(transaction.txn, first, count)], set_bytes)
    else:
        messages = transactional(records, transaction.txn, first)
    return Flight(Send(topic, messages), [Run(transaction, count)], [], size)
