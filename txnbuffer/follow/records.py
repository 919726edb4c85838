"""The visible records of decided messages: record sets unpacked, suppressed records left out"""

from __future__ import annotations

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.position import Int64s
from txnbuffer.buffer.visibility import Visibility, visible_counts
from txnbuffer.errors import SeqnoGap
from txnbuffer.recordset import expand


def visible_records(placed: PlacedBatch, visibility: Visibility, counts: Int64s | None = None) -> PlacedBatch:
    """The visible records of messages. `counts`: int64[n], how many each message has, if that is known.

    Raises UndecodableRecordSet, and SeqnoGap if a record set contains another number of records than it declares.
    """
    if counts is None:
        counts = visible_counts(placed, visibility)
    if not counts.all():
        placed = placed.take(np.flatnonzero(counts))
    records = expand(placed)
    if records is not placed:
        records = records.take(~visibility.suppressed.mask(records.positions))
    if len(records) != (expected := int(counts.sum())):
        raise SeqnoGap(f"{len(records)} records were read from {placed.positions.first} on, {expected} were expected")
    return records
