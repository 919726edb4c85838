"""Checking the stored bounds of mutation snapshots against the log, and keeping those that agree with it.

Where one mutation snapshot ends and the next begins depends on readers and memory, so a log alone does not give it. But
the log gives the position of each seqno: if the stored bounds say that mutation 7 is at 3:12, and the seventh visible
record of the log is there, that bound is right.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.position import Int64s, Positions
from snapshots.errors import SnapshotError
from snapshots.format import MUTATIONS, OVERFLOW, BadRecord, EntryKey, decode_end, state_bytes
from snapshots.scan import TopicEntries
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import Sequenced
from txnbuffer.follow import visible_records
from txnbuffer.mutations.index import IndexColumns, SnapshotIndex, SnapshotIndexEntry
from txnbuffer.recovery.codec import decode_mutations, decode_state


def readable_bounds(topic: str, incarnation: str, entries: TopicEntries) -> tuple[list[SnapshotIndexEntry], list[str]]:
    """The mutation snapshots in the readable entries of a topic, ascending, and what is wrong with the others."""
    if entries.end is None:
        return [], []
    found: list[SnapshotIndexEntry] = []
    problems: list[str] = []
    try:
        end = decode_end(topic, entries.end)
        if end.deleted or end.incarnation != incarnation:
            return [], []
        unsealed = decode_state(state_bytes(topic, end, entries.numbered[OVERFLOW])).unsealed_index
    except (SnapshotError, BadRecord) as error:
        return [], [f"no mutation snapshot is known: {error}"]
    for number in end.numbers(MUTATIONS):
        stored = entries.numbered[MUTATIONS].get(number)
        try:
            if stored is None:
                problems.append(f"{EntryKey(topic, MUTATIONS, number)} is missing: its mutation snapshots are lost")
            else:
                found += decode_mutations(topic, number, stored).segment.columns()
        except SnapshotError as error:
            problems.append(f"its mutation snapshots are lost: {error}")
    found += unsealed
    try:
        IndexColumns.of(found).check()
    except ValueError as error:
        return [], [*problems, f"no mutation snapshot is known: {error}"]
    return found, problems


class BoundsCheck:
    """Compares mutation snapshots, ascending, with a log that is sequenced from its start."""

    def __init__(self, bounds: Iterable[SnapshotIndexEntry]) -> None:
        self._bounds = [*bounds]
        columns = IndexColumns.of(self._bounds)
        self._seqnos = np.column_stack([columns.starts, columns.ends]).reshape(-1)
        axes = zip(_axes(columns.firsts), _axes(columns.lasts), strict=True)
        ledgers, entries, indexes = (np.column_stack(pair).reshape(-1) for pair in axes)
        self._expected = Positions(ledgers, entries, indexes)
        self._right = np.zeros(len(self._seqnos), np.bool_)

    def sequenced(self, buffer: TransactionBuffer, placed: PlacedBatch, sequenced: Sequenced) -> None:
        """Check the bounds within messages that were sequenced; `buffer` decides their visibility."""
        start, _, counts, first = sequenced
        low, high = np.searchsorted(self._seqnos, [first, first + int(counts.sum())])
        if low == high:
            return
        offsets = self._seqnos[low:high] - first
        ends = np.cumsum(counts)
        rows, row_of = np.unique(np.searchsorted(ends, offsets, side="right"), return_inverse=True)
        records = visible_records(placed.take(rows + start), buffer, counts[rows]).positions
        before = np.cumsum(counts[rows]) - counts[rows]
        at = before[row_of] + offsets - (ends - counts)[rows][row_of]
        found, expected = records.take(at), self._expected.take(slice(low, high))
        same = [one == other for one, other in zip(_axes(found), _axes(expected), strict=True)]
        self._right[low:high] = np.logical_and.reduce(same)

    def index(self) -> tuple[SnapshotIndex, list[str]]:
        """The index of the mutation snapshots whose bounds are those of the log, and what is wrong with the others."""
        right = np.logical_and(self._right[::2], self._right[1::2]).tolist()
        index = SnapshotIndex()
        wrong: list[SnapshotIndexEntry] = []
        for entry, agrees in zip(self._bounds, right, strict=True):
            if agrees:
                index.add(entry)
            else:
                wrong.append(entry)
        if not wrong:
            return index, []
        such = f"such as {wrong[0].start} to {wrong[0].end}"
        return index, [f"{len(wrong)} mutation snapshots, {such}, are elsewhere in the log"]


def _axes(positions: Positions) -> tuple[Int64s, Int64s, Int64s]:
    return positions.ledgers, positions.entries, positions.indexes
