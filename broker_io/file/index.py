"""The sparse index of a segment: about one block in 64 KiB, so that reading from a place is a seek.

The file is entries of 32 bytes, ascending, all numbers little-endian:

    offset  size
         0     8  entry number of the first message of a block
         8     8  offset of that block in the segment
        16     8  its publish time, milliseconds
        24     4  zero
        28     4  CRC32C of the 28 bytes before

It is written as the segment grows and never synced, so it may end early, miss stretches, or be damaged or
missing: it is a hint. Entries behind the first that does not hold are ignored, a place it names is used
only if a block header that says the same stands there, and what it lacks is found by going from header
to header.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
from typing import NamedTuple

import google_crc32c

from broker_io.environment import Disk

STEP_BYTES = 64 * 1024
ENTRY_BYTES = 32
_ENTRY = struct.Struct("<QQq4x")
_CRC = struct.Struct("<I")


class IndexEntry(NamedTuple):
    first_entry: int
    offset: int
    publish_time: int


def encode_index(entries: list[IndexEntry]) -> bytes:
    packed = [_ENTRY.pack(*entry) for entry in entries]
    return b"".join([piece + _CRC.pack(google_crc32c.value(piece)) for piece in packed])


def decode_index(data: bytes, size: int) -> list[IndexEntry]:
    """The entries that hold, for a segment of `size` bytes."""
    entries: list[IndexEntry] = []
    last = IndexEntry(-1, -1, -(2**63))
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        piece = data[at : at + 28]
        if google_crc32c.value(piece) != int.from_bytes(data[at + 28 : at + 32], "little"):
            break
        entry = IndexEntry._make(_ENTRY.unpack_from(piece))
        if entry.first_entry <= last.first_entry or not last.offset < entry.offset < size:
            break
        entries.append(entry)
        last = entry
    return entries


class SparseIndex:
    """The index of one segment in memory; `add` every block in order, it keeps what it needs."""

    def __init__(self, entries: list[IndexEntry] | None = None) -> None:
        self._entries = entries or []
        self._written = len(self._entries)

    @classmethod
    def load(cls, disk: Disk, path: str, size: int) -> SparseIndex:
        """What the file at a path has about the first `size` bytes of its segment; empty if it can't be read."""
        try:
            file = disk.open(path)
            try:
                return cls(decode_index(file.read(0, file.size()), size))
            finally:
                file.close()
        except OSError:
            return cls()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> IndexEntry | None:
        return self._entries[-1] if self._entries else None

    def add(self, first_entry: int, offset: int, publish_time: int) -> None:
        if not self._entries or offset - self._entries[-1].offset >= STEP_BYTES:
            self._entries.append(IndexEntry(first_entry, offset, publish_time))

    def at_entry(self, entry: int) -> IndexEntry | None:
        """The last known block that starts at or below an entry number."""
        index = bisect.bisect_right(self._entries, entry, key=lambda known: known.first_entry)
        return self._entries[index - 1] if index else None

    def before_time(self, time_ms: int) -> IndexEntry | None:
        """The last known block that was published before a time."""
        index = bisect.bisect_left(self._entries, time_ms, key=lambda known: known.publish_time)
        return self._entries[index - 1] if index else None

    @property
    def unwritten(self) -> int:
        """How many entries the file lacks."""
        return len(self._entries) - self._written

    def save(self, disk: Disk, path: str) -> None:
        """Write what the file lacks; where the disk refuses it stays lacking."""
        with contextlib.suppress(OSError):
            file = disk.open(path, write=True, create=True)
            try:
                file.truncate(self._written * ENTRY_BYTES)
                file.write(self._written * ENTRY_BYTES, [encode_index(self._entries[self._written :])])
            finally:
                file.close()
            self._written = len(self._entries)
