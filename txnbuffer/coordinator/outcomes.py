"""Outcomes of transactions that nobody works on any more, for as long as they are remembered."""

from __future__ import annotations

from pyroaring import BitMap64

from txnbuffer.coordinator.ids import IdSet
from txnbuffer.model import Outcome

SLOTS = 60
"""Outcomes are forgotten this many at a time: `remember` is kept to one part in so many, never cut short."""


class Outcomes:
    """`remember` and all times in seconds."""

    __slots__ = ("_remember", "_slots", "_width")

    def __init__(self, remember: float) -> None:
        self._remember = remember
        self._width = remember / SLOTS
        self._slots: dict[int, tuple[IdSet, IdSet]] = {}

    def add(self, least: int, outcome: Outcome, now: float) -> None:
        self._slot(now + self._remember)[outcome].add(least)

    def update(self, ids: BitMap64, outcome: Outcome, since: float) -> None:
        """Remember many, whose time counts from `since`."""
        if ids:
            self._slot(since + self._remember)[outcome].update(ids)

    def find(self, least: int) -> Outcome | None:
        """How a transaction ended; None if that is forgotten, or it never ended."""
        for aborted, committed in self._slots.values():
            if least in committed:
                return Outcome.COMMIT
            if least in aborted:
                return Outcome.ABORT
        return None

    def forget(self, now: float) -> None:
        """Drop what has been remembered for its time."""
        for slot in [slot for slot in self._slots if slot * self._width <= now]:
            del self._slots[slot]

    def _slot(self, until: float) -> tuple[IdSet, IdSet]:
        number = int(until / self._width) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = (IdSet(), IdSet())
        return slot
