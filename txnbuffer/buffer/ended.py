"""What a topic knows of the coordinators: which transactions have ended here, and their newest epoch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pyroaring import BitMap64

from txnbuffer.buffer.state import CoordinatorColumns
from txnbuffer.model import Outcome


class CoordinatorState:
    """One coordinator as one topic's log shows it.

    Every transaction up to `low_water_mark` has ended; of those above, the bitmaps hold the ones whose
    marker was seen here, by outcome. Trimming the log never touches this.
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
        """Note ends. Those at or below the low-water mark need no note: all of them have ended."""
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
        tuple(_to_bytes(state.committed) for _, state in rows),
        tuple(_to_bytes(state.aborted) for _, state in rows),
    )


def coordinator_states(columns: CoordinatorColumns) -> dict[int, CoordinatorState]:
    marks, epochs = columns.low_water_marks.tolist(), columns.epochs.tolist()
    bitmaps = zip(columns.committed, columns.aborted, strict=True)
    return {
        most: CoordinatorState(mark, epoch, BitMap64.deserialize(committed), BitMap64.deserialize(aborted))
        for most, mark, epoch, (committed, aborted) in zip(columns.most.tolist(), marks, epochs, bitmaps, strict=True)
    }


def _to_bytes(bitmap: BitMap64) -> bytes:
    copy = bitmap.copy()
    copy.run_optimize()
    data: bytes = copy.serialize()
    return data
