"""The state of a transaction buffer: the sets of which it consists, and the columns in which a snapshot stores them

Open transactions have a record in the log and no marker yet; the oldest is known at once. A coordinator's state says
which of its transactions have ended in this log, and its newest epoch. Aborted transactions are one compressed bitmap
for each coordinator. Suppressed positions (late, duplicate and undecodable records) are ranges by ledger.

Applying messages has effects, which are values too. Records that are simply accepted have no effect.
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from broker_io.position import EARLIEST, NO_INDEX, Int64s, Position, Positions, maker
from txnbuffer.model import Outcome, TxnId


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Columns of `a` aborts and `r` ranges, each in log order.

    `most`, `least`: int64[a], the aborted transactions; `markers`: the a positions of their markers.
    `firsts`, `lasts`: the r ranges of suppressed positions, ends included, each within one ledger.
    """

    most: Int64s
    least: Int64s
    markers: Positions
    firsts: Positions
    lasts: Positions

    @classmethod
    def of(
        cls, aborts: Iterable[tuple[TxnId, Position]] = (), ranges: Iterable[tuple[Position, Position]] = ()
    ) -> Items:
        aborted, suppressed = list(aborts), list(ranges)
        ids = np.array([txn for txn, _ in aborted], np.int64).reshape(-1, 2)
        return cls(
            ids[:, 0].copy(),
            ids[:, 1].copy(),
            Positions.of([marker for _, marker in aborted]),
            Positions.of([first for first, _ in suppressed]),
            Positions.of([last for _, last in suppressed]),
        )

    def __len__(self) -> int:
        return len(self.least) + len(self.firsts)

    @property
    def first(self) -> Position:
        """Position of the first item: of its marker, or of its first suppressed record."""
        return min(column.first for column in (self.markers, self.firsts) if len(column))

    @property
    def last(self) -> Position:
        return max(column.last for column in (self.markers, self.lasts) if len(column))


class SegmentSummary(NamedTuple):
    """What the state of a buffer keeps of a sealed segment."""

    number: int
    last_ledger: int
    aborts: int
    suppressed: int


@dataclass(frozen=True, slots=True, eq=False)
class BufferSegment:
    """A sealed segment; numbers start at 1."""

    number: int
    items: Items

    @property
    def summary(self) -> SegmentSummary:
        items = self.items
        return SegmentSummary(self.number, items.last.ledger, len(items.least), len(items.firsts))


NOWHERE = EARLIEST
"""No position, in a column of positions: before the first message of a log."""


@dataclass(frozen=True, slots=True, eq=False)
class OngoingColumns:
    """`n` ongoing transactions, oldest first; `befores` is NOWHERE for one that began with the log."""

    most: Int64s
    least: Int64s
    firsts: Positions
    befores: Positions
    highest: Int64s
    accepted: Int64s

    def __len__(self) -> int:
        return len(self.least)


@dataclass(frozen=True, slots=True, eq=False)
class CoordinatorColumns:
    """`k` coordinators, ascending by `most`; the bitmaps in Roaring's portable 64-bit form.

    Equal sets can have different bytes: Roaring may store a few numbers as a list or as a run of the same size.
    """

    most: Int64s
    low_water_marks: Int64s
    epochs: Int64s
    committed: tuple[bytes, ...]
    aborted: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.most)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Summaries of the segments `first`, `first + 1`, … that are not dropped: ledger of the last item, counts."""

    first: int
    last_ledgers: Int64s
    aborts: Int64s
    suppressed: Int64s

    def __len__(self) -> int:
        return len(self.last_ledgers)

    @property
    def end(self) -> int:
        """The number that the next segment will get."""
        return self.first + len(self)


class Counters(NamedTuple):
    """Counted since the topic's first message: records, except `undecodable` messages and `void` marker items."""

    late: int = 0
    duplicates: int = 0
    undecodable: int = 0
    void: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BufferState:
    """State between two messages: it includes all up to `applied`, nothing after it.

    `max_read` follows from the rest; it is kept for callers that need only it. Suppressed ranges of
    ledgers below `first_ledger` are dropped. `damage` holds the first damaged commits, `counters` the
    number of all.
    """

    segment_size: int
    applied: Position | None
    max_read: Position | None
    first_ledger: int
    ongoing: OngoingColumns
    coordinators: CoordinatorColumns
    segments: SegmentColumns
    unsealed: Items
    counters: Counters
    damage: tuple[Damage, ...]

    def differences(self, other: BufferState) -> list[str]:
        """One line for each field that differs, with both values; empty if the states are equal."""
        mine, theirs = _plain("", self), _plain("", other)
        return [f"{name}: {mine[name]!r} != {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


def _plain(name: str, value: object) -> dict[str, object]:
    if isinstance(value, CoordinatorColumns):
        sets = {
            f"{name}.{what}": [BitMap64.deserialize(bitmap).to_array().tolist() for bitmap in bitmaps]
            for what, bitmaps in (("committed", value.committed), ("aborted", value.aborted))
        }
        return {
            f"{name}.most": value.most.tolist(),
            f"{name}.low_water_marks": value.low_water_marks.tolist(),
            f"{name}.epochs": value.epochs.tolist(),
            **sets,
        }
    if isinstance(value, np.ndarray):
        return {name: value.tolist()}
    if is_dataclass(value):
        plain: dict[str, object] = {}
        for each in fields(value):
            plain |= _plain(f"{name}.{each.name}" if name else each.name, getattr(value, each.name))
        return plain
    return {name: value}


class Reason(enum.Enum):
    """Why records are suppressed."""

    LATE = "late"
    DUPLICATE = "duplicate"
    UNDECODABLE = "undecodable"


class Suppressed(NamedTuple):
    """`size` records (undecodable: messages) from `first` to `last` will never be visible.

    `txn` is None if it can't be read.
    """

    reason: Reason
    txn: TxnId | None
    first: Position
    last: Position
    size: int


class TransactionEnded(NamedTuple):
    """A transaction ended here by the marker at `position`; `accepted` of its records were accepted before."""

    txn: TxnId
    outcome: Outcome
    position: Position
    decided: bool
    accepted: int


as_ended = maker(TransactionEnded)


class Ignored(NamedTuple):
    """A marker's item without effect: its transaction had ended here."""

    txn: TxnId
    outcome: Outcome
    position: Position


class Void(NamedTuple):
    """A one-phase item of an owner with `epoch`, after an owner with the epoch `newest` was seen."""

    txn: TxnId
    outcome: Outcome
    position: Position
    epoch: int
    newest: int


class Damage(NamedTuple):
    """A commit that expects `expected` records in this topic found `accepted`."""

    txn: TxnId
    position: Position
    expected: int
    accepted: int


class EpochRaised(NamedTuple):
    """A marker of a newer owner of a coordinator was read in this topic."""

    coordinator: int
    epoch: int
    position: Position


Effect: TypeAlias = Suppressed | TransactionEnded | Ignored | Void | Damage | EpochRaised


@dataclass(slots=True, eq=False)
class OpenTxn:
    """One ongoing transaction: its first record here, the position before that, and what was accepted of it.

    `last`: its last record; None if no record was applied since the state was restored.
    """

    txn: TxnId
    first: Position
    before: Position | None
    highest: int
    accepted: int
    last: Position | None = None


class Ongoing(OrderedDict[TxnId, OpenTxn]):
    """The ongoing transactions of a topic, oldest first: they open in log order and never reopen."""

    def among(self, txns: Set[TxnId]) -> Iterator[OpenTxn]:
        """Those that are in a set, in no order."""
        return (self[txn] for txn in self.keys() & txns)

    def began_by(self, position: Position) -> Iterator[OpenTxn]:
        """Those whose first record is at or below a position."""
        return itertools.takewhile(lambda entry: entry.first <= position, self.values())

    def oldest(self) -> OpenTxn | None:
        return next(iter(self.values()), None)

    def columns(self) -> OngoingColumns:
        entries = [*self.values()]
        numbers = [(*entry.txn, entry.highest, entry.accepted) for entry in entries]
        most, least, highest, accepted = np.array(numbers, np.int64).reshape(-1, 4).T
        befores = [NOWHERE if entry.before is None else entry.before for entry in entries]
        firsts = Positions.of([entry.first for entry in entries])
        return OngoingColumns(most, least, firsts, Positions.of(befores), highest, accepted)

    @classmethod
    def of(cls, columns: OngoingColumns) -> Ongoing:
        ongoing = cls()
        ids = map(TxnId, columns.most.tolist(), columns.least.tolist())
        rest = (columns.firsts, columns.befores, columns.highest.tolist(), columns.accepted.tolist())
        for txn, first, before, highest, accepted in zip(ids, *rest, strict=True):
            ongoing[txn] = OpenTxn(txn, first, None if before == NOWHERE else before, highest, accepted)
        return ongoing


@dataclass(slots=True, eq=False)
class CoordinatorState:
    """What one topic's log says of one coordinator.

    Every transaction up to `low_water_mark` has ended; the bitmaps hold those above whose marker was seen
    here, by outcome. Trimming the log never changes this.
    """

    low_water_mark: int = 0
    epoch: int = 0
    committed: BitMap64 = field(default_factory=BitMap64)
    aborted: BitMap64 = field(default_factory=BitMap64)

    def has_ended(self, least: int) -> bool:
        """Whether a transaction without open records here has ended."""
        return least <= self.low_water_mark or least in self.committed or least in self.aborted

    def outcome(self, least: int) -> Outcome | None:
        """How a transaction above the low-water mark ended here; None if it did not, or is at or below the mark."""
        if least in self.committed:
            return Outcome.COMMIT
        return Outcome.ABORT if least in self.aborted else None

    def add(self, committed: set[int], aborted: set[int]) -> None:
        """Record ends, except at or below the low-water mark, where all have ended."""
        mark = self.low_water_mark
        self.committed.update(filter(mark.__lt__, committed))
        self.aborted.update(filter(mark.__lt__, aborted))

    def raise_low_water_mark(self, mark: int) -> None:
        if mark > self.low_water_mark:
            self.low_water_mark = mark
            self.committed.remove_range(0, mark + 1)
            self.aborted.remove_range(0, mark + 1)


def coordinator_columns(states: Mapping[int, CoordinatorState]) -> CoordinatorColumns:
    rows = sorted(states.items())
    return CoordinatorColumns(
        np.array([most for most, _ in rows], np.int64),
        np.array([state.low_water_mark for _, state in rows], np.int64),
        np.array([state.epoch for _, state in rows], np.int64),
        tuple(bitmap_to_bytes(state.committed) for _, state in rows),
        tuple(bitmap_to_bytes(state.aborted) for _, state in rows),
    )


def coordinator_states(columns: CoordinatorColumns) -> dict[int, CoordinatorState]:
    marks, epochs = columns.low_water_marks.tolist(), columns.epochs.tolist()
    bitmaps = zip(columns.committed, columns.aborted, strict=True)
    return {
        most: CoordinatorState(mark, epoch, bitmap_of_bytes(committed), bitmap_of_bytes(aborted))
        for most, mark, epoch, (committed, aborted) in zip(columns.most.tolist(), marks, epochs, bitmaps, strict=True)
    }


def bitmap_to_bytes(bitmap: BitMap64) -> bytes:
    """A bitmap in its stored form, Roaring's portable one."""
    copy = bitmap.copy()
    copy.run_optimize()
    data: bytes = copy.serialize()
    return data


def bitmap_of_bytes(data: bytes) -> BitMap64:
    """The bitmap that `bitmap_to_bytes` stored. Raises ValueError."""
    try:
        return BitMap64.deserialize(data)
    except Exception as error:  # the library raises any exception for bad bytes
        raise ValueError(f"a bitmap can't be read: {error}") from None


@dataclass(slots=True, eq=False)
class AbortedSet:
    """Aborted transactions, looked up one by one or by column; a few bits per id where ids are dense."""

    _bitmaps: dict[int, BitMap64] = field(default_factory=dict)
    """The bitmap of each coordinator."""

    def __contains__(self, txn: TxnId) -> bool:
        bitmap = self._bitmaps.get(txn.most)
        return bitmap is not None and txn.least in bitmap

    def __len__(self) -> int:
        return sum(map(len, self._bitmaps.values()))

    def __bool__(self) -> bool:
        return bool(self._bitmaps)  # none of them is empty

    def copy(self) -> AbortedSet:
        """A copy that stays as it is when this set changes."""
        return AbortedSet({most: bitmap.copy() for most, bitmap in self._bitmaps.items()})

    def add(self, txns: list[TxnId]) -> None:
        """Add ids of one coordinator, at least one."""
        self._bitmaps.setdefault(txns[0].most, BitMap64()).update([txn.least for txn in txns])

    def update(self, most: Int64s, least: Int64s) -> None:
        """Add a column of ids."""
        for coordinator in np.unique(most).tolist():
            chosen = BitMap64(least[most == coordinator].astype(np.uint64))
            self._bitmaps.setdefault(coordinator, BitMap64()).update(chosen)

    def discard(self, most: Int64s, least: Int64s) -> None:
        """Remove a column of ids; ids that are not in the set are ignored."""
        for coordinator in np.unique(most).tolist():
            bitmap = self._bitmaps.get(coordinator)
            if bitmap is not None:
                bitmap -= BitMap64(least[most == coordinator].astype(np.uint64))
                if bitmap:
                    self._bitmaps[coordinator] = bitmap
                else:
                    del self._bitmaps[coordinator]

    def mask(self, most: Int64s, least: Int64s) -> NDArray[np.bool_]:
        """bool[n]: which ids are in the set. An id with a negative least never is."""
        found = np.zeros(len(least), np.bool_)
        for coordinator, bitmap in self._bitmaps.items():
            rows = np.flatnonzero((most == coordinator) & (least > 0))
            found[rows] = np.fromiter(map(bitmap.__contains__, least[rows].tolist()), np.bool_, len(rows))
        return found

    def ids(self) -> list[TxnId]:
        """All of them, ascending; for tools and tests."""
        return [TxnId(most, least) for most in sorted(self._bitmaps) for least in self._bitmaps[most]]


@dataclass(slots=True, eq=False)
class SuppressedRanges:
    """Disjoint ranges in log order, each within one ledger, both ends included."""

    ledgers: dict[int, tuple[list[Position], list[Position]]] = field(default_factory=dict)
    """The first and last positions of the ranges in each ledger."""

    def __len__(self) -> int:
        return sum(len(firsts) for firsts, _ in self.ledgers.values())

    def copy(self) -> SuppressedRanges:
        """A copy that stays as it is when these ranges change."""
        return SuppressedRanges({ledger: ([*firsts], [*lasts]) for ledger, (firsts, lasts) in self.ledgers.items()})

    def add(self, first: Position, last: Position) -> None:
        """Add a range above all others."""
        firsts, lasts = self.ledgers.setdefault(first.ledger, ([], []))
        firsts.append(first)
        lasts.append(last)

    def extend(self, last: Position) -> None:
        """Extend the newest range of the ledger."""
        self.ledgers[last.ledger][1][-1] = last

    def trim(self, first_ledger: int) -> None:
        """Forget the ranges of all ledgers below `first_ledger`."""
        for ledger in [ledger for ledger in self.ledgers if ledger < first_ledger]:
            del self.ledgers[ledger]

    def mask(self, positions: Positions) -> NDArray[np.bool_]:
        """bool[n]: which of these positions, all of one ledger, are suppressed."""
        found = np.zeros(len(positions), np.bool_)
        if not self.ledgers or not len(positions):
            return found
        firsts, lasts = self._overlapping(positions.first, positions.last)
        if not firsts:
            return found
        if (positions.indexes != NO_INDEX).any():
            for first, last in zip(firsts, lasts, strict=True):
                found[positions.search(first) : positions.search(last, right=True)] = True
            return found
        begins = np.array([(first.entry, first.batch) for first in firsts], np.int64)
        entries = positions.entries
        low = np.searchsorted(entries, begins[:, 0])
        # A range that begins inside a set of records does not cover the message of that entry itself.
        low += (entries[np.minimum(low, len(entries) - 1)] == begins[:, 0]) & (begins[:, 1] > NO_INDEX)
        high = np.searchsorted(entries, np.array([last.entry for last in lasts], np.int64), side="right")
        steps = np.zeros(len(entries) + 1, np.int64)
        np.add.at(steps, low, 1)
        np.add.at(steps, high, -1)
        return np.cumsum(steps[:-1]) > 0

    def touch(self, first: Position, last: Position) -> bool:
        """Whether any position from `first` to `last`, of the same ledger, is suppressed."""
        return bool(self._overlapping(first, last)[0])

    def count(self, first: Position, size: int) -> int:
        """How many of the `size` records of the set whose first record is at `first` are suppressed."""
        end = first._replace(batch=first.batch + size - 1)
        total = 0
        for low, high in zip(*self._overlapping(first, end), strict=True):
            total += min(high, end).batch - max(low, first).batch + 1
        return total

    def ranges(self) -> list[tuple[Position, Position]]:
        """All of them in log order; for tools and tests."""
        return [pair for ledger in sorted(self.ledgers) for pair in zip(*self.ledgers[ledger], strict=True)]

    def _overlapping(self, first: Position, last: Position) -> tuple[list[Position], list[Position]]:
        firsts, lasts = self.ledgers.get(first.ledger, ([], []))
        low, high = bisect_left(lasts, first), bisect_right(firsts, last)
        return firsts[low:high], lasts[low:high]
