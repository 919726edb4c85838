"""The index of mutation snapshots: the position in the log where a backfill from a seqno begins.

The persistence cursor adds an entry for each snapshot that it passes; the buffer's snapshot stores them. A seqno
without an entry is between two entries or above the last one. The index is capped: beyond `cap` entries the oldest half
is merged in pairs, so old seqnos are found less exactly than recent ones.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from broker_io.position import Int64s, Position, Positions

CAP = 4096


class SnapshotIndexEntry(NamedTuple):
    """A snapshot of the mutations `start` to `end`; it had `rows` mutations.

    `first` and `last` are the positions of the mutations numbered `start` and `end`.
    """

    start: int
    end: int
    first: Position
    last: Position
    rows: int


class SnapshotAnchor(NamedTuple):
    """The mutation numbered `seqno` is at `position`."""

    seqno: int
    position: Position


@dataclass(frozen=True, slots=True, eq=False)
class IndexColumns:
    """n entries, ascending, as columns of length n."""

    starts: Int64s
    ends: Int64s
    firsts: Positions
    lasts: Positions
    rows: Int64s


_start = attrgetter("start")


class SnapshotIndex:
    """At most `cap` entries, ascending, without overlaps."""

    __slots__ = ("_entries", "cap")

    def __init__(self, cap: int = CAP) -> None:
        if cap < 2:
            raise ValueError(f"cap must be at least 2 entries, got {cap}")
        self.cap = cap
        self._entries: list[SnapshotIndexEntry] = []

    @classmethod
    def of(cls, columns: IndexColumns, cap: int = CAP) -> SnapshotIndex:
        """The index with these `columns()`. Raises ValueError if they are invalid."""
        index = cls(cap)
        rows = (columns.starts.tolist(), columns.ends.tolist(), columns.firsts, columns.lasts, columns.rows.tolist())
        for entry in map(SnapshotIndexEntry, *rows):
            index.add(entry)
        return index

    def columns(self) -> IndexColumns:
        entries = self._entries
        return IndexColumns(
            np.array([entry.start for entry in entries], np.int64),
            np.array([entry.end for entry in entries], np.int64),
            Positions.of([entry.first for entry in entries]),
            Positions.of([entry.last for entry in entries]),
            np.array([entry.rows for entry in entries], np.int64),
        )

    def entries(self) -> list[SnapshotIndexEntry]:
        return list(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: SnapshotIndexEntry) -> None:
        """Add an entry above all others. Raises ValueError if it is not above them, or invalid."""
        if self._entries and entry.start <= self._entries[-1].end:
            raise ValueError(
                f"snapshot {entry.start} to {entry.end} does not follow {self._entries[-1].end}, the end of the index"
            )
        if not (1 <= entry.start <= entry.end and 1 <= entry.rows <= entry.end - entry.start + 1):
            raise ValueError(
                f"{entry} is not a valid snapshot: it must have 1 to {entry.end - entry.start + 1} mutations"
            )
        self._entries.append(entry)
        if len(self._entries) > self.cap:
            old = self._entries[: self.cap // 4 * 2 or 2]
            pairs = zip(old[::2], old[1::2], strict=True)
            self._entries[: len(old)] = [_together(first, second) for first, second in pairs]

    def anchor(self, seqno: int) -> SnapshotAnchor | None:
        """The highest mutation at or below `seqno` with a known position; None if there is none."""
        at = bisect_right(self._entries, seqno, key=_start)
        if not at:
            return None
        entry = self._entries[at - 1]
        return SnapshotAnchor(entry.end, entry.last) if entry.end <= seqno else SnapshotAnchor(entry.start, entry.first)

    def trim(self, first_seqno: int) -> None:
        """Remove entries that begin below `first_seqno`, the start of the log; their first position was trimmed."""
        del self._entries[: bisect_right(self._entries, first_seqno - 1, key=_start)]


def _together(first: SnapshotIndexEntry, second: SnapshotIndexEntry) -> SnapshotIndexEntry:
    return SnapshotIndexEntry(first.start, second.end, first.first, second.last, first.rows + second.rows)
