"""Key compaction of the closed ledgers of a topic.

First the keys of all messages are read, and looked at from the newest to the oldest: a message whose key was seen
before is superseded. The map of keys has a fixed size. If there are more keys, it is filled with those of a range of
hashes, and the keys are looked at again for each other range. Keys are compared, so two keys with one hash can't hide
each other: the messages of the one that was seen later stay. Messages without a key are dropped, and so is the newest
message of a key if it has no value (nothing older of that key is left then).

Ledgers that lose messages are rewritten under the next generation, every message with its entry number and publish
time. A large block that loses nothing is copied as it is stored, once its checksums were verified; others are merged.
The manifest that names the new files is the swap; the old files are removed after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Width
from broker_io.block import Decoded, RawBlock, decode_blocks, encode_block, move_block, open_block, property_names
from broker_io.environment import Disk, File
from broker_io.file import layout
from broker_io.file.commit import BLOCK_BYTES
from broker_io.file.key_columns import KeyColumns, bits
from broker_io.file.keymap import ALL_HASHES, Bytes, KeyMap, Mask
from broker_io.file.layout import LedgerEntry, TopicEntry, damage_at
from broker_io.file.recovery import open_segment
from broker_io.file.segment import SegmentScan, SparseIndex

DECODED_BYTES = 4 * 1024 * 1024
"""Bytes of blocks that are decoded together."""


class Rewrite(NamedTuple):
    """A closed ledger before and after compaction."""

    old: LedgerEntry
    new: LedgerEntry


@dataclass(slots=True)
class Compaction:
    """What a compaction did: `passes` over the keys, `bytes_read` in all."""

    rewrites: list[Rewrite] = field(default_factory=list)
    passes: int = 0
    bytes_read: int = 0


def compact_ledgers(
    disk: Disk, directory: str, topic: TopicEntry, *, seed: int, compress: bool, map_bytes: int
) -> Compaction:
    """Rewrite every closed ledger that loses messages; the files are durable when this returns.

    The map of keys has at most `map_bytes`. Raises Damaged for an invalid block, or OSError; what was written by then
    is removed.
    """
    done = Compaction()
    survivors = _survivors(disk, directory, topic, map_bytes, done)
    try:
        for ledger, keep in zip(topic.ledgers[:-1], survivors, strict=True):
            if not keep.all():
                done.rewrites.append(Rewrite(ledger, ledger._replace(generation=ledger.generation + 1)))
                with closing(_Rewriting(disk, directory, topic, ledger, seed=seed, compress=compress)) as rewriting:
                    done.rewrites[-1] = Rewrite(ledger, rewriting.run(keep))
                    done.bytes_read += rewriting.bytes_read
        if done.rewrites:
            disk.sync_directory(layout.topic_path(directory, topic.number))
    except Exception:
        discard(disk, directory, topic, done.rewrites)
        raise
    return done


def discard(disk: Disk, directory: str, topic: TopicEntry, rewrites: list[Rewrite]) -> None:
    """Remove files that were written but will not be used."""
    for _, new in rewrites:
        path = layout.segment_path(directory, topic, new)
        with contextlib.suppress(OSError):
            disk.remove(path)
            disk.remove(layout.index_path(path))


def _survivors(disk: Disk, directory: str, topic: TopicEntry, map_bytes: int, done: Compaction) -> Iterator[Mask]:
    """Which messages of each ledger stay; kept as bitmaps."""
    with KeyColumns(disk, directory, topic) as columns:
        for ledger in topic.ledgers[:-1]:
            columns.add(ledger)
        kept = [[np.packbits(np.ones(chunk.rows, np.bool_)) for chunk in chunks] for chunks in columns.chunks]
        begin = 0
        while begin < ALL_HASHES:
            begin = _drop_superseded(columns, kept, begin, map_bytes)
            done.passes += 1
        done.bytes_read += columns.bytes_read
    for chunks, bitmaps in zip(columns.chunks, kept, strict=True):
        masks = [bits(bitmap, chunk.rows) for chunk, bitmap in zip(chunks, bitmaps, strict=True)]
        yield np.concatenate([np.zeros(0, np.bool_), *masks])


def _drop_superseded(columns: KeyColumns, kept: list[list[Bytes]], begin: int, map_bytes: int) -> int:
    """Clear the bits of the messages that don't stay, for a range of hashes from `begin` on; return its end."""
    rows = sum(chunk.rows for chunks in columns.chunks for chunk in chunks)
    size = sum(chunk.size for chunks in columns.chunks for chunk in chunks)
    keys = KeyMap.for_rows(rows, size, map_bytes, begin)
    for chunks, bitmaps in zip(reversed(columns.chunks), reversed(kept), strict=True):
        for at in reversed(range(len(chunks))):
            found = columns.read(chunks[at])
            newest, superseded = keys.add(found.hashes, found.keys)
            dropped = superseded | (newest & found.deleted) | (found.keys.lengths < 0)
            bitmaps[at] &= ~np.packbits(dropped)
    return keys.end


class _Rewriting:
    """The rewrite of one ledger: blocks in order, from its old file to the next one."""

    def __init__(
        self, disk: Disk, directory: str, topic: TopicEntry, old: LedgerEntry, *, seed: int, compress: bool
    ) -> None:
        self.bytes_read = 0
        self._old, self._new = old, old._replace(generation=old.generation + 1, bytes=0)
        self._disk, self._directory, self._topic = disk, directory, topic
        self._place = topic.place(self._new)
        self._seed, self._compress = seed, compress
        self._path = layout.segment_path(directory, topic, self._new)
        self._index = SparseIndex()
        self._blocks: list[RawBlock] = []
        self._masks: list[Mask] = []
        self._undecoded = 0
        self._width = Width()
        self._parts: list[Decoded] = []
        self._size = 0
        self._file: File = disk.open(self._path, write=True, create=True)

    def close(self) -> None:
        self._file.close()

    def run(self, keep: Mask) -> LedgerEntry:
        """Write and sync the file, and its index; return the new ledger. Raises Damaged, OSError."""
        self._file.truncate(0)
        path = layout.segment_path(self._directory, self._topic, self._old)
        with closing(open_segment(self._disk, path)) as source:
            scan = SegmentScan(source, path, self._old.bytes, self._topic.place(self._old))
            start = 0
            for offset, header in scan:
                mask = keep[start : start + header.rows]
                start += header.rows
                if not mask.any():
                    continue
                with damage_at(path, offset):
                    stored = scan.stored(offset, header.length)
                    if mask.all() and header.length >= BLOCK_BYTES // 2:
                        self._flush()
                        self._write(move_block(*stored, header, self._place), header.first_entry, header.publish_time)
                    else:
                        self._add(open_block(*stored, header), mask)
            with damage_at(path, 0):
                self._flush()
            self.bytes_read = scan.bytes_read
        self._file.sync()
        if len(self._index):
            self._index.save(self._disk, layout.index_path(self._path))
        return self._new

    def _add(self, block: RawBlock, mask: Mask) -> None:
        self._blocks.append(block)
        self._masks.append(mask)
        kept = int(mask.sum())
        self._width.add(property_names(block), kept)
        self._size += block.header.length * kept // len(mask)
        self._undecoded += len(block.part) + len(block.values)
        if self._size >= BLOCK_BYTES or self._width.full:
            self._flush()
        elif self._undecoded >= DECODED_BYTES:
            self._drop()

    def _drop(self) -> None:
        mask = np.concatenate(self._masks)
        entries, times, messages = decode_blocks(self._blocks)
        self._parts.append(Decoded(entries[mask], times[mask], messages.take(mask)))
        self._blocks, self._masks, self._undecoded = [], [], 0

    def _flush(self) -> None:
        """Write the messages that were added as one block."""
        if self._blocks:
            self._drop()
        if not self._parts:
            return
        entries = np.concatenate([part.entries for part in self._parts])
        times = np.concatenate([part.publish_times for part in self._parts])
        block = encode_block(
            Batch.concat([part.messages for part in self._parts]),
            first_entry=int(entries[0]),
            publish_time=int(times[0]),
            seed=self._seed,
            place=self._place,
            compress=self._compress,
            entries=entries,
            publish_times=None if (times == times[0]).all() else times,
        )
        self._write(block.chunks, block.first_entry, block.publish_time)
        self._parts, self._size, self._width = [], 0, Width()

    def _write(self, chunks: list[bytes], first_entry: int, publish_time: int) -> None:
        self._file.write(self._new.bytes, chunks)
        self._index.add(first_entry, self._new.bytes, publish_time)
        self._new = self._new._replace(bytes=self._new.bytes + sum(map(len, chunks)))
