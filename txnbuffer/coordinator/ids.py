"""A growing set of ids: single ones are added at the price of a Python set, kept at that of a bitmap."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64


class IdSet:
    __slots__ = ("_kept", "_recent")

    def __init__(self, kept: BitMap64 | None = None) -> None:
        self._kept = BitMap64() if kept is None else kept
        self._recent: set[int] = set()

    def __contains__(self, least: int) -> bool:
        return least in self._recent or least in self._kept

    def __len__(self) -> int:
        return len(self.bitmap())

    def add(self, least: int) -> None:
        self._recent.add(least)

    def update(self, ids: BitMap64) -> None:
        self._kept |= ids

    def bitmap(self) -> BitMap64:
        """All ids; the set's own bitmap, not a copy."""
        if self._recent:
            self._kept |= bitmap_of(self._recent)
            self._recent.clear()
        return self._kept

    def up_to(self, limit: int) -> BitMap64:
        """The ids that are at most `limit`."""
        return within(self.bitmap(), 0, limit)

    def drop_up_to(self, limit: int) -> None:
        self.bitmap().remove_range(0, limit + 1)


def bitmap_of(ids: Iterable[int]) -> BitMap64:
    return BitMap64(np.fromiter(ids, np.uint64))


def block(first: int, count: int) -> BitMap64:
    """`count` ids from `first` on."""
    ids = BitMap64()
    ids.add_range(first, first + count)
    return ids


def end_of_run(ids: BitMap64, below: int) -> int:
    """The highest id up to which, from `below` + 1 on, all are there; `below` if that one isn't."""
    if below + 1 not in ids:
        return below
    last, missing = below + 1, int(ids.max()) + 1
    while missing - last > 1:  # never by a bitmap of what lies between: ids may lie 2**40 apart
        middle = (last + missing) // 2
        if ids.range_cardinality(below + 1, middle + 1) == middle - below:
            last = middle
        else:
            missing = middle
    return last


def within(ids: BitMap64, above: int, up_to: int) -> BitMap64:
    """Those that are higher than `above` and at most `up_to`."""
    found = ids.copy()
    found.remove_range(0, above + 1)
    if found:
        found.remove_range(up_to + 1, max(found.max(), up_to) + 1)
    return found
