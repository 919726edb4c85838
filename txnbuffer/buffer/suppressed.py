"""Positions that are never visible: late and duplicate records, undecodable ones; as ranges per ledger."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from broker_io.position import NO_INDEX, Position, Positions


class SuppressedRanges:
    """Disjoint ranges in log order, each within one ledger, both ends included."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, tuple[list[Position], list[Position]]] = {}

    def __len__(self) -> int:
        return sum(len(firsts) for firsts, _ in self._ledgers.values())

    def add(self, first: Position, last: Position) -> None:
        """Add a range above all that are in."""
        firsts, lasts = self._ledgers.setdefault(first.ledger, ([], []))
        firsts.append(first)
        lasts.append(last)

    def extend(self, last: Position) -> None:
        """Let the newest range of a ledger end later."""
        self._ledgers[last.ledger][1][-1] = last

    def trim(self, first_ledger: int) -> None:
        """Forget the ranges of all ledgers below one."""
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
        """Whether anything from one position to another, of the same ledger, is suppressed."""
        return bool(self._overlapping(first, last)[0])

    def count(self, first: Position, size: int) -> int:
        """How many of the `size` records of the set whose first record stands at `first` are suppressed."""
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
