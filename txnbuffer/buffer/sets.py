"""The sets of which a buffer consists: open transactions, coordinators, aborted transactions, suppressed ranges.

Open transactions have a record in the log and no marker yet; the oldest is known at once. A coordinator's state says
which of its transactions have ended in this log, and its newest epoch. Aborted transactions are one compressed bitmap
for each coordinator. Suppressed positions (late, duplicate and undecodable records) are ranges by ledger.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from broker_io.position import NO_INDEX, Int64s, Position, Positions
from txnbuffer.buffer.state import NOWHERE, CoordinatorColumns, OngoingColumns
from txnbuffer.model import Outcome, TxnId


class OpenTxn:
    """One ongoing transaction: its first record here, the position before that, and what was accepted of it."""

    __slots__ = ("accepted", "before", "ended", "first", "highest", "txn")

    def __init__(self, txn: TxnId, first: Position, before: Position | None, highest: int, accepted: int) -> None:
        self.txn = txn
        self.first = first
        self.before = before
        self.highest = highest
        self.accepted = accepted
        self.ended = False


class Ongoing:
    """The ongoing transactions of a topic.

    They open in log order and never reopen, so the oldest is the head of a queue; ended ones are removed lazily.
    """

    __slots__ = ("_by_id", "_queue")

    def __init__(self) -> None:
        self._by_id: dict[TxnId, OpenTxn] = {}
        self._queue: deque[OpenTxn] = deque()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, txn: TxnId) -> bool:
        return txn in self._by_id

    def __iter__(self) -> Iterator[OpenTxn]:
        """Oldest first."""
        return (entry for entry in self._queue if not entry.ended)

    def began_by(self, position: Position) -> Iterator[OpenTxn]:
        """Those whose first record is at or below a position, oldest first."""
        return itertools.takewhile(lambda entry: entry.first <= position, self)

    def get(self, txn: TxnId) -> OpenTxn | None:
        return self._by_id.get(txn)

    def open(self, entry: OpenTxn) -> None:
        self._by_id[entry.txn] = entry
        self._queue.append(entry)

    def end(self, txn: TxnId) -> OpenTxn | None:
        """Remove and return a transaction; None if it is not ongoing."""
        entry = self._by_id.pop(txn, None)
        if entry is not None:
            entry.ended = True
        return entry

    def tidy(self) -> None:
        """Free the memory of ended transactions after one that stays open; call it now and then."""
        if len(self._queue) > 2 * len(self._by_id) + 64:
            self._queue = deque(self)

    def oldest(self) -> OpenTxn | None:
        queue = self._queue
        while queue and queue[0].ended:
            queue.popleft()
        return queue[0] if queue else None

    def columns(self) -> OngoingColumns:
        entries = list(self)
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
            ongoing.open(OpenTxn(txn, first, None if before == NOWHERE else before, highest, accepted))
        return ongoing


class CoordinatorState:
    """What one topic's log says of one coordinator.

    Every transaction up to `low_water_mark` has ended; the bitmaps hold those above whose marker was seen
    here, by outcome. Trimming the log never changes this.
    """

    __slots__ = ("aborted", "committed", "epoch", "low_water_mark")

    def __init__(
        self,
        low_water_mark: int = 0,
        epoch: int = 0,
        committed: BitMap64 | None = None,
        aborted: BitMap64 | None = None,
    ) -> None:
        self.low_water_mark = low_water_mark
        self.epoch = epoch
        self.committed = BitMap64() if committed is None else committed
        self.aborted = BitMap64() if aborted is None else aborted

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
        self.committed.update([least for least in committed if least > mark])
        self.aborted.update([least for least in aborted if least > mark])

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
        most: CoordinatorState(mark, epoch, BitMap64.deserialize(committed), BitMap64.deserialize(aborted))
        for most, mark, epoch, (committed, aborted) in zip(columns.most.tolist(), marks, epochs, bitmaps, strict=True)
    }


def bitmap_to_bytes(bitmap: BitMap64) -> bytes:
    """A bitmap in its stored form, Roaring's portable one."""
    copy = bitmap.copy()
    copy.run_optimize()
    data: bytes = copy.serialize()
    return data


class AbortedSet:
    """Aborted transactions, looked up one by one or by column; a few bits per id where ids are dense."""

    __slots__ = ("_bitmaps",)

    def __init__(self) -> None:
        self._bitmaps: dict[int, BitMap64] = {}

    def __contains__(self, txn: TxnId) -> bool:
        bitmap = self._bitmaps.get(txn.most)
        return bitmap is not None and txn.least in bitmap

    def __len__(self) -> int:
        return sum(map(len, self._bitmaps.values()))

    def add(self, txns: list[TxnId]) -> None:
        """Add ids of one coordinator, at least one."""
        self._bitmaps.setdefault(txns[0].most, BitMap64()).update([txn.least for txn in txns])

    def update(self, most: Int64s, least: Int64s) -> None:
        """Add a column of ids."""
        for coordinator, chosen in _by_coordinator(most, least):
            self._bitmaps.setdefault(coordinator, BitMap64()).update(chosen)

    def discard(self, most: Int64s, least: Int64s) -> None:
        """Remove a column of ids; ids that are not in the set are ignored."""
        for coordinator, chosen in _by_coordinator(most, least):
            bitmap = self._bitmaps.get(coordinator)
            if bitmap is not None:
                bitmap -= chosen
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


def _by_coordinator(most: Int64s, least: Int64s) -> list[tuple[int, BitMap64]]:
    return [(int(number), BitMap64(least[most == number].astype(np.uint64))) for number in np.unique(most)]


class SuppressedRanges:
    """Disjoint ranges in log order, each within one ledger, both ends included."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, tuple[list[Position], list[Position]]] = {}

    def __len__(self) -> int:
        return sum(len(firsts) for firsts, _ in self._ledgers.values())

    def add(self, first: Position, last: Position) -> None:
        """Add a range above all others."""
        firsts, lasts = self._ledgers.setdefault(first.ledger, ([], []))
        firsts.append(first)
        lasts.append(last)

    def extend(self, last: Position) -> None:
        """Extend the newest range of the ledger."""
        self._ledgers[last.ledger][1][-1] = last

    def trim(self, first_ledger: int) -> None:
        """Forget the ranges of all ledgers below `first_ledger`."""
        for ledger in [ledger for ledger in self._ledgers if ledger < first_ledger]:
            del self._ledgers[ledger]

    def mask(self, positions: Positions) -> NDArray[np.bool_]:
        """bool[n]: which of these positions, all of one ledger, are suppressed."""
        found = np.zeros(len(positions), np.bool_)
        if not len(positions):
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
        return [pair for ledger in sorted(self._ledgers) for pair in zip(*self._ledgers[ledger], strict=True)]

    def _overlapping(self, first: Position, last: Position) -> tuple[list[Position], list[Position]]:
        firsts, lasts = self._ledgers.get(first.ledger, ([], []))
        low, high = bisect_left(lasts, first), bisect_right(firsts, last)
        return firsts[low:high], lasts[low:high]
