"""Records with keys of 8 bytes and values of 100 bytes in batches, and transactions of records."""

from __future__ import annotations

import numpy as np

from broker_io.batch import Batch, Blobs, Labels
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId
from txnbuffer.protocol import SEQ, TXN, VERSION, encode_marker

KEY_BYTES = 8
VALUE_BYTES = 100


def records(count: int, first: int = 0) -> Batch:
    """`count` records with distinct keys, numbered from `first`."""
    keys = np.arange(first, first + count, dtype=">u8").tobytes()
    values = np.random.default_rng(first).bytes(count * VALUE_BYTES)
    return Batch(_column(keys, KEY_BYTES, count), _column(values, VALUE_BYTES, count))


def batches(count: int, size: int) -> list[Batch]:
    """`count` records in batches of `size`."""
    return [records(size, first) for first in range(0, count, size)]


def one_record_each(least: range, *, size: int = VALUE_BYTES) -> Batch:
    """A batch with one record of `size` bytes for each of these transactions."""
    count = len(least)
    properties = {
        VERSION: Labels.constant("1", count),
        TXN: Labels(np.arange(count, dtype=np.int32), tuple(f"0:{number}" for number in least)),
        SEQ: Labels.constant("1", count),
    }
    return Batch(Blobs.none(count), _column(bytes(count * size), size, count), properties)


def end_of(least: range, outcome: Outcome, records: int = 1) -> Batch:
    """A marker that ends these transactions; all earlier ones have ended on all topics."""
    items = tuple(MarkerItem(TxnId(0, number), outcome, records) for number in least)
    return Batch.of([encode_marker(Marker(0, 1, least.start - 1, True, items))])


def _column(data: bytes, width: int, count: int) -> Blobs:
    return Blobs(data, np.arange(0, (count + 1) * width, width, dtype=np.int32), None)
