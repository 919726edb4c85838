"""Ranges of a topic's log that tasks read in parallel; pure

All positions are between messages: `Position(ledger, entry)` is before the message of that entry, and ranges are
half-open. The seqno of a record is known only where the number of visible records before it is known: at a
`RangeAnchor`. If seqnos are requested, ranges begin at anchors only, else at any message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from broker_io.position import EARLIEST, NO_INDEX, Position


class LedgerSize(NamedTuple):
    """The id of a ledger, its number of entries and its bytes in storage.

    A ledger that is not `lasting` is empty, and another one may replace it.
    """

    ledger: int
    entries: int
    bytes: int
    lasting: bool = True


class RangeAnchor(NamedTuple):
    """The first visible record at or after a position has this seqno."""

    position: Position
    seqno: int


@dataclass(frozen=True, slots=True)
class RecordRange:
    """The records of a topic from `first` to `stop` (exclusive), about `bytes` bytes in the log.

    Reading starts at `begin`, at or before `first`; the first visible record there has `seqno`, or None if it is
    unknown. `last` is the last record below `stop`, if it is known.
    """

    topic: str
    begin: Position
    first: Position
    stop: Position
    seqno: int | None
    last: Position | None
    bytes: int


def after(position: Position | None) -> Position:
    """The position after the message of a record; EARLIEST for None."""
    return EARLIEST if position is None else Position(position.ledger, position.entry + 1)


@dataclass(frozen=True, slots=True)
class RangePlanner:
    """Splits logs into ranges of about `target_bytes` bytes; with `numbered` they begin at anchors only."""

    numbered: bool
    target_bytes: int

    def ranges(
        self,
        topic: str,
        ledgers: Sequence[LedgerSize],
        anchors: Sequence[RangeAnchor],
        first: Position,
        stop: Position,
        last: Position | None = None,
    ) -> list[RecordRange]:
        """The ranges between `first` and `stop` (exclusive); none if there are no messages.

        `ledgers` and `anchors` are ascending; `last` is the last record below `stop`, if it is known.
        """
        log = _Log.of(ledgers, first, stop)
        if not log.slices:
            return []
        known = [anchor for anchor in anchors if anchor.position < stop] if self.numbered else []
        boundaries = self._boundaries(log, [anchor.position for anchor in known] or self._any_position(log), first)
        ranges = []
        for low, high in pairwise([first, *boundaries, stop]):
            anchor = next((found for found in reversed(known) if found.position <= low), None)
            begin, seqno = (low._replace(batch=NO_INDEX), None) if anchor is None else anchor
            size = log.bytes_below(high) - log.bytes_below(low)
            known_last = last if high == stop else None
            ranges.append(RecordRange(topic, begin, low, log.end_before(high), seqno, known_last, size))
        return ranges

    def _boundaries(self, log: _Log, allowed: Iterable[Position], first: Position) -> list[Position]:
        """The positions between two ranges, as few as the size of a range allows."""
        boundaries: list[Position] = []
        low, candidate = first, None
        for position in [*(place for place in allowed if place > first), log.slices[-1].end]:
            if log.bytes_below(position) - log.bytes_below(low) > self.target_bytes and candidate is not None:
                boundaries.append(candidate)
                low = candidate
            candidate = position
        return boundaries

    def _any_position(self, log: _Log) -> Iterator[Position]:
        """The start of each ledger slice, and positions inside slices that are larger than a range."""
        for ledger_slice in log.slices:
            parts = max(min(ceil(ledger_slice.bytes / self.target_bytes), ledger_slice.entries), 1)
            for part in range(parts):
                yield Position(ledger_slice.ledger, ledger_slice.low + ledger_slice.entries * part // parts)


class _LedgerSlice(NamedTuple):
    """The entries `low` to `high` (exclusive) of a ledger, which take `bytes`; all slices before it take `before`."""

    ledger: int
    low: int
    high: int
    bytes: int
    before: int

    @property
    def entries(self) -> int:
        return self.high - self.low

    @property
    def end(self) -> Position:
        return Position(self.ledger, self.high)


class _Log(NamedTuple):
    """The part of a log that is read: one slice of each ledger, ascending."""

    slices: list[_LedgerSlice]

    @classmethod
    def of(cls, ledgers: Iterable[LedgerSize], first: Position, stop: Position) -> _Log:
        slices: list[_LedgerSlice] = []
        before = 0
        top = stop.entry + (stop.batch > NO_INDEX)
        for ledger, entries, size, _ in ledgers:
            if not first.ledger <= ledger <= stop.ledger:
                continue
            # A ledger may have grown since its size was taken.
            high = top if ledger == stop.ledger else entries
            low = max(first.entry, 0) if ledger == first.ledger else 0
            if high > low:
                slices.append(_LedgerSlice(ledger, low, high, size * (high - low) // max(entries, high), before))
                before += slices[-1].bytes
        return cls(slices)

    def bytes_below(self, position: Position) -> int:
        """About the number of bytes before a position."""
        index = bisect_right(self.slices, position.ledger, key=lambda ledger_slice: ledger_slice.ledger) - 1
        if index < 0:
            return 0
        ledger_slice = self.slices[index]
        high = ledger_slice.high if position.ledger > ledger_slice.ledger else min(position.entry, ledger_slice.high)
        inside = max(high - ledger_slice.low, 0)
        return ledger_slice.before + ledger_slice.bytes * inside // ledger_slice.entries

    def end_before(self, boundary: Position) -> Position:
        """The boundary; at the start of a ledger the end of the previous one, where a reader stops earlier."""
        if boundary.entry > 0 or boundary.batch > NO_INDEX:
            return boundary
        index = bisect_left(self.slices, boundary.ledger, key=lambda ledger_slice: ledger_slice.ledger) - 1
        return self.slices[index].end if index >= 0 else boundary


def carried(ledgers: Sequence[LedgerSize], at: Position) -> Position:
    """A position, moved to the start of the next ledger if its own ledger was read to its end.

    A ledger that was read is then not needed again and may be trimmed.
    """
    for ledger, following in pairwise(ledgers):
        if ledger.ledger == at.ledger and ledger.entries <= at.entry:
            at = Position(following.ledger, 0)
    return at


def advanced(ledgers: Sequence[LedgerSize], first: Position, stop: Position, messages: int) -> tuple[Position, int]:
    """The position at most `messages` messages after `first`, not above `stop`, and how many messages that is."""
    counted = [
        ledger._replace(bytes=max(ledger.entries, stop.entry if ledger.ledger == stop.ledger else 0))
        for ledger in ledgers
    ]
    log = _Log.of(counted, first, stop)
    left = messages
    for ledger_slice in log.slices:
        if left < ledger_slice.entries:
            return (Position(ledger_slice.ledger, ledger_slice.low + left) if left else first), messages
        left -= ledger_slice.entries
        first = ledger_slice.end
    return (stop if log.slices else first), messages - left


def packed(ranges: Sequence[RecordRange], target_bytes: int) -> list[tuple[RecordRange, ...]]:
    """Ranges grouped into tasks of about the target size, in order."""
    tasks: list[list[RecordRange]] = []
    size = 0
    for one in ranges:
        size += one.bytes
        if not tasks or size > target_bytes:
            tasks.append([])
            size = one.bytes
        tasks[-1].append(one)
    return [tuple(task) for task in tasks]
