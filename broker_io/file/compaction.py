"""Key compaction of the closed ledgers of a topic.

First the keys of all messages are read, and looked at from the newest to the oldest: a message whose key was seen
before is superseded. The map of keys has a fixed size. If there are more keys, it is filled with those of a range of
hashes, and the keys are looked at again for each other range. Keys are compared, so two keys with one hash can't hide
each other: the messages of the one that was seen later stay.

In a topic without transactions, superseded messages are removed, and so are those without a key, and the newest message
of a key if it has no value (nothing older of that key is left then). In a data topic they are emptied, as
`broker_io.compaction` says, and ledgers with few messages to empty stay as they are. Then a deletion can be purged only
below the first ledger that keeps superseded messages: an older value of its key may be among these. If that keeps too
many deletions, all ledgers are rewritten.

A ledger is rewritten under the next generation, every message with its entry number and publish time. A large block
that loses nothing is copied as it is stored, once its checksums were verified; others are merged. The manifest that
names the new files is the swap; the old files are removed after it.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Width
from broker_io.block import Decoded, RawBlock, decode_blocks, encode_block, move_block, open_block, property_names
from broker_io.compaction import CompactionReport, CompactionRequest
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
EMPTIED_BYTES = 24
"""About the bytes of an emptied message in a block."""


class Rewrite(NamedTuple):
    """A closed ledger before and after compaction."""

    old: LedgerEntry
    new: LedgerEntry


@dataclass(slots=True)
class Compaction:
    """What a compaction did: its report, the ledgers rewritten, the newest one that had a purged deletion (0: none)."""

    report: CompactionReport = field(default_factory=CompactionReport)
    rewrites: list[Rewrite] = field(default_factory=list)
    purged: int = 0


class Compactor:
    """Compacts the closed ledgers of a topic, up to that of the request; without a request it has no transactions."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        topic: TopicEntry,
        request: CompactionRequest | None,
        *,
        seed: int,
        compress: bool,
        map_bytes: int,
    ) -> None:
        self._disk, self._directory, self._topic, self.request = disk, directory, topic, request
        self._seed, self._compress, self._map_bytes = seed, compress, map_bytes
        closed = topic.ledgers[:-1]
        self.ledgers = [ledger for ledger in closed if request is None or ledger.ledger <= request.upto]
        self._done = Compaction()

    def run(self) -> Compaction:
        """Rewrite the ledgers that lose messages; the files are durable when this returns.

        Raises Damaged for an invalid block, OSError, and what the request raises; what was written by then is removed.
        """
        done, report = self._done, self._done.report
        report.ledgers, report.bytes_before = len(self.ledgers), sum(ledger.bytes for ledger in self.ledgers)
        try:
            for ledger, removed in zip(self.ledgers, self._removed(), strict=True):
                if removed.any():
                    self._rewrite(ledger, removed)
            if done.rewrites:
                self._disk.sync_directory(layout.topic_path(self._directory, self._topic.number))
        except BaseException:
            self.discard()
            raise
        report.rewritten = len(done.rewrites)
        report.bytes_after = report.bytes_before + sum(new.bytes - old.bytes for old, new in done.rewrites)
        return done

    def discard(self) -> None:
        """Remove the files that were written, which will not be used."""
        for _, new in self._done.rewrites:
            path = layout.segment_path(self._directory, self._topic, new)
            with contextlib.suppress(OSError):
                self._disk.remove(path)
                self._disk.remove(layout.index_path(path))

    def _removed(self) -> list[Mask]:
        """Which messages of each ledger are removed or emptied."""
        report = self._done.report
        with KeyColumns(self._disk, self._directory, self._topic, self._seed, self.request) as columns:
            for ledger in self.ledgers:
                columns.add(ledger)
            found = Superseded(columns)
            begin = 0
            while begin < ALL_HASHES:
                begin = found.add_range(begin, self._map_bytes)
                report.passes += 1
            report.bytes_read += columns.bytes_read
        superseded, purgeable = found.masks()
        report.records = sum(columns.contents)
        if self.request is not None:
            choose_ledgers(superseded, purgeable, columns.contents, self.request.least_dead)
        for ledger, mask, deleted in zip(self.ledgers, superseded, purgeable, strict=True):
            report.emptied += int(np.count_nonzero(mask))
            report.purged += (purged := int(np.count_nonzero(deleted)))
            if purged:
                self._done.purged = ledger.ledger
        return [mask | deleted for mask, deleted in zip(superseded, purgeable, strict=True)]

    def _rewrite(self, ledger: LedgerEntry, removed: Mask) -> None:
        rewrites, report = self._done.rewrites, self._done.report
        rewrites.append(Rewrite(ledger, ledger._replace(generation=ledger.generation + 1)))
        source = self._disk, self._directory, self._topic, ledger, self.request
        with closing(_Rewriting(*source, seed=self._seed, compress=self._compress)) as file:
            rewrites[-1] = Rewrite(ledger, file.run(removed))
            report.bytes_read += file.bytes_read
            report.bytes_written += rewrites[-1].new.bytes


class Superseded:
    """Which messages of each ledger are superseded or unwanted, and which are deletions that may be purged; bitmaps."""

    def __init__(self, columns: KeyColumns) -> None:
        self._columns = columns
        chunks = [chunk for ledger in columns.chunks for chunk in ledger]
        self._rows, self._bytes = sum(chunk.rows for chunk in chunks), sum(chunk.size for chunk in chunks)
        self._superseded = self._empty()
        self._purgeable = self._empty()

    def add_range(self, begin: int, map_bytes: int) -> int:
        """Look at the messages of a range of hashes from `begin` on; return its end."""
        keys = KeyMap.for_rows(self._rows, self._bytes, map_bytes, begin)
        places = zip(self._columns.chunks, self._superseded, self._purgeable, strict=True)
        for chunks, superseded, purgeable in reversed([*places]):
            for at in reversed(range(len(chunks))):
                found = self._columns.read(chunks[at])
                newest, older = keys.add(found.hashes, found.keys)
                superseded[at] |= np.packbits(older | found.unwanted)
                purgeable[at] |= np.packbits(newest & found.purgeable)
        return keys.end

    def masks(self) -> tuple[list[Mask], list[Mask]]:
        """The two masks of each ledger."""
        return self._masks(self._superseded), self._masks(self._purgeable)

    def _empty(self) -> list[list[Bytes]]:
        return [[np.zeros(-(-chunk.rows // 8), np.uint8) for chunk in chunks] for chunks in self._columns.chunks]

    def _masks(self, bitmaps: list[list[Bytes]]) -> list[Mask]:
        found = []
        for chunks, ledger in zip(self._columns.chunks, bitmaps, strict=True):
            masks = [bits(bitmap, chunk.rows) for chunk, bitmap in zip(chunks, ledger, strict=True)]
            found.append(np.concatenate([np.zeros(0, np.bool_), *masks]))
        return found


def choose_ledgers(superseded: list[Mask], purgeable: list[Mask], contents: list[int], least_dead: float) -> None:
    """Clear the masks of ledgers that stay as they are, and of deletions that have to stay because of them."""
    if _choose(superseded, purgeable, contents, least_dead, apply=False) > least_dead * sum(contents):
        least_dead = 0.0
    _choose(superseded, purgeable, contents, least_dead, apply=True)


def _choose(
    superseded: list[Mask], purgeable: list[Mask], contents: list[int], least_dead: float, *, apply: bool
) -> int:
    """The number of deletions that stay because a ledger does; with `apply` the masks are cleared."""
    kept, complete = 0, True
    for older, deleted, count in zip(superseded, purgeable, contents, strict=True):
        dead, deletions = int(np.count_nonzero(older)), int(np.count_nonzero(deleted))
        rewritten = dead + (deletions if complete else 0) >= max(least_dead * count, 1)
        complete = complete and (rewritten or not dead)
        if not (rewritten and complete):
            kept += deletions
            if apply:
                deleted[:] = False
        if apply and not rewritten:
            older[:] = False
    return kept


class _Rewriting:
    """The rewrite of one ledger: blocks in order, from its old file to the next one."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        topic: TopicEntry,
        old: LedgerEntry,
        request: CompactionRequest | None,
        *,
        seed: int,
        compress: bool,
    ) -> None:
        self.bytes_read = 0
        self._request = request
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

    def run(self, removed: Mask) -> LedgerEntry:
        """Write and sync the file, and its index; return the new ledger. Raises Damaged, OSError."""
        self._file.truncate(0)
        path = layout.segment_path(self._directory, self._topic, self._old)
        with closing(open_segment(self._disk, path)) as source:
            scan = SegmentScan(source, path, self._old.bytes, self._topic.place(self._old))
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
            self.bytes_read = scan.bytes_read
        self._file.sync()
        if len(self._index):
            self._index.save(self._disk, layout.index_path(self._path))
        return self._new

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
            seed=self._seed,
            place=self._place,
            compress=self._compress,
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
        size = sum(map(len, chunks))
        self._new = self._new._replace(bytes=self._new.bytes + size)
        self._report(size)

    def _report(self, moved: int) -> None:
        if self._request is not None:
            self._request.progress(moved)
