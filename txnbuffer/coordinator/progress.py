"""Which transactions are settled (ended with all their markers durable), and the low-water mark over them.

A growing set of ids: single ones are added at the price of a Python set, kept at that of a bitmap.

Outcomes of transactions that nobody works on any more, for as long as they are remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from pyroaring import BitMap64

from txnbuffer.model import Outcome


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


class Progress:
    """`low_water_mark` is durable in the decision log: markers carry it, ids up to it are refused.

    `settled` holds ids above it; `one_phase` those of them, by outcome, that no group of decisions names. `gaps`: first
    and last of ranges above it, ascending, that nobody leased or will.
    """

    __slots__ = ("gaps", "low_water_mark", "one_phase", "settled")

    def __init__(
        self, low_water_mark: int = 0, settled: BitMap64 | None = None, gaps: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.low_water_mark = low_water_mark
        self.gaps = [*gaps]
        self.settled = IdSet(settled)
        self.one_phase = (IdSet(), IdSet())

    def has_ended(self, least: int) -> bool:
        return least <= self.low_water_mark or least in self.settled

    def settle_one_phase(self, least: int, outcome: Outcome) -> None:
        self.settled.add(least)
        self.one_phase[outcome].add(least)

    def reachable(self, live: Collection[int] = ()) -> int:
        """Where the low-water mark could be now. `live`: ids that have not ended; some may lie where nobody leased."""
        settled, mark = self.settled.bitmap(), self.low_water_mark
        for first, last in self.gaps:
            mark = end_of_run(settled, mark)
            if mark < first - 1 or last + 1 not in settled or any(first <= least <= last for least in live):
                return mark
            mark = last
        return end_of_run(settled, mark)

    def passed(self, mark: int) -> tuple[BitMap64, BitMap64]:
        """The one-phase transactions up to a mark, aborted and committed."""
        aborted, committed = self.one_phase
        return aborted.up_to(mark), committed.up_to(mark)

    def raise_to(self, mark: int) -> None:
        """The mark is durable."""
        self.low_water_mark = mark
        self.gaps = [gap for gap in self.gaps if gap[1] > mark]
        for ids in (self.settled, *self.one_phase):
            ids.drop_up_to(mark)


SLOTS = 60
"""Outcomes are forgotten this many at a time: `remember` is kept to one part in so many, never cut short."""
TIMED_OUT = 2
"""Behind the outcomes of a slot: the aborts that a time-out decided."""


class Outcomes:
    """`remember` and all times in seconds."""

    __slots__ = ("_remember", "_slots", "_width")

    def __init__(self, remember: float) -> None:
        self._remember = remember
        self._width = remember / SLOTS
        self._slots: dict[int, tuple[IdSet, IdSet, IdSet]] = {}

    def add(self, least: int, outcome: Outcome, now: float, *, timed_out: bool = False) -> None:
        """`timed_out`: that was why it ended."""
        slot = self._slot(now + self._remember)
        slot[outcome].add(least)
        if timed_out:
            slot[TIMED_OUT].add(least)

    def update(self, ids: BitMap64, outcome: Outcome, since: float) -> None:
        """Remember many, whose time counts from `since`."""
        if ids:
            self._slot(since + self._remember)[outcome].update(ids)

    def find(self, least: int) -> Outcome | None:
        """How a transaction ended; None if that is forgotten, or it never ended."""
        for aborted, committed, _ in self._slots.values():
            if least in committed:
                return Outcome.COMMIT
            if least in aborted:
                return Outcome.ABORT
        return None

    def timed_out(self, least: int) -> bool:
        """Whether its time-out is why it ended; a new owner does not know."""
        return any(least in slot[TIMED_OUT] for slot in self._slots.values())

    def forget(self, now: float) -> None:
        """Drop what has been remembered for its time."""
        for slot in [slot for slot in self._slots if slot * self._width <= now]:
            del self._slots[slot]

    def _slot(self, until: float) -> tuple[IdSet, IdSet, IdSet]:
        number = int(until / self._width) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = (IdSet(), IdSet(), IdSet())
        return slot
