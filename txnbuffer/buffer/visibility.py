"""The visibility rule: which messages of a batch are visible, according to a transaction buffer.

A record at or before the max read position is visible unless its transaction is aborted or its position is suppressed;
a marker never is. The rule needs nothing else, whatever position a reader starts from. It is applied to a transaction
buffer, or to a pinned copy that no longer changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.position import NO_INDEX, Int64s, Position
from txnbuffer.buffer.sets import AbortedSet, SuppressedRanges
from txnbuffer.columns import numbers, present, transaction_codes
from txnbuffer.protocol import MARKER, MAX_SET_RECORDS, RECORDS, TXN


class Visibility(Protocol):
    """All up to `max_read_position` is decided, None: nothing is."""

    @property
    def aborted(self) -> AbortedSet: ...

    @property
    def suppressed(self) -> SuppressedRanges: ...

    @property
    def max_read_position(self) -> Position | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class PinnedVisibility:
    """The visibility of one moment, which can be sent to other processes."""

    aborted: AbortedSet
    suppressed: SuppressedRanges
    max_read_position: Position | None

    @classmethod
    def of(cls, visibility: Visibility) -> PinnedVisibility:
        """Shares the sets of a buffer that is not to be applied any further."""
        return cls(visibility.aborted, visibility.suppressed, visibility.max_read_position)


def visible_mask(placed: PlacedBatch, buffer: Visibility) -> NDArray[np.bool_]:
    """bool[n]: which of the messages are visible, at least in part.

    Of a record set some records may be suppressed: once it is unpacked, the positions of its records
    tell which (`buffer.suppressed.mask`).
    """
    return visible_counts(placed, buffer) > 0


def visible_counts(placed: PlacedBatch, buffer: Visibility) -> Int64s:
    """int64[n]: how many visible records each message holds."""
    count = len(placed)
    properties = placed.messages.properties
    visible = np.zeros(count, np.bool_)
    visible[: decided_rows(placed, buffer)] = True
    if MARKER in properties:
        visible &= ~present(properties[MARKER], count)
    if TXN in properties:
        codes, table = transaction_codes(properties[TXN], count)
        visible &= ~buffer.aborted.mask(table.most, table.least)[codes]
    counts = (visible & ~buffer.suppressed.mask(placed.positions)).astype(np.int64)
    if RECORDS in properties:
        sizes = numbers(properties[RECORDS], count, MAX_SET_RECORDS)
        sets = np.flatnonzero((sizes > 0) & (placed.positions.indexes == NO_INDEX))
        counts[sets] = np.where(visible[sets], _unsuppressed(placed, buffer, sets, sizes[sets]), 0)
    return counts


def decided_rows(placed: PlacedBatch, buffer: Visibility) -> int:
    """How many of the messages, from the first, stand at or before the max read position."""
    limit = buffer.max_read_position
    if limit is None or not len(placed):
        return 0
    return len(placed) if placed.positions.last <= limit else placed.positions.search(limit, right=True)


def _unsuppressed(placed: PlacedBatch, buffer: Visibility, sets: NDArray[np.intp], sizes: Int64s) -> Int64s:
    """How many records of each record set, given by row and size, are not suppressed."""
    positions = placed.positions
    if not len(sets) or not buffer.suppressed.touch(positions.first, positions.last._replace(batch=MAX_SET_RECORDS)):
        return sizes
    hidden = [
        buffer.suppressed.count(Position(ledger, entry, 0), size)
        for (ledger, entry, _), size in zip(positions.take(sets), sizes.tolist(), strict=True)
    ]
    return sizes - np.array(hidden, np.int64)
