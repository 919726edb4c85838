"""Outcomes of transactions that nobody works on any more, for as long as they are remembered."""

from __future__ import annotations

from pyroaring import BitMap64

from txnbuffer.coordinator.ids import IdSet
from txnbuffer.model import Outcome

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
