"""Aborts and suppressed ranges in log order, cut into segments with permanent numbers.

Aborts and ranges are appended to the unsealed items. The first item that finds `segment_size` of them seals these: they
become the next segment, which never changes. So the cuts depend on the log alone, not on how it was read or when
snapshots were written. The items of one marker may fall into two segments. Consecutive suppressed messages are one
range as long as the range is unsealed. The stored format calls a segment a *part* and the unsealed items the *tail*.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from broker_io.position import Position
from txnbuffer.buffer.state import BufferSegment, Items, SegmentColumns, SegmentSummary
from txnbuffer.model import TxnId


class BufferSegments:
    """The tail, the sealed parts that nobody took yet, and the summaries of all parts that still count."""

    __slots__ = ("_aborts", "_ranges", "_sealed", "next_number", "segment_size", "summaries")

    def __init__(self, segment_size: int) -> None:
        if segment_size < 1:
            raise ValueError(f"a part must hold at least 1 item, got {segment_size}")
        self.segment_size = segment_size
        self.next_number = 1
        self.summaries: deque[SegmentSummary] = deque()
        self._sealed: list[BufferSegment] = []
        self._aborts: list[tuple[TxnId, Position]] = []
        self._ranges: list[tuple[Position, Position]] = []

    @property
    def unsealed_size(self) -> int:
        return len(self._aborts) + len(self._ranges)

    def add_aborts(self, txns: list[TxnId], marker: Position) -> None:
        """Add transactions that one marker aborted."""
        start = 0
        while start < len(txns):
            if self.unsealed_size >= self.segment_size:
                self._seal()
            stop = start + self.segment_size - self.unsealed_size
            self._aborts += [(txn, marker) for txn in txns[start:stop]]
            start = stop

    def add_range(self, first: Position, last: Position, before: Position | None) -> bool:
        """Add suppressed positions; `before` is where the message before them ends.

        True if they lengthened the newest range instead of making a new one.
        """
        if self._ranges and self._ranges[-1][1] == before and before.ledger == first.ledger:
            self._ranges[-1] = (self._ranges[-1][0], last)
            return True
        if self.unsealed_size >= self.segment_size:
            self._seal()
        self._ranges.append((first, last))
        return False

    @property
    def first_number(self) -> int:
        """The number of the oldest part that still counts, or that the next one will get."""
        return self.next_number - len(self.summaries)

    def unsealed(self) -> Items:
        return Items.of(self._aborts, self._ranges)

    def columns(self) -> SegmentColumns:
        rows = np.array(self.summaries, np.int64).reshape(-1, len(SegmentSummary._fields)).T
        return SegmentColumns(self.first_number, rows[1], rows[2], rows[3])

    @classmethod
    def of(cls, segment_size: int, sealed: SegmentColumns, unsealed: Items) -> BufferSegments:
        """The same as before a snapshot; all sealed parts were taken."""
        segments = cls(segment_size)
        numbers = range(sealed.first, sealed.end)
        rows = zip(
            numbers, sealed.last_ledgers.tolist(), sealed.aborts.tolist(), sealed.suppressed.tolist(), strict=True
        )
        segments.summaries.extend(map(SegmentSummary._make, rows))
        segments.next_number = sealed.end
        ids = map(TxnId, unsealed.most.tolist(), unsealed.least.tolist())
        segments._aborts = list(zip(ids, unsealed.markers, strict=True))
        segments._ranges = list(zip(unsealed.firsts, unsealed.lasts, strict=True))
        return segments

    def take_sealed(self) -> list[BufferSegment]:
        """The parts sealed since the last call."""
        taken, self._sealed = self._sealed, []
        return taken

    def trim(self, first_ledger: int) -> list[int]:
        """Drop parts from the front whose items all stand in ledgers below one; their numbers, ascending.

        Parts that nobody took yet stay.
        """
        untaken = self.next_number - len(self._sealed)
        dropped: list[int] = []
        while self.summaries and self.summaries[0].last_ledger < first_ledger and self.summaries[0].number < untaken:
            dropped.append(self.summaries.popleft().number)
        return dropped

    def _seal(self) -> None:
        segment = BufferSegment(self.next_number, self.unsealed())
        self._sealed.append(segment)
        self.summaries.append(segment.summary)
        self.next_number += 1
        self._aborts, self._ranges = [], []
