"""The key columns of the closed ledgers of a topic: what a compaction needs to decide which messages stay.

Each ledger is read once, oldest first, and only the keys parts of its large blocks. Their hashes, keys and whether
there is a value are kept in chunks of columns: the first in memory, those beyond `MEMORY_BYTES` in a temporary file,
so that several passes over the keys need not read the ledgers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from broker_io.block import HEADER_BYTES, RawBlock, absent_values, decode_hashes, decode_keys, open_block
from broker_io.environment import Disk, File
from broker_io.file import layout
from broker_io.file.keymap import Bytes, Hashes, KeyColumn, Mask
from broker_io.file.layout import LedgerEntry, TopicEntry, damage_at
from broker_io.file.recovery import open_segment
from broker_io.file.segment import SegmentScan

CHUNK_ROWS = 65_536
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk ends with the block that reaches one of these."""
MEMORY_BYTES = 32 * 1024 * 1024


class Columns(NamedTuple):
    """The key columns of n messages; a message without a key has one of length -1. `deleted`: there is no value."""

    hashes: Hashes
    keys: KeyColumn
    deleted: Mask


class KeyChunk(NamedTuple):
    """The packed columns of `rows` messages of one ledger, or the temporary file that has them, and their offset."""

    rows: int
    size: int
    packed: bytes | File
    offset: int = 0


class KeyColumns:
    """The chunks of each ledger that was added; `bytes_read` of the ledgers and of the temporary file."""

    def __init__(self, disk: Disk, directory: str, topic: TopicEntry) -> None:
        self.chunks: list[list[KeyChunk]] = []
        self.bytes_read = 0
        self._disk, self._directory, self._topic = disk, directory, topic
        self._path = layout.join(layout.topic_path(directory, topic.number), layout.KEY_COLUMNS)
        self._file: File | None = None
        self._in_memory = self._in_file = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):  # the next owner of the log removes it
                self._disk.remove(self._path)

    def add(self, ledger: LedgerEntry) -> None:
        """Read the keys of a closed ledger. Raises Damaged, UnsupportedFormat, OSError."""
        chunks: list[KeyChunk] = []
        path = layout.segment_path(self._directory, self._topic, ledger)
        with closing(open_segment(self._disk, path)) as file:
            scan = SegmentScan(file, path, ledger.bytes, self._topic.place(ledger))
            for offset, blocks in _grouped(scan):
                with damage_at(path, offset):
                    chunks.append(self._store(blocks))
            self.bytes_read += scan.bytes_read
        self.chunks.append(chunks)

    def _store(self, blocks: list[RawBlock]) -> KeyChunk:
        rows, packed = _packed(blocks)
        if self._in_memory + len(packed) <= MEMORY_BYTES:
            self._in_memory += len(packed)
            return KeyChunk(rows, len(packed), packed)
        if self._file is None:
            self._file = self._disk.open(self._path, write=True, create=True)
            self._file.truncate(0)
        self._file.write(self._in_file, [packed])
        self._in_file += len(packed)
        return KeyChunk(rows, len(packed), self._file, self._in_file - len(packed))

    def read(self, chunk: KeyChunk) -> Columns:
        """The columns of a chunk. Raises OSError."""
        if isinstance(chunk.packed, bytes):
            return _columns(chunk.packed, chunk.rows)
        self.bytes_read += chunk.size
        return _columns(chunk.packed.read(chunk.offset, chunk.size), chunk.rows)


def _packed(blocks: list[RawBlock]) -> tuple[int, bytes]:
    counts = [block.header.rows for block in blocks]
    keys = decode_keys(blocks, counts)
    lengths = keys.lengths()
    lengths[keys.absent_mask()] = -1
    deleted = np.packbits(absent_values(blocks, counts))
    return len(keys), b"".join([decode_hashes(blocks).tobytes(), lengths.tobytes(), deleted.tobytes(), keys.data])


def _columns(packed: bytes, rows: int) -> Columns:
    hashes = np.frombuffer(packed, np.uint64, rows)
    lengths = np.frombuffer(packed, np.int32, rows, 8 * rows).astype(np.int64)
    deleted = np.frombuffer(packed, np.uint8, -(-rows // 8), 12 * rows)
    data = np.frombuffer(packed, np.uint8, offset=12 * rows + len(deleted))
    ends = np.cumsum(np.maximum(lengths, 0))
    return Columns(hashes, KeyColumn(data, ends - np.maximum(lengths, 0), lengths), bits(deleted, rows))


def bits(bitmap: Bytes, rows: int) -> Mask:
    """The first bits of a bitmap as bool[rows]."""
    return np.unpackbits(bitmap, count=rows).view(np.bool_)


def _grouped(scan: SegmentScan) -> Iterator[tuple[int, list[RawBlock]]]:
    """Blocks of about a chunk each, without values, with the offset of the first."""
    group: list[RawBlock] = []
    start = rows = size = 0
    for offset, header in scan:
        if not group:
            start = offset
        with damage_at(scan.path, offset):
            group.append(open_block(*scan.stored(offset, HEADER_BYTES + header.keys_size), header, values=False))
        rows, size = rows + header.rows, size + len(group[-1].part)
        if rows >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield start, group
            group, rows, size = [], 0, 0
    if group:
        yield start, group
