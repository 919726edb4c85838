"""The visible records of decided messages: record sets unpacked, suppressed records left out"""

from __future__ import annotations

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.position import Int64s
from txnbuffer.buffer.visibility import Visibility, visible_counts
from txnbuffer.errors import SeqnoGap, UndecodableRecordSet
from txnbuffer.recordset import expand


def visible_records(placed: PlacedBatch, visibility: Visibility, counts: Int64s | None = None) -> PlacedBatch:
    """The visible records of messages. `counts`: int64[n], how many each message has, if that is known.

    Raises UndecodableRecordSet, and SeqnoGap if a record set contains another number of records than it declares.
    """
    if counts is None:
        counts = visible_counts(placed, visibility)
    records, broken = visible_prefix(placed, visibility, counts)
    if broken is not None:
        raise broken
    if len(records) != (expected := int(counts.sum())):
        raise SeqnoGap(f"{len(records)} records were read from {placed.positions.first} on, {expected} were expected")
    return records


def visible_prefix(placed: PlacedBatch, visibility: Visibility, counts: Int64s) -> tuple[PlacedBatch, Error | None]:
    """The visible records before the first record set that cannot be unpacked, and its error. `counts`: as above."""
    if not counts.all():
        placed = placed.take(np.flatnonzero(counts))
    records, broken = unpacked(placed)
    if records is not placed:
        records = records.take(~visibility.suppressed.mask(records.positions))
    return records, broken


def unpacked(placed: PlacedBatch) -> tuple[PlacedBatch, Error | None]:
    """The records of messages before the first record set that cannot be unpacked, and its error.

    Each record of a set has the transaction id and the sequence of its own.
    """
    try:
        return expand(placed), None
    except UndecodableRecordSet as error:
        for row in range(len(placed)):
            try:
                expand(placed.take(slice(row, row + 1)))
            except UndecodableRecordSet:
                return expand(placed.take(slice(row))), error
        raise
