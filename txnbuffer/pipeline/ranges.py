"""How the log of a topic is cut into ranges that tasks read side by side: pure.

All positions stand between messages: `Position(ledger, entry)` is right before the message of that entry,
and a range is half-open. A record has its seqno only where the number of visible records before it is
known: at an `RangeAnchor`. Where seqnos are wanted a log is cut at anchors alone, elsewhere wherever it suits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from broker_io.position import EARLIEST, NO_INDEX, Position


class Extent(NamedTuple):
    """A ledger of a log: its number, how many entries it has, and its bytes in storage.

    One that is not `lasting` is empty, and may give place to another.
    """

    ledger: int
    entries: int
    bytes: int
    lasting: bool = True


class RangeAnchor(NamedTuple):
    """The first visible record at or behind a position has this seqno."""

    position: Position
    seqno: int


@dataclass(frozen=True, slots=True)
class RecordRange:
    """The records of a topic from `first` on, below `stop`; about `bytes` in the log.

    Reading begins at `begin`, at or before `first`; the first visible record there is numbered `seqno`, None
    where that is not known. `last` is the last record of all if that is known: nothing below `stop` follows.
    """

    topic: str
    begin: Position
    first: Position
    stop: Position
    seqno: int | None
    last: Position | None
    bytes: int


def behind(position: Position | None) -> Position:
    """Right behind the message that a record stands in; EARLIEST behind nothing."""
    return EARLIEST if position is None else Position(position.ledger, position.entry + 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where and how finely to cut: `numbered` cuts at anchors only, `target_bytes` is about the size of a range."""

    numbered: bool
    target_bytes: int

    def ranges(
        self,
        topic: str,
        extents: Sequence[Extent],
        anchors: Sequence[RangeAnchor],
        first: Position,
        stop: Position,
        last: Position | None = None,
    ) -> list[RecordRange]:
        """The ranges that make up what stands from `first` on and below `stop`; none if that is nothing.

        `extents` and `anchors` are ascending; `last` is the last record below `stop`, if it is known.
        """
        log = _Log.of(extents, first, stop)
        if not log.pieces:
            return []
        known = [anchor for anchor in anchors if anchor.position < stop] if self.numbered else []
        borders = self._borders(log, [anchor.position for anchor in known] or self._anywhere(log), first)
        ranges = []
        for low, high in pairwise([first, *borders, stop]):
            anchor = next((found for found in reversed(known) if found.position <= low), None)
            begin, seqno = (low._replace(batch=NO_INDEX), None) if anchor is None else anchor
            size = log.bytes_below(high) - log.bytes_below(low)
            known_last = last if high == stop else None
            ranges.append(RecordRange(topic, begin, low, log.end_before(high), seqno, known_last, size))
        return ranges

    def _borders(self, log: _Log, allowed: Iterable[Position], first: Position) -> list[Position]:
        """Where one range ends and the next begins: as few as the size of a range allows."""
        borders: list[Position] = []
        low, candidate = first, None
        for position in [*(place for place in allowed if place > first), log.pieces[-1].end]:
            if log.bytes_below(position) - log.bytes_below(low) > self.target_bytes and candidate is not None:
                borders.append(candidate)
                low = candidate
            candidate = position
        return borders

    def _anywhere(self, log: _Log) -> Iterator[Position]:
        """The beginning of each piece, and places within those that are larger than a range should be."""
        for piece in log.pieces:
            parts = max(min(ceil(piece.bytes / self.target_bytes), piece.entries), 1)
            for part in range(parts):
                yield Position(piece.ledger, piece.low + piece.entries * part // parts)


class _Piece(NamedTuple):
    """The entries `low` to `high` (exclusive) of a ledger, which take `bytes`; all pieces before it take `before`."""

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
    """What of a log is to be read: one piece of each ledger that has any of it, ascending."""

    pieces: list[_Piece]

    @classmethod
    def of(cls, extents: Iterable[Extent], first: Position, stop: Position) -> _Log:
        pieces: list[_Piece] = []
        before = 0
        top = stop.entry + (stop.batch > NO_INDEX)
        for ledger, entries, size, _ in extents:
            if not first.ledger <= ledger <= stop.ledger:
                continue
            # The extent of a ledger that still grows may be older than what is known of its records.
            high = top if ledger == stop.ledger else entries
            low = max(first.entry, 0) if ledger == first.ledger else 0
            if high > low:
                pieces.append(_Piece(ledger, low, high, size * (high - low) // max(entries, high), before))
                before += pieces[-1].bytes
        return cls(pieces)

    def bytes_below(self, position: Position) -> int:
        """About how many bytes stand below a position."""
        index = bisect_right(self.pieces, position.ledger, key=lambda piece: piece.ledger) - 1
        if index < 0:
            return 0
        piece = self.pieces[index]
        inside = piece.entries if position.ledger > piece.ledger else min(position.entry, piece.high) - piece.low
        return piece.before + piece.bytes * max(inside, 0) // piece.entries

    def end_before(self, border: Position) -> Position:
        """The border, or if a ledger begins there the end of the one before: who read that knows to be through."""
        if border.entry > 0 or border.batch > NO_INDEX:
            return border
        index = bisect_left(self.pieces, border.ledger, key=lambda piece: piece.ledger) - 1
        return self.pieces[index].end if index >= 0 else border


def carried(extents: Sequence[Extent], at: Position) -> Position:
    """The same place, at the beginning of the next ledger if that of its own is read to its end and another one grows.

    So a ledger that is read is not asked for again, and may go.
    """
    for extent, following in pairwise(extents):
        if extent.ledger == at.ledger and extent.entries <= at.entry:
            at = Position(following.ledger, 0)
    return at


def advanced(extents: Sequence[Extent], first: Position, stop: Position, messages: int) -> tuple[Position, int]:
    """The place at most so many messages behind `first`, not above `stop`, and how many messages those are."""
    counted = [extent._replace(bytes=max(extent.entries, _top(stop, extent.ledger))) for extent in extents]
    log = _Log.of(counted, first, stop)
    left = messages
    for piece in log.pieces:
        if left < piece.entries:
            return (Position(piece.ledger, piece.low + left) if left else first), messages
        left -= piece.entries
        first = piece.end
    return (stop if log.pieces else first), messages - left


def _top(stop: Position, ledger: int) -> int:
    return stop.entry if stop.ledger == ledger else 0


def packed(ranges: Sequence[RecordRange], target_bytes: int) -> list[tuple[RecordRange, ...]]:
    """Ranges put together for tasks of about the target size, in their order."""
    tasks: list[list[RecordRange]] = []
    size = 0
    for one in ranges:
        if not tasks or size + one.bytes > target_bytes:
            tasks.append([])
            size = 0
        tasks[-1].append(one)
        size += one.bytes
    return [tuple(task) for task in tasks]
