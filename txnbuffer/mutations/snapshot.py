"""The snapshots of a topic in memory: ranges of seqnos in which each key appears once, with its newest mutation.

A snapshot is a list of chunks, each a slice of mutations as they were queued; replaced mutations remain in their chunk
until it is packed. A snapshot without seqnos is only a place where cursors wait. Its first mutation sets its start.
Mutations without a key are never replaced; deletions are mutations like any other. Those that compaction has emptied
have a seqno and are in no chunk, so a snapshot may have seqnos and no chunk.

The chain has the snapshots of a topic, oldest first, each following its predecessor without a gap.

- The newest snapshot is open: mutations are queued there, and a newer mutation of a key replaces the older one.
- When a cursor enters an open snapshot with mutations, the snapshot is closed and a new one is opened. Cursors wait in
  an empty one: the next mutations close it at once, and all its cursors begin it.
- The oldest snapshot is freed as soon as it has no cursor.
- Two adjacent closed snapshots without cursors collapse into one, which keeps the newest mutation of each key, unless
  it would be larger than `limit` bytes.
- A snapshot may be evicted: it keeps its place and its range, and its mutations are read from the log.

Memory is counted when it is allocated and freed, and summed up in the account of the budget. One thread owns all
snapshots of a topic, so collapsing two needs no lock.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from broker_io.position import EARLIEST
from txnbuffer.mutations.batch import MutationBatch


@dataclass(slots=True, eq=False)
class MemoryAccount:
    """A sum of bytes; each addition is also added to `parent`."""

    parent: MemoryAccount | None = None
    bytes: int = 0

    def add(self, more: int) -> None:
        self.bytes += more
        if self.parent is not None:
            self.parent.add(more)


TINY_ROWS = 64
TINY_BYTES = 16 * 1024

TOGETHER = 32
TOGETHER_BYTES = 64 * 1024
"""The limits within which tiny chunks are joined: their number, and bytes of keys and values."""


class Chunk:
    """Mutations `rows`, of which `live` ones, masked by `alive` (None: all), belong to the snapshot.

    `first` is a seqno at or below all of them and above those of the previous chunk. `handed` is the number of cursors
    that returned rows of it which may still be used; `leaving` counts their bytes once the snapshot has freed them.
    """

    __slots__ = ("alive", "bytes", "first", "handed", "leaving", "live", "rows")

    def __init__(self, rows: MutationBatch) -> None:
        self.rows = rows
        self.first = rows.first
        self.alive: NDArray[np.bool_] | None = None
        self.live = len(rows)
        self.bytes = rows.nbytes()
        self.handed = 0
        self.leaving: MemoryAccount | None = None

    @property
    def tiny(self) -> bool:
        return len(self.rows) < TINY_ROWS and self.bytes < TINY_BYTES

    def keep(self, alive: NDArray[np.bool_]) -> int:
        """Keep the masked mutations of a new chunk; returns how many are dropped."""
        self.live = int(alive.sum())
        if self.live < len(self.rows):
            self.alive = alive
        return len(self.rows) - self.live

    def replace(self, seqnos: Sequence[int]) -> None:
        """Remove mutations that newer ones of their keys replace; they must be in the chunk, and alive."""
        if self.alive is None:
            self.alive = np.ones(len(self.rows), np.bool_)
        self.alive[np.searchsorted(self.rows.seqnos, np.array(seqnos, np.int64))] = False
        self.live -= len(seqnos)

    def pack(self) -> int:
        """Free replaced mutations; returns the bytes freed. At least one must be alive."""
        if self.alive is None:
            return 0
        before = self.bytes
        self.rows = self.rows.take(self.alive).owned()
        self.alive = None
        self.bytes = self.rows.nbytes()
        return before - self.bytes

    def living(self) -> MutationBatch:
        return self.rows if self.alive is None else self.rows.take(self.alive)

    def give_back(self) -> None:
        """The reader no longer uses the rows."""
        self.handed -= 1
        if self.leaving is not None and not self.handed:
            self.leaving.add(-self.bytes)
            self.leaving = None

    def leave(self, leaving: MemoryAccount) -> None:
        """The snapshot frees it; rows that readers still use are counted in `leaving`."""
        if self.handed:
            self.leaving = leaving
            leaving.add(self.bytes)


def join_tiny(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same mutations with adjacent tiny chunks joined: the overhead of small batches exceeds their data."""
    joined: list[Chunk] = []
    run: list[Chunk] = []
    payload = 0
    for chunk in chunks:
        more = chunk.rows.payload() if chunk.tiny else TOGETHER_BYTES + 1
        if run and (len(run) == TOGETHER or payload + more > TOGETHER_BYTES):
            joined.append(_one(run))
            run, payload = [], 0
        if chunk.tiny:
            run.append(chunk)
            payload += more
        else:
            joined.append(chunk)
    return [*joined, _one(run)] if run else joined


def _one(run: list[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    one = Chunk(MutationBatch.concat([part.living() for part in run]).owned())
    one.first = run[0].first
    return one


SNAPSHOT_BYTES = 600
"""Bytes of a snapshot without its chunks and its index."""

ENTRY_BYTES = 33 + 32
"""Bytes of the objects of one entry of the index: the header of the key, and the seqno."""

_first, _last = attrgetter("first"), attrgetter("rows.last")


class MutationSnapshot:
    """A snapshot of seqnos `start` to `end`; `end` is `start` - 1 while it is empty.

    It has `rows` mutations, in `chunks`; the first `base` chunks, up to the seqno `freed`, were freed. `evicted`: all
    its mutations were freed before slower cursors had read them; these get them from the log. `pins` cursors are in
    it, `passed` of them at its end; `persistence`: the persistence cursor is in it.
    """

    __slots__ = (
        "_account", "_index", "_indexed", "_key_bytes", "_leaving", "base", "bytes", "chunks", "closed", "end",
        "evicted", "first_position", "freed", "index_bytes", "last_position", "linked", "newer", "older", "passed",
        "persistence", "pins", "rows", "start",
    )  # fmt: skip

    def __init__(self, start: int, account: MemoryAccount, leaving: MemoryAccount) -> None:
        self.start = start
        self.end = start - 1
        self.first_position = self.last_position = EARLIEST
        self.rows = 0
        self.chunks: list[Chunk] = []
        self.base = 0
        self.freed = start - 1
        self.evicted = self.closed = self.persistence = False
        self.linked = True
        self.pins = self.passed = 0
        self.older: MutationSnapshot | None = None
        self.newer: MutationSnapshot | None = None
        self.bytes = 0
        self._account = account
        self._leaving = leaving
        self._index: dict[bytes | None, int] = {}
        self._indexed = True
        self.index_bytes = 0
        self._key_bytes = 0
        self._count(SNAPSHOT_BYTES)

    @property
    def empty(self) -> bool:
        """Whether it has no seqnos yet."""
        return self.end < self.start

    def append(self, rows: MutationBatch, *, last: bool = False) -> int:
        """Add `owned` mutations that follow those in it; returns how many were replaced.

        `last`: no more are added before it is closed. Those that compaction has emptied only move its end.
        """
        if self.empty:
            self.first_position = rows.positions.first
        self.end = rows.last
        self.last_position = rows.positions.last
        if rows.removed is not None and not len(rows := rows.present().owned()):
            return 0
        if last and not self.rows:
            keys = rows.messages.keys.to_list()
            chunk = Chunk(rows)
            replaced = 0
            if len(set(keys)) < len(keys):
                latest = dict(zip(keys, rows.seqnos.tolist(), strict=True))
                latest.pop(None, None)
                replaced = chunk.keep(_newest(rows, keys, latest.values()))
            self._add(chunk)
            return replaced
        return self._put(rows)

    def absorb(self, newer: MutationSnapshot) -> int:
        """Merge the next snapshot into this one; returns how many mutations were replaced. Neither may be evicted."""
        self._ensure_index()
        replaced = sum(self._put(chunk.living().owned()) for chunk in newer.chunks)
        self.end = newer.end
        self.last_position = newer.last_position
        return replaced

    def overlap(self, newer: MutationSnapshot) -> int:
        """About the bytes that `absorb` would free, by the proportion of keys that are in both."""
        self._ensure_index()
        common = sum(len(self._index.keys() & set(chunk.living().messages.keys.to_list())) for chunk in newer.chunks)
        return common * sum(chunk.bytes for chunk in self.chunks) // max(1, self.rows)

    def seal(self) -> None:
        """Close it to new mutations: free the index and replaced mutations."""
        if not self._indexed:
            return
        self.drop_index()
        for chunk in self.chunks:
            self._count(-chunk.pack())
        self._join(0)

    def drop_index(self) -> None:
        self._index = {}
        self._indexed = False
        self._count(-self.index_bytes)
        self.index_bytes = 0

    def evict(self) -> int:
        """Free all mutations, which the log has; returns the bytes freed."""
        before = self.bytes
        self.drop_index()
        self.free_head(self.end)
        self.evicted = True
        return before - self.bytes

    def absorb_evicted(self, newer: MutationSnapshot) -> None:
        """Merge the next snapshot into this one if both are evicted; a key of both counts twice."""
        self.end = self.freed = newer.end
        self.last_position = newer.last_position
        self.rows += newer.rows

    def free_head(self, upto: int) -> int:
        """Free the chunks without mutations above `upto`; returns how many mutations they had."""
        gone = bisect_right(self.chunks, upto, key=_last)
        freed = self.chunks[:gone]
        if freed:
            self.base += gone
            self.freed = self.end if gone == len(self.chunks) else freed[-1].rows.last
            del self.chunks[:gone]
            self._count(-sum(chunk.bytes for chunk in freed))
            for chunk in freed:
                chunk.leave(self._leaving)
        return sum(chunk.live for chunk in freed)

    def free(self) -> int:
        """Free everything; returns the bytes freed."""
        won = self.bytes
        self._count(-won)
        self.linked = False
        for chunk in self.chunks:
            chunk.leave(self._leaving)
        self.chunks = []
        self._index = {}
        return won

    def find(self, after: int) -> tuple[int, int]:
        """The first mutation above `after`: the number of its chunk, counting freed ones, and its row.

        The number is that of no chunk if it has none.
        """
        number = bisect_right(self.chunks, after, key=_last)
        if number == len(self.chunks) or after < self.chunks[number].first:
            return self.base + number, 0
        row = int(np.searchsorted(self.chunks[number].rows.seqnos, after, side="right"))
        return self.base + number, row

    def rows_above(self, after: int) -> int:
        """The number of its mutations above `after`; all or none of an evicted snapshot."""
        if self.evicted or after < self.start:
            return self.rows if after < self.end else 0
        number = bisect_right(self.chunks, after, key=_last)
        if number == len(self.chunks):
            return 0
        row = int(np.searchsorted(self.chunks[number].rows.seqnos, after, side="right"))
        return len(self.chunks[number].rows) - row + sum(chunk.live for chunk in self.chunks[number + 1 :])

    # The index

    def _put(self, rows: MutationBatch) -> int:
        index = self._index
        keys = rows.messages.keys.to_list()
        latest: dict[bytes | None, int] = dict(zip(keys, rows.seqnos.tolist(), strict=True))
        latest.pop(None, None)
        chunk = Chunk(rows)
        replaced = 0
        if len(latest) < len(keys):
            replaced = chunk.keep(_newest(rows, keys, latest.values()))
        common = index.keys() & latest.keys()
        if common:
            replaced += len(common)
            self._replace(sorted(map(index.__getitem__, common)))
            self._key_bytes -= sum(map(len, filter(None, common)))
        index.update(latest)
        self._key_bytes += sum(map(len, filter(None, latest)))
        self._count_index()
        self._add(chunk)
        return replaced

    def _ensure_index(self) -> None:
        if self._indexed:
            return
        self._indexed = True
        for chunk in self.chunks:
            rows = chunk.living()
            keys = rows.messages.keys.to_list()
            self._index.update(zip(keys, rows.seqnos.tolist(), strict=True))
        self._index.pop(None, None)
        self._key_bytes = sum(map(len, filter(None, self._index)))
        self._count_index()

    def _count_index(self) -> None:
        size = index_bytes(self._index, self._key_bytes)
        self._count(size - self.index_bytes)
        self.index_bytes = size

    # Chunks

    def _add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.rows += chunk.live
        self._count(chunk.bytes)
        if len(self.chunks) % TOGETHER == 0:
            self._join(len(self.chunks) - TOGETHER)

    def _replace(self, seqnos: list[int]) -> None:
        """Remove replaced mutations; chunks with few left are packed, empty ones removed."""
        self.rows -= len(seqnos)
        stop = len(seqnos)
        while stop:  # from the back, so that removing a chunk moves none that is still to be visited
            number = bisect_right(self.chunks, seqnos[stop - 1], key=_first) - 1
            chunk = self.chunks[number]
            start = bisect_left(seqnos, chunk.first, 0, stop)
            chunk.replace(seqnos[start:stop])
            stop = start
            if not chunk.live:
                self._count(-chunk.bytes)
                del self.chunks[number]
            elif chunk.live * 2 <= len(chunk.rows):
                self._count(-chunk.pack())

    def _join(self, start: int) -> None:
        before = sum(chunk.bytes for chunk in self.chunks[start:])
        self.chunks[start:] = join_tiny(self.chunks[start:])
        self._count(sum(chunk.bytes for chunk in self.chunks[start:]) - before)

    def _count(self, more: int) -> None:
        self.bytes += more
        self._account.add(more)


def index_bytes(index: dict[bytes | None, int], key_bytes: int) -> int:
    """Bytes of memory of an index whose keys have `key_bytes` bytes together."""
    return sys.getsizeof(index) + key_bytes + len(index) * ENTRY_BYTES if index else 0


def _newest(rows: MutationBatch, keys: list[bytes | None], latest: Collection[int]) -> NDArray[np.bool_]:
    """bool[n]: the mutations that have one of the seqnos `latest`, or no key."""
    alive = rows.messages.keys.absent_mask().copy() if None in keys else np.zeros(len(rows), np.bool_)
    alive[np.searchsorted(rows.seqnos, np.fromiter(latest, np.int64, len(latest)))] = True
    return alive


@dataclass(slots=True)
class ChainCounters:
    """Counts since the start of the chain: mutations queued, and removed for each reason."""

    queued: int = 0
    deduplicated: int = 0
    snapshots_removed: int = 0
    snapshots_collapsed: int = 0
    snapshots_evicted: int = 0
    items_expelled: int = 0
    bytes_removed: int = 0
    bytes_expelled: int = 0
    bytes_evicted: int = 0


class Chain:
    """The snapshots of a topic. `high`: last seqno queued. `limit`: bytes at which an open snapshot is closed.

    `compacted_to`: the log may lack a mutation up to this seqno if a newer one of its key is at or below it.
    """

    __slots__ = ("account", "compacted_to", "counters", "leaving", "limit", "oldest", "open")

    def __init__(self, high: int, limit: int, account: MemoryAccount, leaving: MemoryAccount) -> None:
        self.account = account
        self.leaving = leaving
        self.limit = limit
        self.compacted_to = 0
        self.counters = ChainCounters()
        self.open = self.oldest = MutationSnapshot(high + 1, account, leaving)

    def __iter__(self) -> Iterator[MutationSnapshot]:
        snapshot: MutationSnapshot | None = self.oldest
        while snapshot is not None:
            yield snapshot
            snapshot = snapshot.newer

    @property
    def high(self) -> int:
        return self.open.end

    def append(self, rows: MutationBatch) -> bool:
        """Queue mutations that follow `high`; returns whether cursors waited for them."""
        if not self.open.empty and self.open.bytes >= self.limit:
            self.settle(self.close())
        waited_for = self.open.pins > 0 or self.open.persistence
        self.counters.queued += len(rows)
        self.counters.deduplicated += self.open.append(rows, last=waited_for)
        if waited_for:
            self.close()
        return waited_for

    def close(self) -> MutationSnapshot:
        """Close the open snapshot, which must have mutations, and open another one; returns the closed one."""
        closed = self.open
        closed.seal()
        closed.closed = True
        self.open = MutationSnapshot(closed.end + 1, self.account, self.leaving)
        self.open.older = closed
        closed.newer = self.open
        return closed

    # Cursors

    def pin(self, snapshot: MutationSnapshot) -> None:
        """A cursor enters a snapshot; mutations are no longer added to it."""
        if snapshot is self.open and not snapshot.empty:
            self.close()
        if snapshot.closed:
            snapshot.seal()
        snapshot.pins += 1

    def find(self, seqno: int) -> MutationSnapshot | None:
        """The snapshot whose range has the seqno; None if it is before the oldest, the open one if it is after all."""
        if seqno < self.oldest.start:
            return None
        snapshot = self.open  # from the newest on, as most cursors are nearly up to date
        while snapshot.start > seqno and snapshot.older is not None:
            snapshot = snapshot.older
        return snapshot

    def place(self, after: int, floor: int) -> tuple[int, MutationSnapshot]:
        """Where a cursor with all mutations up to `after` continues: the seqno up to which it must first read the log
        (`after` if it need not), and the snapshot in memory. The first snapshot that it reads ends at or above `floor`,
        and at or above `compacted_to` if it reads the log.
        """
        snapshot = self.find(after + 1) or self.oldest
        passed = not snapshot.empty and after == snapshot.end
        if not (snapshot.evicted or passed) and after >= snapshot.freed and snapshot.end >= floor:
            return after, snapshot
        last = max(after, floor, self.compacted_to)
        snapshot = self.find(last + 1) or self.oldest
        while snapshot.newer is not None and (snapshot.evicted or snapshot.freed >= snapshot.end):
            snapshot = snapshot.newer
        if snapshot is self.open and not snapshot.empty and last >= snapshot.end:
            self.close()
            snapshot = self.open
        return max(last, snapshot.freed), snapshot

    # Snapshots without cursors

    def settle(self, snapshot: MutationSnapshot) -> None:
        """Called when a snapshot was closed or lost a cursor: free unused snapshots, collapse adjacent ones."""
        self.free()
        if snapshot.linked and snapshot is not self.open:
            self._collapse_around(snapshot)

    def free(self) -> None:
        """Free the oldest snapshots that no cursor needs, and what all cursors in the next one have passed."""
        oldest = self.oldest
        while oldest is not self.open and not oldest.pins and not oldest.persistence and oldest.newer is not None:
            self.oldest = oldest.newer
            self.oldest.older = None
            self.counters.snapshots_removed += 1
            self.counters.bytes_removed += oldest.free()
            oldest = self.oldest
        if oldest.pins and oldest.passed == oldest.pins:
            self.expel(oldest.end)

    def expel(self, upto: int) -> None:
        """Free the chunks of the oldest snapshot without mutations above `upto`."""
        before = self.oldest.bytes
        self.counters.items_expelled += self.oldest.free_head(upto)
        self.counters.bytes_expelled += before - self.oldest.bytes

    def collapse_all(self) -> None:
        """Collapse adjacent snapshots wherever possible, also if only replaced mutations keep them below `limit`."""
        snapshot = self.oldest
        while snapshot.newer is not None:
            newer = snapshot.newer
            if not self._collapse(snapshot, newer, try_overlap=True):
                snapshot = newer

    def drop_indexes(self) -> None:
        """Free the indexes of closed snapshots, which make collapsing faster."""
        for snapshot in self:
            if snapshot.closed:
                snapshot.seal()

    def evict(self, goal: int) -> None:
        """Evict snapshots without cursors, the newest first, until `goal` bytes are freed.

        Slow cursors need the newest last. The open one is closed and evicted at the end.
        """
        target = self.account.bytes - goal
        snapshot = self.open.older
        while snapshot is not None and self.account.bytes > target:
            older = snapshot.older
            self._evict(snapshot)
            snapshot = older
        if self.account.bytes > target and not self.open.empty:
            self._evict(self.close())
            self.free()

    def _evict(self, snapshot: MutationSnapshot) -> None:
        if snapshot.pins or snapshot.evicted:
            return
        self.counters.snapshots_evicted += 1
        self.counters.bytes_evicted += snapshot.evict()
        self._collapse_around(snapshot)

    def _collapse_around(self, snapshot: MutationSnapshot) -> None:
        if snapshot.newer is not None:
            self._collapse(snapshot, snapshot.newer)
        if snapshot.older is not None:
            self._collapse(snapshot.older, snapshot)

    def _collapse(self, older: MutationSnapshot, newer: MutationSnapshot, *, try_overlap: bool = False) -> bool:
        if not (_free_to_collapse(older) and _free_to_collapse(newer)) or older.evicted != newer.evicted:
            return False
        if older.evicted:
            older.absorb_evicted(newer)
        else:
            together = older.bytes - older.index_bytes + newer.bytes - newer.index_bytes
            if together > self.limit and not (try_overlap and together - older.overlap(newer) <= self.limit):
                return False
            self.counters.deduplicated += older.absorb(newer)
        older.newer = newer.newer
        if newer.newer is not None:
            newer.newer.older = older
        newer.free()
        self.counters.snapshots_collapsed += 1
        return True


def _free_to_collapse(snapshot: MutationSnapshot) -> bool:
    return snapshot.closed and not snapshot.pins and not snapshot.persistence
