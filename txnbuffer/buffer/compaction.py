"""What compaction may do to the messages of a topic, according to a transaction buffer

Aborted and suppressed records go. Visible records with a key compete for it; a later position is a higher seqno, so the
newest position wins. All else stays: markers, records without a key, and visible record sets, whose keys compaction
does not see. An emptied record keeps the properties of the log protocol, and gets `tb.removed`: a replay of the log
counts it as before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import Batch, Blobs, Labels, Numbers, PlacedBatch, PropertyColumn
from broker_io.compaction import RecordRetention, Retentions
from broker_io.position import NO_INDEX
from txnbuffer.buffer.visibility import Visibility, decided_rows, visible_counts
from txnbuffer.errors import InvalidRequest
from txnbuffer.protocol import MARKER, MAX_SET_RECORDS, RECORDS, REMOVED, RESERVED, numbers, present


@dataclass(frozen=True, slots=True)
class TransactionRules:
    """The rules for messages that are all decided according to `visibility`."""

    visibility: Visibility

    def retentions(self, placed: PlacedBatch) -> Retentions:
        """See `CompactionRules`. Raises InvalidRequest for a message that is not decided."""
        if decided_rows(placed, self.visibility) < len(placed):
            limit = self.visibility.max_read_position
            raise InvalidRequest(f"{placed.positions.last} is not decided yet: compact only ledgers up to {limit}")
        count, properties = len(placed), placed.messages.properties
        visible = visible_counts(placed, self.visibility) > 0
        found = np.where(visible, RecordRetention.LATEST, RecordRetention.EMPTY).astype(np.int8)
        found[visible & placed.messages.keys.absent_mask()] = RecordRetention.RETAIN
        if RECORDS in properties:
            sets = (numbers(properties[RECORDS], count, MAX_SET_RECORDS) > 0) & (placed.positions.indexes == NO_INDEX)
            found[visible & sets] = RecordRetention.RECORD_SET
        for name in (MARKER, REMOVED):
            if name in properties:
                found[present(properties[name], count)] = RecordRetention.RETAIN
        return found

    def emptied(self, messages: Batch, which: NDArray[np.bool_]) -> Batch:
        """See `CompactionRules`."""
        kept = ~which
        properties: dict[str, PropertyColumn] = {}
        for name, column in messages.properties.items():
            left = column if name.startswith(RESERVED) else _without(column, which)
            if present(left, len(messages)).any():
                properties[name] = left
        removed = which | present(properties.get(REMOVED), len(messages))
        properties[REMOVED] = Labels(np.where(removed, 0, -1).astype(np.int32), ("1",))
        times = None if messages.event_times is None else np.where(which, 0, messages.event_times)
        return Batch(_blank(messages.keys, kept), _blank(messages.values, kept), properties, times)


def _blank(blobs: Blobs, kept: NDArray[np.bool_]) -> Blobs:
    """The column with only the kept strings."""
    lengths = np.where(kept, blobs.lengths(), 0)
    offsets = np.zeros(len(blobs) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return Blobs(blobs.take(kept).data, offsets, blobs.absent_mask() | ~kept)


def _without(column: PropertyColumn, which: NDArray[np.bool_]) -> PropertyColumn:
    """The column without the texts of the masked messages."""
    if isinstance(column, Labels):
        return Labels(np.where(which, -1, column.codes).astype(np.int32), column.values).fitted()
    return Numbers(np.where(which, 0, column.values), present(column, len(column)) & ~which)
