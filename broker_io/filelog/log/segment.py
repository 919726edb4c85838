"""The segment: one ledger of one topic as a file of consecutive blocks, with a sparse index.

The first block starts at offset 0, each other where the one before ends (see broker_io/block.py). Entry numbers
ascend; they have no gaps unless compaction rewrote the segment.

The index has about one block in 64 KiB, so that reading from a position is a seek. Its file consists of entries of 32
bytes, ascending, all numbers little-endian:

    offset  size
         0     8  entry number of the first message of a block
         8     8  offset of that block in the segment
        16     8  its publish time, milliseconds
        24     4  zero
        28     4  CRC32C of the 28 bytes before

The index is written as the segment grows and never synced, so it may end early, have gaps, or be damaged or missing:
it is a hint. Entries after the first invalid one are ignored, an offset is used only if a matching block header is
there, and missing entries are found by reading the headers.
"""

from __future__ import annotations

import bisect
import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from operator import attrgetter
from typing import NamedTuple

import google_crc32c
import xxhash

from broker_io.block import HEADER_BYTES, BadBlock, EncodedBlock, Header, RawBlock, open_block, parse_header
from broker_io.environment import Disk, File, ReadableFile, read_file
from broker_io.errors import Damaged
from broker_io.filelog.log import layout
from broker_io.filelog.log.layout import LedgerEntry, damage_at, readable

STEP_BYTES = 64 * 1024
ENTRY_BYTES = 32
_ENTRY = struct.Struct("<QQq4x")
_CRC = struct.Struct("<I")


class BlockIndexEntry(NamedTuple):
    first_entry: int
    offset: int
    publish_time: int


def encode_index(entries: list[BlockIndexEntry]) -> bytes:
    packed = [_ENTRY.pack(*entry) for entry in entries]
    return b"".join([piece + _CRC.pack(google_crc32c.value(piece)) for piece in packed])


def decode_index(data: bytes, size: int) -> list[BlockIndexEntry]:
    """The valid entries for a segment of `size` bytes."""
    entries: list[BlockIndexEntry] = []
    last = BlockIndexEntry(-1, -1, -(2**63))
    for at in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        piece = data[at : at + 28]
        if google_crc32c.value(piece) != int.from_bytes(data[at + 28 : at + 32], "little"):
            break
        entry = BlockIndexEntry._make(_ENTRY.unpack_from(piece))
        if entry.first_entry <= last.first_entry or not last.offset < entry.offset < size:
            break
        entries.append(entry)
        last = entry
    return entries


class SparseIndex:
    """The index of one segment in memory; call `add` with every block in order, it keeps some of them."""

    def __init__(self, entries: list[BlockIndexEntry] | None = None) -> None:
        self._entries = entries or []
        self._written = len(self._entries)

    @classmethod
    def load(cls, disk: Disk, path: str, size: int) -> SparseIndex:
        """The index file's entries for the first `size` bytes of its segment; empty if it can't be read."""
        try:
            with closing(disk.open(path)) as file:
                return cls(decode_index(read_file(file), size))
        except OSError:
            return cls()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> BlockIndexEntry | None:
        return self._entries[-1] if self._entries else None

    def add(self, first_entry: int, offset: int, publish_time: int) -> bool:
        """Whether the block is in the index."""
        indexed = not self._entries or offset - self._entries[-1].offset >= STEP_BYTES
        if indexed:
            self._entries.append(BlockIndexEntry(first_entry, offset, publish_time))
        return indexed

    def at_entry(self, entry: int) -> BlockIndexEntry | None:
        """The last known block that starts at or below an entry number."""
        index = bisect.bisect_right(self._entries, entry, key=attrgetter("first_entry"))
        return self._entries[index - 1] if index else None

    def before_time(self, time_ms: int) -> BlockIndexEntry | None:
        """The last known block that was published before a time."""
        index = bisect.bisect_left(self._entries, time_ms, key=attrgetter("publish_time"))
        return self._entries[index - 1] if index else None

    @property
    def unwritten(self) -> int:
        """The number of entries that are not in the file."""
        return len(self._entries) - self._written

    def save(self, disk: Disk, path: str) -> None:
        """Write the missing entries to the file; a disk error is ignored."""
        with contextlib.suppress(OSError):
            with closing(disk.open(path, write=True, create=True)) as file:
                file.truncate(self._written * ENTRY_BYTES)
                file.write(self._written * ENTRY_BYTES, [encode_index(self._entries[self._written :])])
            self._written = len(self._entries)


FIRST_CHUNK_BYTES = 64 * 1024
CHUNK_BYTES = 1024 * 1024
UNFINISHED = "a block is incomplete"
INDEX_BATCH = 16
"""Index entries that are written at a time."""


class FoundBlock(NamedTuple):
    """A block header and its offset."""

    offset: int
    header: Header


LARGE_BLOCK = 64 * 1024
"""Of blocks from this size on a scan reads only what it is asked for."""
SCAN_BYTES = 256 * 1024


class SegmentScan:
    """The headers of the blocks between two offsets of a segment, in order; `bytes_read` so far.

    Iterating raises Damaged, UnsupportedFormat, OSError.
    """

    def __init__(self, file: ReadableFile, path: str, end: int, place: int | None = None, start: int = 0) -> None:
        self.path = path
        self.bytes_read = 0
        self._file, self._start, self._end, self._place = file, start, end, place
        self._data, self._base = b"", 0
        self._ahead = SCAN_BYTES

    def __iter__(self) -> Iterator[FoundBlock]:
        at = self._start
        while at < self._end:
            with damage_at(self.path, at):
                header = parse_header(*self.stored(at, HEADER_BYTES), self._place)
            if at + header.length > self._end:
                raise Damaged(self.path, at, f"a block of {header.length} bytes does not end before {self._end}")
            self._ahead = 0 if header.length >= LARGE_BLOCK else SCAN_BYTES
            yield FoundBlock(at, header)
            at += header.length

    def stored(self, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes that hold those from an offset on, at the returned index; of one block after the other."""
        if offset + size > self._base + len(self._data):
            kept = self._data[offset - self._base :] if offset >= self._base else b""
            wanted = min(max(size, self._ahead), self._end - offset) - len(kept)
            read = self._file.read(offset + len(kept), wanted)
            self.bytes_read += len(read)
            self._data, self._base = kept + read, offset
        return self._data, offset - self._base


def headers(file: ReadableFile, path: str, start: int, end: int, place: int | None = None) -> Iterator[FoundBlock]:
    """The headers of the blocks between two offsets. Raises Damaged, UnsupportedFormat."""
    return iter(SegmentScan(file, path, end, place, start))


def read_block(file: ReadableFile, path: str, found: FoundBlock, *, values: bool = True) -> RawBlock:
    """The block of a header. Raises Damaged, UnsupportedFormat."""
    with damage_at(path, found.offset):
        return open_block(file.read(found.offset, found.header.length), 0, found.header, values=values)


def check_blocks(disk: Disk, path: str, end: int, place: int, start: int = 0, size: int | None = None) -> int:
    """Read the blocks up to an offset which begin within `size` bytes from `start` on, or all; the offset after them.

    Raises Damaged, UnsupportedFormat, OSError.
    """
    limit = end if size is None else min(end, start + size)
    at = start
    with closing(disk.open(path)) as file, readable(path):
        scan = SegmentScan(file, path, end, place, start)
        for offset, header in scan:
            with damage_at(path, offset):
                open_block(*scan.stored(offset, header.length), header)
            at = offset + header.length
            if at >= limit:
                break
    return at


def whole_blocks(
    file: ReadableFile, ledger: LedgerEntry, end: int, place: int, *, contents: bool
) -> tuple[LedgerEntry, str | None]:
    """A ledger extended by the blocks after it up to an offset, and why the bytes left there are no block.

    `contents`: the blocks are read as a whole, and not only their headers.
    """
    while ledger.bytes < end:
        if ledger.bytes + HEADER_BYTES > end:
            return ledger, UNFINISHED
        try:
            header = parse_header(file.read(ledger.bytes, HEADER_BYTES), 0, place)
            if header.first_entry != ledger.entries:
                return ledger, f"a block begins with entry {header.first_entry} instead of {ledger.entries}"
            if ledger.bytes + header.length > end:
                return ledger, UNFINISHED
            if contents:
                open_block(file.read(ledger.bytes, header.length), 0, header)
        except BadBlock as error:
            return ledger, str(error)
        ledger = ledger.grown(header.span, header.length, header.publish_time, header.publish_time)
    return ledger, None


def complete_index(index: SparseIndex, file: ReadableFile, path: str, end: int) -> None:
    """Add the missing blocks up to an offset to an index."""
    start = 0 if index.last is None else index.last.offset
    for found in headers(file, path, start, end):
        index.add(found.header.first_entry, found.offset, found.header.publish_time)


def verified_index(
    disk: Disk, file: ReadableFile, path: str, end: int, entry: int | None = None, *, time_ms: int = 0
) -> SparseIndex:
    """The index of a segment up to an offset, verified for one lookup: of an entry, or else of a time.

    The index file is used only if a block header confirms it.
    """
    index = SparseIndex.load(disk, layout.index_path(path), end)
    known = index.before_time(time_ms) if entry is None else index.at_entry(entry)
    if not (_is_confirmed(file, known) and _is_confirmed(file, index.last)):
        index = SparseIndex()
    complete_index(index, file, path, end)
    return index


def _is_confirmed(file: ReadableFile, entry: BlockIndexEntry | None) -> bool:
    if entry is None:
        return True
    try:
        header = parse_header(file.read(entry.offset, HEADER_BYTES))
    except BadBlock:
        return False
    return (header.first_entry, header.publish_time) == (entry.first_entry, entry.publish_time)


DIGEST_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are read at a time for its digest."""


def file_digest(disk: Disk, path: str) -> tuple[int, str]:
    """The length of a file, and the XXH3-128 of its bytes in hexadecimal. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with closing(disk.open(path)) as file:
        while chunk := file.read(size, DIGEST_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


class Segment:
    """The open segment of a topic, to which blocks are appended. Every call may raise OSError."""

    def __init__(self, disk: Disk, path: str, size: int) -> None:
        self.path = path
        self.dirty = False
        self._disk = disk
        self._file: File | None = None
        self._index = SparseIndex.load(disk, layout.index_path(path), size)

    def write(
        self, offset: int, chunks: Sequence[bytes | memoryview], blocks: Iterable[tuple[int, Header | EncodedBlock]]
    ) -> None:
        """Write the chunks of blocks from an offset; they are durable after `sync`. The offset of each is given too."""
        self.dirty = True
        (self._file or self.open(offset)).write(offset, chunks)
        for at, block in blocks:
            if self._index.add(block.first_entry, at, block.publish_time) and self._index.unwritten >= INDEX_BATCH:
                self._index.save(self._disk, layout.index_path(self.path))

    def sync(self) -> None:
        if self.dirty:
            self.open(0).sync()
        self.dirty = False

    def open(self, end: int) -> File:
        """The open file; when it is opened, the index gets its missing blocks below `end`."""
        if self._file is None:
            self._file = self._disk.open(self.path, write=True)
            with contextlib.suppress(Damaged):  # readers will report it; writing can continue
                complete_index(self._index, self._file, self.path, end)
        return self._file

    def save_index(self) -> None:
        if self._index.unwritten:
            self._index.save(self._disk, layout.index_path(self.path))

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None
