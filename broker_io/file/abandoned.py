"""A log that nobody owns, read as its next owner will find it, without writing anything.

The next owner writes the blocks of the journal to their segments again (see recovery.py). A reader lays
them over the segments in memory instead: so it sees all that was acknowledged, whatever a crash of the
machine left of segments that were not synced yet.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from broker_io.environment import ReadableFile
from broker_io.file.journal import read_journal
from broker_io.file.manifest import LedgerEntry, Manifest, TopicEntry
from broker_io.file.recovery import by_topic, followed


class Piece(NamedTuple):
    """Bytes that belong at an offset of a segment."""

    offset: int
    data: bytes


class Overlay:
    """A segment with pieces laid over it, which follow one another without a gap."""

    def __init__(self, segment: ReadableFile, pieces: list[Piece]) -> None:
        self._segment = segment
        self._pieces = pieces
        self._start = pieces[0].offset
        self._end = pieces[-1].offset + len(pieces[-1].data)

    def read(self, offset: int, size: int) -> bytes:
        found: list[bytes] = []
        while size > 0 and (data := self._read_part(offset, size)):
            found.append(data)
            offset, size = offset + len(data), size - len(data)
        return b"".join(found)

    def _read_part(self, offset: int, size: int) -> bytes:
        if offset < self._start:
            return self._segment.read(offset, min(size, self._start - offset))
        if offset >= self._end:
            return self._segment.read(offset, size)
        piece = self._pieces[bisect.bisect_right(self._pieces, offset, key=lambda piece: piece.offset) - 1]
        inside = offset - piece.offset
        return piece.data[inside : inside + size]

    def size(self) -> int:
        return max(self._segment.size(), self._end)

    def close(self) -> None:
        self._segment.close()


class Abandoned:
    """What the journal of a log without an owner adds to its segments; `size` is that of the journal in bytes."""

    def __init__(self, journal: bytes, path: str, manifest: Manifest) -> None:
        """Raises Damaged or UnsupportedFormat for a journal that an owner would refuse."""
        replay = read_journal(journal, manifest.journal, path)
        self.size = replay.size
        self._pieces: dict[tuple[int, int, int], list[Piece]] = {}
        waiting = by_topic(replay, manifest, path)
        for topic in manifest.topics:
            ledger = topic.ledgers[-1]
            place = topic.place(ledger)
            for block in waiting.get(topic.number, ()):
                ledger = followed(ledger, block, place, path)
                pieces = self._pieces.setdefault((topic.number, ledger.ledger, ledger.generation), [])
                pieces.append(Piece(block.placed.offset, block.data))

    def over(self, segment: ReadableFile, topic: TopicEntry, ledger: LedgerEntry) -> ReadableFile:
        """A segment as the next owner will leave it; closing it closes the segment."""
        pieces = self._pieces.get((topic.number, ledger.ledger, ledger.generation))
        return Overlay(segment, pieces) if pieces else segment
