"""The chain of a topic's snapshots in memory, oldest first, each following its predecessor without a gap.

- The newest snapshot is open: mutations are queued there, and a newer mutation of a key replaces the older one.
- When a cursor enters an open snapshot with mutations, the snapshot is closed and a new one is opened. Cursors wait in
  an empty one: the next mutations close it at once, and all its cursors begin it.
- The oldest snapshot is freed as soon as it has no cursor.
- Two adjacent closed snapshots without cursors collapse into one, which keeps the newest mutation of each key, unless
  it would be larger than `limit` bytes.
- A snapshot may be evicted: it keeps its place and its range, and its mutations are read from the log.

One thread owns all snapshots of a topic, so collapsing two needs no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.snapshot import MemoryAccount, MutationSnapshot


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
    """The snapshots of a topic. `high`: last seqno queued. `limit`: bytes at which an open snapshot is closed."""

    __slots__ = ("account", "counters", "leaving", "limit", "oldest", "open")

    def __init__(self, high: int, limit: int, account: MemoryAccount, leaving: MemoryAccount) -> None:
        self.account = account
        self.leaving = leaving
        self.limit = limit
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
        if self.open.rows and self.open.bytes >= self.limit:
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
        if snapshot is self.open and snapshot.rows:
            self.close()
        if snapshot.closed:
            snapshot.seal()
        snapshot.pins += 1

    def unpin(self, snapshot: MutationSnapshot) -> None:
        """A cursor leaves a snapshot."""
        snapshot.pins -= 1
        self.settle(snapshot)

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
        (`after` if it need not), and the snapshot in memory. The first snapshot that it reads ends at or above `floor`.
        """
        snapshot = self.find(after + 1) or self.oldest
        passed = snapshot.rows > 0 and after == snapshot.end
        if not (snapshot.evicted or passed) and after >= snapshot.freed and snapshot.end >= floor:
            return after, snapshot
        last = max(after, floor)
        snapshot = self.find(last + 1) or self.oldest
        while snapshot.newer is not None and (snapshot.evicted or snapshot.freed >= snapshot.end):
            snapshot = snapshot.newer
        if snapshot is self.open and snapshot.rows and last >= snapshot.end:
            self.close()
            snapshot = self.open
        return max(last, snapshot.freed), snapshot

    # Snapshots without cursors

    def settle(self, snapshot: MutationSnapshot) -> None:
        """Called when a snapshot was closed or lost a cursor: free unused snapshots, collapse adjacent ones."""
        self.free()
        if not snapshot.linked or snapshot is self.open:
            return
        if snapshot.newer is not None:
            self._collapse(snapshot, snapshot.newer, self.limit)
        if snapshot.older is not None:
            self._collapse(snapshot.older, snapshot, self.limit)

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
            if not self._collapse(snapshot, newer, self.limit, try_overlap=True):
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
        if self.account.bytes > target and self.open.rows:
            self._evict(self.close())
            self.free()

    def _evict(self, snapshot: MutationSnapshot) -> None:
        if snapshot.pins or snapshot.evicted:
            return
        self.counters.snapshots_evicted += 1
        self.counters.bytes_evicted += snapshot.evict()
        if snapshot.newer is not None:
            self._collapse(snapshot, snapshot.newer, self.limit)
        if snapshot.older is not None:
            self._collapse(snapshot.older, snapshot, self.limit)

    def _collapse(
        self, older: MutationSnapshot, newer: MutationSnapshot, limit: int, *, try_overlap: bool = False
    ) -> bool:
        if not (_free_to_collapse(older) and _free_to_collapse(newer)) or older.evicted != newer.evicted:
            return False
        if older.evicted:
            older.absorb_evicted(newer)
        else:
            together = older.bytes - older.index_bytes + newer.bytes - newer.index_bytes
            if together > limit and not (try_overlap and together - older.overlap(newer) <= limit):
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
