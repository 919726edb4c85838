"""The index of a topic's mutation snapshots: the bounds of all of them that the log still holds.

A backfill finds in it where in the log a seqno is, and a stream that resumes finds the snapshot that it was in. Entries
are added in order and sealed in segments of `SEGMENT_ENTRIES`, which never change and are numbered for ever: the owner
stores each once (`txnbuffer/recovery/codec.py`). In memory a segment takes 13 to 22 bytes for each entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker_io.position import Int64s, Position, Positions

SEGMENT_ENTRIES = 1024
"""Entries of a sealed segment."""


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

    @classmethod
    def of(cls, entries: Iterable[SnapshotIndexEntry]) -> IndexColumns:
        starts, ends, firsts, lasts, rows = [*zip(*entries, strict=True)] or [()] * 5
        numbers = [np.array(column, np.int64) for column in (starts, ends, rows)]
        return cls(numbers[0], numbers[1], Positions.of(list(firsts)), Positions.of(list(lasts)), numbers[2])

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[SnapshotIndexEntry]:
        numbers = (self.starts.tolist(), self.ends.tolist())
        return map(SnapshotIndexEntry, *numbers, self.firsts, self.lasts, self.rows.tolist())

    def row(self, at: int) -> SnapshotIndexEntry:
        return SnapshotIndexEntry(
            int(self.starts[at]), int(self.ends[at]), self.firsts[at], self.lasts[at], int(self.rows[at])
        )

    def check(self, after: int = 0) -> None:
        """Raises ValueError unless they are valid snapshots, ascending, without overlaps, above the seqno `after`."""
        befores = np.concatenate([np.array([after], np.int64), self.ends[:-1]])
        lengths = self.ends - self.starts + 1
        valid = (self.starts > befores) & (self.starts >= 1) & (self.rows >= 1) & (self.rows <= lengths)
        if not valid.all():
            bad = int(np.argmin(valid))
            raise ValueError(
                f"{self.row(bad)} is not a snapshot of 1 to {int(lengths[bad])} mutations after {int(befores[bad])}"
            )


Narrow = NDArray[np.unsignedinteger[Any]]


def _narrowed(column: Int64s) -> tuple[int, Narrow]:
    """A column as its minimum and the differences from it, in as few bytes as they need."""
    least = int(column.min())
    differences = (column - least).view(np.uint64)
    return least, differences.astype(np.min_scalar_type(int(differences.max())))


class IndexSegment:
    """Sealed entries, at least one: the segment `number` of the index, of the mutations `start` to `end`."""

    __slots__ = ("_columns", "end", "number", "start")

    def __init__(self, number: int, columns: IndexColumns) -> None:
        self.number = number
        self.start, self.end = int(columns.starts[0]), int(columns.ends[-1])
        firsts, lasts = columns.firsts, columns.lasts
        axes = [axis for places in (firsts, lasts) for axis in (places.ledgers, places.entries, places.indexes)]
        self._columns = [_narrowed(column) for column in (columns.starts, columns.ends, columns.rows, *axes)]

    def columns(self) -> IndexColumns:
        starts, ends, rows, *axes = (differences.astype(np.int64) + least for least, differences in self._columns)
        first, last = Positions(axes[0], axes[1], axes[2]), Positions(axes[3], axes[4], axes[5])
        return IndexColumns(starts, ends, first, last, rows)

    def __len__(self) -> int:
        return len(self._columns[0][1])

    @property
    def nbytes(self) -> int:
        """Bytes of its columns in memory."""
        return sum(differences.nbytes for _, differences in self._columns)


class IndexState(NamedTuple):
    """An index as a value: its sealed segments, `first` being the number of the first, and the entries after them."""

    first: int
    segments: tuple[IndexSegment, ...]
    unsealed: IndexColumns

    def trimmed(self, first_seqno: int) -> IndexState:
        """Without the segments that are wholly below `first_seqno`, the first mutation that the log still has."""
        gone = bisect_left(self.segments, first_seqno, key=_end)
        return self if not gone else self._replace(first=self.first + gone, segments=self.segments[gone:])

    def check(self) -> None:
        """Raises ValueError unless all entries are ascending."""
        end = 0
        for number, segment in enumerate(self.segments, self.first):
            if segment.number != number:
                raise ValueError(f"segment {segment.number} of mutation snapshots is in the place of {number}")
            if segment.start <= end:
                raise ValueError(f"segment {number} of mutation snapshots begins with {segment.start}, after {end}")
            end = segment.end
        self.unsealed.check(end)


_start, _end = attrgetter("start"), attrgetter("end")

EMPTY_COLUMNS = IndexColumns.of(())
EMPTY = IndexState(1, (), EMPTY_COLUMNS)


class SnapshotIndex:
    """The bounds of mutation snapshots, ascending, without overlaps.

    A seqno without an entry is below the first one, between two entries or above the last one: its mutations were
    trimmed, or nobody streamed the topic then.
    """

    __slots__ = ("_first_seqno", "_sealed", "_segment_entries", "_unsealed")

    def __init__(self, state: IndexState = EMPTY, *, segment_entries: int | None = None) -> None:
        self._sealed = state._replace(unsealed=EMPTY.unsealed)
        self._unsealed: list[SnapshotIndexEntry] = [*state.unsealed]
        self._segment_entries = segment_entries or SEGMENT_ENTRIES
        self._first_seqno = 1

    def state(self) -> IndexState:
        return self._sealed._replace(unsealed=IndexColumns.of(self._unsealed))

    def __len__(self) -> int:
        return sum(map(len, self._sealed.segments)) + len(self._unsealed)

    def __iter__(self) -> Iterator[SnapshotIndexEntry]:
        for segment in self._sealed.segments:
            yield from segment.columns()
        yield from self._unsealed

    @property
    def end(self) -> int:
        """The last seqno of the last entry, 0 without one."""
        if self._unsealed:
            return self._unsealed[-1].end
        return self._sealed.segments[-1].end if self._sealed.segments else 0

    def add(self, entry: SnapshotIndexEntry) -> None:
        """Add an entry above all others. Raises ValueError if it is not above them, or invalid.

        If a segment is full, the entries before this one are sealed.
        """
        length = entry.end - entry.start + 1
        if not (self.end < entry.start and 1 <= entry.rows <= length):
            raise ValueError(f"{entry} is not a snapshot of 1 to {length} mutations after {self.end}")
        if len(self._unsealed) >= self._segment_entries:
            first, segments, _ = self._sealed
            sealed = IndexSegment(first + len(segments), IndexColumns.of(self._unsealed))
            self._sealed = self._sealed._replace(segments=(*segments, sealed))
            self._unsealed = []
        self._unsealed.append(entry)

    def find(self, seqno: int) -> SnapshotIndexEntry | None:
        """The last entry that begins at or below `seqno`, even if its start was trimmed; None if there is none."""
        if self._unsealed and self._unsealed[0].start <= seqno:
            return self._unsealed[bisect_right(self._unsealed, seqno, key=_start) - 1]
        at = bisect_right(self._sealed.segments, seqno, key=_start) - 1
        if at < 0:
            return None
        columns = self._sealed.segments[at].columns()
        return columns.row(int(np.searchsorted(columns.starts, seqno, side="right")) - 1)

    def anchor(self, seqno: int) -> SnapshotAnchor | None:
        """The highest mutation at or below `seqno` with a known position.

        None if there is none, or if its snapshot begins before the log does.
        """
        entry = self.find(seqno)
        if entry is None or entry.start < self._first_seqno:
            return None
        return SnapshotAnchor(entry.end, entry.last) if entry.end <= seqno else SnapshotAnchor(entry.start, entry.first)

    def trim(self, first_seqno: int) -> None:
        """The log now begins with `first_seqno`: drop segments and unsealed entries that are wholly below it."""
        self._first_seqno = max(self._first_seqno, first_seqno)
        self._sealed = self._sealed.trimmed(first_seqno)
        del self._unsealed[: bisect_left(self._unsealed, first_seqno, key=_end)]
