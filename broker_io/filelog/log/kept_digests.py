"""Digests of what a compaction keeps, by which a rewritten ledger is checked and the log is audited later

A compaction decides by key columns what it keeps of each ledger, and adds that to a digest. After a rewrite the columns
of the new file are read, and must have the same digest. It has each message with a key or a value: the hash of its key,
its position, and whether it has a value; the checksums of blocks protect the values themselves.

Of a data topic the digest of the newest message of each key that has a value is stored for each ledger. It is valid for
all ledgers up to the last one that compaction has looked at (`cleaned`), since nothing that is written later changes
which message of a key is the newest there. As the keys of a ledger are in no other digest, ledgers can be trimmed.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from broker_io.block import absent_values, decode_entries, decode_keys
from broker_io.environment import Disk
from broker_io.errors import Damaged
from broker_io.filelog.log import layout
from broker_io.filelog.log.key_columns import Columns, grouped, hashes_of
from broker_io.filelog.log.keymap import Hashes, Mask
from broker_io.filelog.log.layout import LedgerEntry, TopicFiles, damage_at
from broker_io.filelog.log.recovery import open_segment
from broker_io.filelog.log.segment import SegmentScan
from broker_io.key_digest import KeyDigest
from broker_io.position import Int64s


@dataclass(slots=True)
class KeptDigests:
    """The digests of one ledger: of the `newest` messages of their keys that have a value, of the deletions that may be
    purged, and of all else that stays.

    `undecided`: keys are among the latter of which several messages stay, because the key map has no room for them.
    """

    newest: KeyDigest
    purgeable: KeyDigest
    others: KeyDigest
    undecided: bool = False

    @classmethod
    def empty(cls, seed: int) -> KeptDigests:
        nothing = KeyDigest(seed)
        return cls(nothing, nothing, nothing)

    def add_newest(self, ledger: int, columns: Columns, which: Mask) -> None:
        """Add messages that are the newest of their keys."""
        self.newest = add_rows(self.newest, ledger, columns, which & columns.valued)
        deletions = which & ~columns.valued
        if deletions.any():
            self.purgeable = add_rows(self.purgeable, ledger, columns, deletions & columns.purgeable)
            self.add_others(ledger, columns, deletions & ~columns.purgeable)

    def add_others(self, ledger: int, columns: Columns, which: Mask) -> None:
        """Add messages that stay, whatever their keys are."""
        self.others = add_rows(self.others, ledger, columns, which)

    def kept(self, *, purged: bool) -> KeyDigest:
        """The digest of the ledger after a rewrite, in which its deletions are purged or not."""
        kept = self.newest.combine(self.others)
        return kept if purged else kept.combine(self.purgeable)

    def stored(self) -> str:
        """What the manifest says of the ledger."""
        return "" if self.undecided else self.newest.total_text


def add_rows(digest: KeyDigest, ledger: int, columns: Columns, which: Mask) -> KeyDigest:
    """The digest with those messages of a ledger that a mask selects."""
    if not which.any():
        return digest
    return _added(digest, ledger, columns.hashes[which], columns.entries[which], columns.valued[which])


def _added(digest: KeyDigest, ledger: int, hashes: Hashes, entries: Int64s, valued: Mask) -> KeyDigest:
    if not valued.all():
        hashes = np.where(valued, hashes, ~hashes)
    return digest.add(hashes, np.full(len(hashes), ledger, np.int64), entries)


def check_kept(disk: Disk, files: TopicFiles, ledger: LedgerEntry, attempt: str, expected: KeyDigest) -> int:
    """Read the keys of a rewritten ledger; return the bytes read.

    Raises Damaged for an invalid block and for another digest, OSError.
    """
    path = layout.segment_path(files.directory, files.topic, ledger, attempt)
    found = KeyDigest(files.seed)
    with closing(open_segment(disk, path)) as file:
        scan = SegmentScan(file, path, ledger.bytes, files.topic.place(ledger))
        for offset, blocks in grouped(scan):
            counts = [block.header.rows for block in blocks]
            with damage_at(path, offset):
                keys, valued = decode_keys(blocks, counts), ~absent_values(blocks, counts)
                content = valued | ~keys.absent_mask()
                hashes = hashes_of(blocks, keys, files.seed)[content]
                entries = decode_entries(blocks, counts)[content]
            found = _added(found, ledger.ledger, hashes, entries, valued[content])
    if found != expected:
        raise Damaged(
            path,
            0,
            f"the rewritten ledger {ledger.ledger} does not have the records that a compaction must keep, so it was "
            "removed, and the topic is as it was: report this defect, or check the memory of this machine",
        )
    return scan.bytes_read
