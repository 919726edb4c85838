"""The key columns of the closed ledgers of a topic: what a compaction needs to decide which messages stay.

Each ledger is read once, oldest first, and only the keys parts of its large blocks. Their hashes, keys and what the
rules say of them are kept in chunks of columns: the first in memory, those beyond `MEMORY_BYTES` in a temporary file,
so that several passes over the keys need not read the ledgers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from broker_io.batch import Blobs, PlacedBatch
from broker_io.block import (
    HASHES,
    HEADER_BYTES,
    KEYS,
    RawBlock,
    absent_values,
    decode_entries,
    decode_hashes,
    decode_keys,
    decode_keys_parts,
    hash_keys,
    open_block,
)
from broker_io.compaction import CompactionRequest, RecordRetention
from broker_io.environment import Disk, File
from broker_io.filelog.log import layout
from broker_io.filelog.log.keymap import Bytes, Hashes, KeyColumn, Mask
from broker_io.filelog.log.layout import LedgerEntry, TopicFiles, damage_at
from broker_io.filelog.log.recovery import open_segment
from broker_io.filelog.log.segment import SegmentScan
from broker_io.position import NO_INDEX, Int64s, Positions

CHUNK_ROWS = 65_536
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk ends with the block that reaches one of these."""
MEMORY_BYTES = 32 * 1024 * 1024


class Columns(NamedTuple):
    """The key columns of n messages. A key of length -1: the message competes with no other, and stays if it is not
    `unwanted`. `purgeable`: it is a deletion, and need not stay if it is the newest message of its key. `content`: it
    has a key or a value; `valued`: it has a value.
    """

    entries: Int64s
    hashes: Hashes
    keys: KeyColumn
    purgeable: Mask
    unwanted: Mask
    content: Mask
    valued: Mask

    @property
    def competes(self) -> Mask:
        """Which messages compete for their keys."""
        return self.keys.lengths >= 0


class KeyChunk(NamedTuple):
    """The packed columns of `rows` messages of one ledger, or the temporary file that has them, and their offset.

    Their entry numbers begin with `first_entry`; with `gaps` they are part of the columns. `open` messages compete, or
    are unwanted.
    """

    rows: int
    size: int
    first_entry: int
    gaps: bool
    open: int
    packed: bytes | File
    offset: int = 0


class KeyColumns:
    """The chunks of each ledger that was added, and `contents`, the number of its messages with a key or a value.

    Without a `request` the topic has no transactions: messages without a key are unwanted, and all deletions can be
    purged. `bytes_read` of the ledgers and of the temporary file; if all stays `in_memory`, there is no such file.
    `record_sets`: visible ones were found, whose keys are unknown.
    """

    def __init__(
        self,
        disk: Disk,
        files: TopicFiles,
        request: CompactionRequest | None,
        in_memory: bool = False,
    ) -> None:
        self.chunks: list[list[KeyChunk]] = []
        self.contents: list[int] = []
        self.bytes_read = 0
        self.record_sets = False
        self._disk, self._files, self._request, self._all_in_memory = disk, files, request, in_memory
        self._path = layout.join(files.path, layout.KEY_COLUMNS)
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
        """Read the keys of a closed ledger. Raises Damaged, UnsupportedFormat, OSError, and what the request raises."""
        chunks: list[KeyChunk] = []
        self.contents.append(0)
        read = 0
        topic = self._files.topic
        path = layout.segment_path(self._files.directory, topic, ledger)
        with closing(open_segment(self._disk, path)) as file:
            scan = SegmentScan(file, path, ledger.bytes, topic.place(ledger))
            for offset, blocks in grouped(scan):
                with damage_at(path, offset):
                    chunks.append(self._store(ledger, blocks))
                if self._request is not None:
                    self._request.progress(scan.bytes_read - read)
                    read = scan.bytes_read
            self.bytes_read += scan.bytes_read
        self.chunks.append(chunks)

    def _store(self, ledger: LedgerEntry, blocks: list[RawBlock]) -> KeyChunk:
        counts = [block.header.rows for block in blocks]
        keys, entries = decode_keys(blocks, counts), decode_entries(blocks, counts)
        deleted, rows = absent_values(blocks, counts), len(keys)
        if self._request is None:
            unwanted = keys.absent_mask()
            competes, purgeable = ~unwanted, deleted
            self.contents[-1] += rows
        else:
            competes, purgeable, unwanted = self._retained(self._request, ledger, blocks, deleted)
        hashes = hashes_of(blocks, keys, self._files.seed)
        masks = competes, purgeable, unwanted, ~(deleted & keys.absent_mask()), ~deleted
        bitmaps = [np.packbits(mask).tobytes() for mask in masks]
        first = int(entries[0])
        gaps = int(entries[-1]) - first >= rows
        numbers = entries.tobytes() if gaps else b""
        packed = b"".join([numbers, hashes.tobytes(), keys.lengths().tobytes(), *bitmaps, keys.packed().data])
        chunk = KeyChunk(rows, len(packed), first, gaps, int(np.count_nonzero(competes | unwanted)), packed)
        if self._all_in_memory or self._in_memory + len(packed) <= MEMORY_BYTES:
            self._in_memory += len(packed)
            return chunk
        if self._file is None:
            self._file = self._disk.open(self._path, write=True, create=True)
            self._file.truncate(0)
        self._file.write(self._in_file, [packed])
        self._in_file += len(packed)
        return chunk._replace(packed=self._file, offset=self._in_file - len(packed))

    def _retained(
        self, request: CompactionRequest, ledger: LedgerEntry, blocks: list[RawBlock], deleted: Mask
    ) -> tuple[Mask, Mask, Mask]:
        """Which messages compete for their keys, which may be purged, and which are unwanted."""
        entries, times, messages = decode_keys_parts(blocks)
        columns = np.full(len(entries), ledger.ledger, np.int64), entries, np.full(len(entries), NO_INDEX, np.int64)
        found = request.rules.retentions(PlacedBatch(Positions(*columns), times, messages))
        self.record_sets |= bool((found == RecordRetention.RECORD_SET).any())
        competes = found == RecordRetention.LATEST
        self.contents[-1] += int(np.count_nonzero((found != RecordRetention.RETAIN) | ~deleted))
        if self.record_sets or ledger.ledger > request.purge_upto:
            return competes, np.zeros(len(found), np.bool_), found == RecordRetention.EMPTY
        return competes, competes & deleted & (times < request.purge_before_ms), found == RecordRetention.EMPTY

    def read(self, chunk: KeyChunk) -> Columns:
        """The columns of a chunk. Raises OSError."""
        if isinstance(chunk.packed, bytes):
            return _columns(chunk.packed, chunk)
        self.bytes_read += chunk.size
        return _columns(chunk.packed.read(chunk.offset, chunk.size), chunk)


def hashes_of(blocks: list[RawBlock], keys: Blobs, seed: int) -> Hashes:
    """The first halves of the key hashes; those of blocks that have none are computed."""
    if all(HASHES in block.sections or KEYS not in block.sections for block in blocks):
        return decode_hashes(blocks)
    return np.frombuffer(hash_keys(keys, seed), ">u8")[::2].astype(np.uint64)


def _columns(packed: bytes, chunk: KeyChunk) -> Columns:
    rows, at = chunk.rows, 0
    if chunk.gaps:
        entries, at = np.frombuffer(packed, np.int64, rows), 8 * rows
    else:
        entries = np.arange(chunk.first_entry, chunk.first_entry + rows, dtype=np.int64)
    hashes = np.frombuffer(packed, np.uint64, rows, at)
    lengths = np.frombuffer(packed, np.int32, rows, at + 8 * rows).astype(np.int64)
    size, at = -(-rows // 8), at + 12 * rows
    competes, *masks = (bits(np.frombuffer(packed, np.uint8, size, at + number * size), rows) for number in range(5))
    data = np.frombuffer(packed, np.uint8, offset=at + 5 * size)
    keys = KeyColumn(data, np.cumsum(lengths) - lengths, np.where(competes, lengths, -1))
    return Columns(entries, hashes, keys, *masks)


def bits(bitmap: Bytes, rows: int) -> Mask:
    """The first bits of a bitmap as bool[rows]."""
    return np.unpackbits(bitmap, count=rows).view(np.bool_)


def grouped(scan: SegmentScan) -> Iterator[tuple[int, list[RawBlock]]]:
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
