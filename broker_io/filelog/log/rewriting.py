"""The rewrite of one ledger by a compaction: its messages without those that go, in a file of the next generation.

Every message keeps its entry number and publish time. A large block that loses nothing is copied as it is stored, once
its checksums were verified; others are merged. The new file is read again and checked by a digest (kept_digests.py).
Nothing names it until a manifest does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

import google_crc32c
import numpy as np

from broker_io.batch import Batch, Width
from broker_io.block import Decoded, RawBlock, decode_blocks, encode_block, move_block, open_block, property_names
from broker_io.compaction import CompactionRequest
from broker_io.environment import Disk, File
from broker_io.filelog.log import layout
from broker_io.filelog.log.commit import BLOCK_BYTES
from broker_io.filelog.log.kept_digests import check_kept
from broker_io.filelog.log.keymap import Mask
from broker_io.filelog.log.layout import LedgerEntry, TopicFiles, damage_at
from broker_io.filelog.log.recovery import open_segment
from broker_io.filelog.log.segment import SegmentScan, SparseIndex
from broker_io.key_digest import KeyDigest

DECODED_BYTES = 4 * 1024 * 1024
"""Bytes of blocks that are decoded together."""
EMPTIED_BYTES = 24
"""About the bytes of an emptied message in a block."""


class Rewrite(NamedTuple):
    """A closed ledger before and after compaction, and the `attempt` that has the new file.

    `digest`: CRC32C of the new file, which only an attempt needs; `bytes_read` of the old one, and to check the new.
    """

    old: LedgerEntry
    new: LedgerEntry
    attempt: str = ""
    digest: int = 0
    bytes_read: int = 0


def next_generation(ledger: LedgerEntry) -> LedgerEntry:
    """The ledger after a rewrite, still empty."""
    return ledger._replace(generation=ledger.generation + 1, bytes=0)


def discard(disk: Disk, files: TopicFiles, rewrites: Iterable[Rewrite]) -> None:
    """Remove the files that were written, which will not be used."""
    for rewrite in rewrites:
        path = layout.segment_path(files.directory, files.topic, rewrite.new, rewrite.attempt)
        with contextlib.suppress(OSError):
            disk.remove(path)
            disk.remove(layout.index_path(path))


def rewrite_ledger(
    disk: Disk,
    files: TopicFiles,
    request: CompactionRequest | None,
    ledger: LedgerEntry,
    removed: Mask,
    kept: KeyDigest,
    attempt: str = "",
) -> Rewrite:
    """Write a closed ledger without the messages of a mask (bool[messages]), or with these emptied.

    `kept`: the digest of what the new file must have. It is synced, its name is not. Raises Damaged for an invalid
    block and for another digest, OSError, and what the request raises; what was written by then is removed.
    """
    try:
        with closing(_Rewriting(disk, files, request, ledger, attempt)) as file:
            done = file.run(removed)
        checked = check_kept(disk, files, done.new, attempt, kept)
        if request is not None:
            request.progress(checked)
        return done._replace(bytes_read=done.bytes_read + checked)
    except BaseException:
        discard(disk, files, [Rewrite(ledger, next_generation(ledger), attempt)])
        raise


class _Rewriting:
    """The rewrite of one ledger: blocks in order, from its old file to the next one."""

    def __init__(
        self, disk: Disk, files: TopicFiles, request: CompactionRequest | None, old: LedgerEntry, attempt: str
    ) -> None:
        self._disk, self._files, self._request, self._attempt = disk, files, request, attempt
        self._old, self._new = old, next_generation(old)
        self._place = files.topic.place(self._new)
        self._path = layout.segment_path(files.directory, files.topic, self._new, attempt)
        self._digest = 0
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

    def run(self, removed: Mask) -> Rewrite:
        """Write and sync the file, and its index."""
        self._file.truncate(0)
        topic = self._files.topic
        path = layout.segment_path(self._files.directory, topic, self._old)
        with closing(open_segment(self._disk, path)) as source:
            scan = SegmentScan(source, path, self._old.bytes, topic.place(self._old))
            start = 0
            for offset, header in scan:
                mask = removed[start : start + header.rows]
                start += header.rows
                if self._request is None and mask.all():
                    continue
                with damage_at(path, offset):
                    stored = scan.stored(offset, header.length)
                    if header.length >= BLOCK_BYTES // 2 and not mask.any():
                        self._flush()
                        self._write(move_block(*stored, header, self._place), header.first_entry, header.publish_time)
                    else:
                        self._add(open_block(*stored, header), mask)
                self._report(header.length)
            with damage_at(path, 0):
                self._flush()
        self._file.sync()
        if len(self._index):
            self._index.save(self._disk, layout.index_path(self._path))
        return Rewrite(self._old, self._new, self._attempt, self._digest, scan.bytes_read)

    def _add(self, block: RawBlock, mask: Mask) -> None:
        self._blocks.append(block)
        self._masks.append(mask)
        gone = int(np.count_nonzero(mask))
        kept = len(mask) if self._request is not None else len(mask) - gone
        self._width.add(property_names(block), kept)
        self._size += block.header.length * (len(mask) - gone) // len(mask)
        if self._request is not None:
            self._size += EMPTIED_BYTES * gone
        self._undecoded += len(block.part) + len(block.values)
        if self._size >= BLOCK_BYTES or self._width.full:
            self._flush()
        elif self._undecoded >= DECODED_BYTES:
            self._drop()

    def _drop(self) -> None:
        mask = np.concatenate(self._masks)
        entries, times, messages = decode_blocks(self._blocks)
        if self._request is None:
            self._parts.append(Decoded(entries[~mask], times[~mask], messages.take(~mask)))
        else:
            self._parts.append(Decoded(entries, times, self._request.rules.emptied(messages, mask)))
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
            seed=self._files.seed,
            place=self._place,
            compress=self._files.compress,
            compress_keys=self._request is not None,
            hashed=self._request is None,
            entries=entries,
            publish_times=None if (times == times[0]).all() else times,
        )
        self._write(block.chunks, block.first_entry, block.publish_time)
        self._parts, self._size, self._width = [], 0, Width()

    def _write(self, chunks: list[bytes], first_entry: int, publish_time: int) -> None:
        self._file.write(self._new.bytes, chunks)
        self._index.add(first_entry, self._new.bytes, publish_time)
        for chunk in chunks if self._attempt else ():
            self._digest = google_crc32c.extend(self._digest, chunk)
        size = sum(map(len, chunks))
        self._new = self._new._replace(bytes=self._new.bytes + size)
        self._report(size)

    def _report(self, moved: int) -> None:
        if self._request is not None:
            self._request.progress(moved)
