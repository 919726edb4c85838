"""Which transactions are settled (ended with all their markers durable), and the low-water mark over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyroaring import BitMap64

from txnbuffer.coordinator.ids import IdSet, end_of_run
from txnbuffer.model import Outcome


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
