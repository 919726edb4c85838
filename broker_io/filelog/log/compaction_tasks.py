"""The tasks of a compaction, and the adoption of what they wrote.

A task reads and writes the directory of a log through the disk without owning it. It may run twice, or continue when
nobody waits for it any more: so it writes to files whose names no other attempt has. The owner of the log checks the
files of one attempt and renames them to those of the next generation. The next owner removes what is left of others.

The keys themselves are not compared between ledgers. So their digests are BLAKE2b of 128 bits, keyed with the secret
of the log: XXH3, with which blocks are hashed, is not made to withstand somebody who looks for keys that collide.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from broker_io.compaction import ROW_BITS, CompactionRequest, LedgerPart, NewestRows, Ordinals, Survivors
from broker_io.environment import Disk, current
from broker_io.errors import Damaged, NotSupported
from broker_io.filelog.log import layout
from broker_io.filelog.log.compaction import Compaction, ledgers_of
from broker_io.filelog.log.kept_digests import KeptDigests
from broker_io.filelog.log.key_columns import Columns, KeyColumns, bits
from broker_io.filelog.log.keymap import KeyMap, Mask
from broker_io.filelog.log.layout import LedgerEntry, TopicFiles
from broker_io.filelog.log.recovery import open_segment
from broker_io.filelog.log.rewriting import Rewrite, discard, rewrite_ledger
from broker_io.key_digest import KeyDigest

DIGEST_BYTES = 16
CHECK_BYTES = 4 * 1024 * 1024
"""Bytes of a file that are read at a time when it is checked."""


class LedgerTasks:
    """See `CompactionTasks`; the disk is that of the environment in which a task runs."""

    def __init__(self, files: TopicFiles, request: CompactionRequest, map_bytes: int) -> None:
        self.files, self._request, self._map_bytes = files, replace(request, progress=int, before_swap=int), map_bytes
        self.ledgers = ledgers_of(files, request)

    @property
    def topic(self) -> str:
        return self.files.topic.name

    @property
    def count(self) -> int:
        return len(self.ledgers)

    def newest(self, ledger: int) -> NewestRows:
        """See `CompactionTasks`."""
        digests: list[bytes] = []
        ordinals: list[Ordinals] = []
        with self._columns(ledger) as columns:
            chunks = columns.chunks[0]
            keys = KeyMap.for_rows(sum(one.rows for one in chunks), sum(one.size for one in chunks), self._map_bytes)
            end = sum(one.rows for one in chunks)
            for chunk in reversed(chunks):
                found = columns.read(chunk)
                older = keys.add(found.hashes, found.keys).superseded
                rows = np.flatnonzero((found.keys.lengths >= 0) & ~older)
                digests.append(self._digests(found, rows))
                end -= chunk.rows
                ordinals.append((ledger << (ROW_BITS + 1)) + ((end + rows) << 1) + found.purgeable[rows])
        packed = np.frombuffer(b"".join(digests), np.int64).reshape(-1, 2)
        return NewestRows(packed, np.concatenate([np.zeros(0, np.int64), *ordinals]), columns.record_sets)

    def _digests(self, found: Columns, rows: NDArray[np.intp]) -> bytes:
        secret = self.files.seed.to_bytes(8, "big")
        data, starts = found.keys.data.tobytes(), found.keys.starts[rows]
        ends = starts + found.keys.lengths[rows]
        keyed = hashlib.blake2b
        return b"".join(
            [
                keyed(data[start:end], digest_size=DIGEST_BYTES, key=secret).digest()
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            ]
        )

    def rewrite(self, ledger: int, survivors: Survivors, attempt: str) -> LedgerPart:
        """See `CompactionTasks`."""
        old, disk = self.ledgers[ledger], current().disk
        with self._columns(ledger) as columns:
            found = [columns.read(chunk) for chunk in columns.chunks[0]]
            records, read = columns.contents[0], 2 * columns.bytes_read  # `newest` has read them, too
        competes = np.concatenate([np.zeros(0, np.bool_), *(one.competes for one in found)])
        unwanted = np.concatenate([np.zeros(0, np.bool_), *(one.unwanted for one in found)])
        newest, purged = (_mask(bitmap, len(competes)) for bitmap in survivors)
        emptied = unwanted | (competes & ~newest)
        counts = int(np.count_nonzero(emptied)), int(np.count_nonzero(purged))
        removed = emptied | purged
        stored, kept = self._digests_of(old, found, removed)
        if not any(counts):
            return LedgerPart(records, *counts, read, stored, None)
        rewrite = rewrite_ledger(disk, self.files, self._request, old, removed, kept, attempt)
        return LedgerPart(records, *counts, read + rewrite.bytes_read, stored, rewrite)

    def _digests_of(self, ledger: LedgerEntry, found: list[Columns], removed: Mask) -> tuple[str, KeyDigest]:
        """What the manifest says of a ledger, and the digest of what it must keep."""
        kept, start = KeptDigests.empty(self.files.seed), 0
        for columns in found:
            stays = ~removed[start : (start := start + len(columns.entries))]
            kept.add_newest(ledger.ledger, columns, stays & columns.competes)
            kept.add_others(ledger.ledger, columns, stays & columns.content & ~columns.competes)
        return kept.stored(), kept.kept(purged=False)

    def _columns(self, ledger: int) -> KeyColumns:
        disk, path = current().disk, self.files.path
        if not disk.exists(path):
            raise NotSupported(
                f"there is no directory {path} here: all processes that compact a log need its directory at one path"
            )
        columns = KeyColumns(disk, self.files, self._request, in_memory=True)
        columns.add(self.ledgers[ledger])
        return columns


def _mask(bitmap: bytes, rows: int) -> Mask:
    whole = np.zeros(-(-rows // 8), np.uint8)
    whole[: len(bitmap)] = np.frombuffer(bitmap, np.uint8)
    return bits(whole, rows)


def adopted(disk: Disk, tasks: LedgerTasks, request: CompactionRequest, parts: Sequence[LedgerPart]) -> Compaction:
    """Check the files of all ledgers and rename them to what a manifest may name.

    Raises Damaged for a file that is not what its task wrote, OSError, and what the request raises.
    """
    files, done = tasks.files, Compaction()
    report = done.report
    report.passes = 1
    try:
        for ledger, part in zip(tasks.ledgers, parts, strict=True):
            report.records += part.records
            report.emptied += part.emptied
            report.purged += part.purged
            report.bytes_read += part.bytes_read
            if part.purged:
                done.purged = ledger.ledger
            done.digests.append(part.digest)
            if isinstance(part.written, Rewrite):
                done.rewrites.append(part.written)
                _check_file(disk, files, request, part.written)
        for number, rewrite in enumerate(done.rewrites):
            done.rewrites[number] = _renamed(disk, files, rewrite)
        if done.rewrites:
            disk.sync_directory(files.path)
    except BaseException:
        discard(disk, files, done.rewrites)
        raise
    done.complete(tasks.ledgers)
    return done


def _check_file(disk: Disk, files: TopicFiles, request: CompactionRequest, rewrite: Rewrite) -> None:
    path = layout.segment_path(files.directory, files.topic, rewrite.new, rewrite.attempt)
    digest = size = 0
    with closing(open_segment(disk, path)) as file:
        while chunk := file.read(size, CHECK_BYTES):
            digest, size = google_crc32c.extend(digest, chunk), size + len(chunk)
            request.progress(len(chunk))
    if (digest, size) != (rewrite.digest, rewrite.new.bytes):
        what = f"the {size} bytes are not the {rewrite.new.bytes} that a task wrote here"
        raise Damaged(path, 0, f"{what}: all tasks and the owner of the log need one and the same file system")


def _renamed(disk: Disk, files: TopicFiles, rewrite: Rewrite) -> Rewrite:
    old = layout.segment_path(files.directory, files.topic, rewrite.new, rewrite.attempt)
    new = layout.segment_path(files.directory, files.topic, rewrite.new)
    disk.rename(old, new)
    with contextlib.suppress(OSError):  # it may be missing
        disk.rename(layout.index_path(old), layout.index_path(new))
    return rewrite._replace(attempt="")
