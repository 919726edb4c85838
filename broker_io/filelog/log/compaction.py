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

Each rewritten ledger is read again, and checked by a digest of what it must keep (kept_digests.py). The manifest that
names the new files is the swap; the old files are removed after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from broker_io.compaction import CompactionReport, CompactionRequest
from broker_io.environment import Disk
from broker_io.filelog.log.kept_digests import KeptDigests
from broker_io.filelog.log.key_columns import KeyColumns, bits
from broker_io.filelog.log.keymap import ALL_HASHES, Bytes, KeyMap, Mask
from broker_io.filelog.log.layout import LedgerEntry, TopicFiles
from broker_io.filelog.log.rewriting import Rewrite, discard, rewrite_ledger
from broker_io.key_digest import KeyDigest


@dataclass(slots=True)
class Compaction:
    """What a compaction did: its report, the ledgers rewritten, the newest one that had a purged deletion (0: none).

    `digests` of the ledgers that were looked at, as the manifest has them.
    """

    report: CompactionReport = field(default_factory=CompactionReport)
    rewrites: list[Rewrite] = field(default_factory=list)
    purged: int = 0
    digests: list[str] = field(default_factory=list)

    def complete(self, ledgers: Sequence[LedgerEntry]) -> None:
        """Set what the report says of the files; `ledgers` were looked at."""
        report = self.report
        report.ledgers, report.rewritten = len(ledgers), len(self.rewrites)
        report.bytes_before = sum(ledger.bytes for ledger in ledgers)
        report.bytes_written = sum(one.new.bytes for one in self.rewrites)
        report.bytes_after = report.bytes_before + sum(one.new.bytes - one.old.bytes for one in self.rewrites)


def ledgers_of(files: TopicFiles, request: CompactionRequest | None) -> list[LedgerEntry]:
    """The ledgers that a compaction looks at."""
    closed = files.topic.ledgers[:-1]
    return [ledger for ledger in closed if request is None or ledger.ledger <= request.upto]


class Compactor:
    """Compacts the closed ledgers of a topic, up to that of the request; without a request it has no transactions."""

    def __init__(self, disk: Disk, files: TopicFiles, request: CompactionRequest | None, map_bytes: int) -> None:
        self._disk, self._files, self._request, self._map_bytes = disk, files, request, map_bytes
        self._ledgers = ledgers_of(files, request)
        self._done = Compaction()

    def run(self) -> Compaction:
        """Rewrite the ledgers that lose messages; the files are durable when this returns.

        Raises Damaged for an invalid block, OSError, and what the request raises; what was written by then is removed.
        """
        done = self._done
        try:
            for ledger, (removed, kept) in zip(self._ledgers, self._decided(), strict=True):
                if removed.any():
                    self._rewrite(ledger, removed, kept)
            if done.rewrites:
                self._disk.sync_directory(self._files.path)
        except BaseException:
            discard(self._disk, self._files, done.rewrites)
            raise
        done.complete(self._ledgers)
        return done

    def _decided(self) -> list[tuple[Mask, KeyDigest]]:
        """Which messages of each ledger are removed or emptied, and the digest of the others."""
        report = self._done.report
        with KeyColumns(self._disk, self._files, self._request) as columns:
            for ledger in self._ledgers:
                columns.add(ledger)
            found = Superseded(columns, self._ledgers, self._files.seed)
            begin = 0
            while begin < ALL_HASHES:
                begin = found.add_range(begin, self._map_bytes)
                report.passes += 1
            found.add_undecided()
            report.bytes_read += columns.bytes_read
        superseded, purgeable = found.masks()
        report.records = sum(columns.contents)
        if self._request is not None:
            choose_ledgers(superseded, purgeable, columns.contents, self._request.least_dead)
        for ledger, mask, deleted in zip(self._ledgers, superseded, purgeable, strict=True):
            report.emptied += int(np.count_nonzero(mask))
            report.purged += (purged := int(np.count_nonzero(deleted)))
            if purged:
                self._done.purged = ledger.ledger
        self._done.digests = [kept.stored() for kept in found.kept]
        return [
            (mask | deleted, kept.kept(purged=bool(deleted.any())))
            for mask, deleted, kept in zip(superseded, purgeable, found.kept, strict=True)
        ]

    def _rewrite(self, ledger: LedgerEntry, removed: Mask, kept: KeyDigest) -> None:
        rewrites = self._done.rewrites
        rewrites.append(rewrite_ledger(self._disk, self._files, self._request, ledger, removed, kept))
        self._done.report.bytes_read += rewrites[-1].bytes_read


class Superseded:
    """Which messages of each ledger are superseded or unwanted, and which are deletions that may be purged; bitmaps.

    `kept`: the digests of the others.
    """

    def __init__(self, columns: KeyColumns, ledgers: Sequence[LedgerEntry], seed: int) -> None:
        self.kept = [KeptDigests.empty(seed) for _ in ledgers]
        self._columns, self._ledgers = columns, ledgers
        chunks = [chunk for ledger in columns.chunks for chunk in ledger]
        self._rows, self._bytes = sum(chunk.rows for chunk in chunks), sum(chunk.size for chunk in chunks)
        self._superseded = self._empty()
        self._newest = self._empty()
        self._purgeable = self._empty()

    def add_range(self, begin: int, map_bytes: int) -> int:
        """Look at the messages of a range of hashes from `begin` on; return its end."""
        keys = KeyMap.for_rows(self._rows, self._bytes, map_bytes, begin)
        for number, chunks in reversed([*enumerate(self._columns.chunks)]):
            superseded, purgeable, seen = self._superseded[number], self._purgeable[number], self._newest[number]
            ledger, kept = self._ledgers[number].ledger, self.kept[number]
            for at in reversed(range(len(chunks))):
                found = self._columns.read(chunks[at])
                newest, older = keys.add(found.hashes, found.keys)
                superseded[at] |= np.packbits(older | found.unwanted)
                purgeable[at] |= np.packbits(newest & found.purgeable)
                if begin == 0:
                    kept.add_newest(ledger, found, newest)
                    kept.add_others(ledger, found, found.content & ~found.competes & ~found.unwanted)
                else:  # the range before may have seen the upper hashes of this one
                    kept.add_newest(ledger, found, newest & ~bits(seen[at], len(newest)))
                seen[at] |= np.packbits(newest)
        return keys.end

    def add_undecided(self) -> None:
        """Complete the digests after all ranges: with messages that stay because no range could compare their keys."""
        for number, chunks in enumerate(self._columns.chunks):
            for chunk, superseded, newest in zip(chunks, self._superseded[number], self._newest[number], strict=True):
                decided = superseded | newest
                if int(np.bitwise_count(decided).sum()) < chunk.open:
                    found = self._columns.read(chunk)
                    which = found.competes & ~bits(decided, chunk.rows)
                    self.kept[number].add_others(self._ledgers[number].ledger, found, which)
                    self.kept[number].undecided = True

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
