"""The mutation manager of one topic: its visible mutations for any number of cursors, in order and without repeats.

Mutations are queued once. Snapshots in memory serve cursors that are nearly up to date; the others read the log. The
manager has neither clock nor input or output: `take_effects` returns the reads of the log that it requests and the
cursors to wake, and `backfilled` takes the answers. One thread owns it.

The persistence cursor is part of it and never dropped: `persist` moves it through all snapshots and adds them to the
index, by which a backfill finds its place in the log. It needs the bounds of snapshots, not their mutations, so it
keeps no evicted mutations in memory however late it is.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from txnbuffer.errors import InvalidRequest, MutationsTrimmed, SeqnoGap
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.chain import Chain
from txnbuffer.mutations.cursor import Backfill, Cursor
from txnbuffer.mutations.index import SnapshotAnchor, SnapshotIndex, SnapshotIndexEntry
from txnbuffer.mutations.snapshot import MemoryAccount
from txnbuffer.mutations.statistics import PERSISTENCE, CursorStatistics, ManagerStatistics, of_cursor, of_persistence


class ReadLog(NamedTuple):
    """Read the visible mutations from `first` on, up to `last`, and answer with `backfilled(ticket, ...)`.

    The answer holds those from `first` on without a gap, at least one, with keys and values of about
    `max_bytes` together; the rest is asked for when there is room. `anchor` is where reading can begin if
    nothing nearer is known, None for the beginning of the log. Whoever reads may let requests wait.
    """

    ticket: int
    cursor: str
    first: int
    last: int
    anchor: SnapshotAnchor | None
    max_bytes: int


class StopReading(NamedTuple):
    """The answer of this ticket is no longer needed."""

    ticket: int


class Wake(NamedTuple):
    """A cursor that had nothing to give has something now, or has failed."""

    cursor: str


Effect: TypeAlias = ReadLog | StopReading | Wake


MAX_SNAPSHOT_BYTES = 8 * 1024 * 1024
BACKFILL_BYTES = 16 * 1024 * 1024


class MutationManager:
    """Mutations up to `high` are in the log and none in memory yet; those below `first_seqno` are gone.

    `max_snapshot_bytes` and `backfill_bytes` (for each cursor) are soft: one batch may go beyond. The
    second has to be twice the first, so that what is left of a snapshot always fits. Bytes are added to
    `account`.
    """

    def __init__(
        self,
        high: int = 0,
        *,
        first_seqno: int = 1,
        index: SnapshotIndex | None = None,
        max_snapshot_bytes: int = MAX_SNAPSHOT_BYTES,
        backfill_bytes: int = BACKFILL_BYTES,
        account: MemoryAccount | None = None,
    ) -> None:
        self.account = MemoryAccount(account)
        self.leaving = MemoryAccount(self.account)
        self.index = index or SnapshotIndex()
        self.first_seqno = first_seqno
        self.backfill_bytes = backfill_bytes
        self.chain = Chain(high, max_snapshot_bytes, MemoryAccount(self.account), self.leaving)
        self.cursors: dict[str, Cursor] = {}
        self.cursors_dropped = 0
        self.backfills = MemoryAccount(self.account)
        self.persistence = self.chain.open
        self.persistence.persistence = True
        self._requests: dict[int, Cursor] = {}
        self._last_ticket = 0
        self._effects: list[Effect] = []

    @property
    def high(self) -> int:
        """The last seqno queued."""
        return self.chain.high

    # Inputs

    def queue_many(self, rows: MutationBatch) -> None:
        """Queue mutations that follow `high` without a gap. Raises SeqnoGap, and queues none, if they do not."""
        if not len(rows):
            return
        if rows.first != self.high + 1 or not rows.dense():
            raise SeqnoGap(
                f"mutations {rows.first} to {rows.last} ({len(rows)}) do not follow {self.high} without a gap"
            )
        for part in rows.parts(self.chain.limit):
            if self.chain.append(part.owned()):
                self._wake_waiting()

    def register(self, name: str, after: int, *, end: int | None = None, snapshot_end: int = 0) -> Cursor:
        """A cursor for a reader that has all mutations up to `after`; it replaces a cursor of the same name.

        `end`: the last seqno wanted; the snapshot that holds it is given whole. `snapshot_end`: the end of the
        snapshot in the middle of which `after` is, so that the first one given does not end before. Raises
        InvalidRequest if either lies above `high`, MutationsTrimmed if what follows `after` is gone; 0 asks for
        whatever there is.
        """
        if not 0 <= after <= self.high or snapshot_end > self.high:
            asked = max(after, snapshot_end)
            raise InvalidRequest(f"cursor {name!r} can't start at {asked}: the topic ends at {self.high}")
        if name == PERSISTENCE:
            raise InvalidRequest(f"{name!r} is the name of the persistence cursor: choose another name")
        if after == 0:
            after = self.first_seqno - 1
        elif after + 1 < self.first_seqno:
            raise MutationsTrimmed(after + 1, self.first_seqno)
        cursor = Cursor(self, name, after, end, snapshot_end if snapshot_end > after else 0)
        cursor.enter()
        if (former := self.cursors.get(name)) is not None:
            former.close()
        self.cursors[name] = cursor
        return cursor

    def persist(self) -> list[SnapshotIndexEntry]:
        """Take the persistence cursor to the end, closing the open snapshot; what this added to the index."""
        if self.chain.open.rows:
            self.chain.close()
        added: list[SnapshotIndexEntry] = []
        left = snapshot = self.persistence
        while snapshot.newer is not None:
            entry = SnapshotIndexEntry(
                snapshot.start, snapshot.end, snapshot.first_position, snapshot.last_position, snapshot.rows
            )
            self.index.add(entry)
            added.append(entry)
            snapshot = snapshot.newer
        if added:
            left.persistence = False
            snapshot.persistence = True
            self.persistence = snapshot
            self.chain.settle(left)
        return added

    def trim(self, first_seqno: int) -> None:
        """The log begins with a seqno: nothing below it can be read any more."""
        if first_seqno > self.first_seqno:
            self.first_seqno = first_seqno
            self.index.trim(first_seqno)

    def backfilled(self, ticket: int, rows: MutationBatch) -> None:
        """The answer to a `ReadLog`; it is ignored if no cursor waits for it.

        Raises SeqnoGap, which the cursor then raises too, if the mutations are not those asked for.
        """
        cursor = self._requests.pop(ticket, None)
        if cursor is None or cursor.backfill is None:
            return
        backfill = cursor.backfill
        backfill.ticket = None
        if not len(rows) or rows.first != backfill.next or rows.last > backfill.last or not rows.dense():
            got = f"{rows.first} to {rows.last} ({len(rows)})" if len(rows) else "none"
            cursor.error = SeqnoGap(f"the log returned {got} instead of mutations {backfill.next} to {backfill.last}")
            self._wake(cursor)
            raise cursor.error
        backfill.feed(rows)
        if backfill.ready:
            self._wake(cursor)
        self.demand(cursor, backfill)

    def backfill_failed(self, ticket: int, error: Exception) -> None:
        """A `ReadLog` can't be answered: its cursor raises `error` from now on, once it gave what it has."""
        cursor = self._requests.pop(ticket, None)
        if cursor is not None and cursor.backfill is not None:
            cursor.backfill.ticket = None
            self._fail(cursor, error)

    def take_effects(self) -> list[Effect]:
        """What has to be done since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # Freeing memory; `account` shows how much was freed

    def free_passed(self) -> None:
        """Let go of what all cursors have passed, and of indexes that only make collapsing faster."""
        chain = self.chain
        inside = [cursor.after for cursor in self.cursors.values() if cursor.pin is chain.oldest]
        if inside:
            chain.expel(min(inside))
        chain.drop_indexes()

    def collapse(self) -> None:
        """Take neighbouring snapshots without cursors together wherever that makes one of the usual size."""
        self.chain.collapse_all()
        self.chain.drop_indexes()

    def evict(self, goal: int) -> None:
        """Let go of mutations that the log has and no cursor is at, until so many bytes are won."""
        self.chain.evict(goal)

    def drop_cursors(self, goal: int) -> None:
        """Send cursors to the log, the slowest first, until so many bytes are won.

        Never the persistence cursor, and no cursor at or after its position: that would free nothing.
        """
        memory = self.chain.account
        target = memory.bytes - goal
        slowest = sorted(self.cursors.values(), key=lambda cursor: cursor.pin.start if cursor.pin else -1)
        for cursor in slowest:
            if memory.bytes <= target:
                return
            if cursor.pin is not None and cursor.pin.start < self.persistence.start:
                self.drop_cursor(cursor)

    def drop_cursor(self, cursor: Cursor) -> None:
        """Send one cursor to the log; its reader does not notice."""
        if cursor.drop():
            self.cursors_dropped += 1
            self._wake(cursor)

    # Called by cursors

    def new_backfill(self, first: int, last: int, floor: int) -> Backfill:
        return Backfill(first, last, floor, self.backfill_bytes, self.backfills, self.leaving)

    def demand(self, cursor: Cursor, backfill: Backfill) -> None:
        """Ask the log for what there is room for."""
        wanted = backfill.wanted()
        if not wanted:
            return
        if backfill.next < self.first_seqno:
            self._fail(cursor, MutationsTrimmed(backfill.next, self.first_seqno))
            return
        self._last_ticket += 1
        backfill.ticket = self._last_ticket
        self._requests[backfill.ticket] = cursor
        anchor = self.anchor(backfill.next)
        self._effects.append(ReadLog(backfill.ticket, cursor.name, backfill.next, backfill.last, anchor, wanted))

    def end_backfill(self, backfill: Backfill) -> None:
        """Nobody reads from it any more."""
        if backfill.ticket is not None:
            del self._requests[backfill.ticket]
            self._effects.append(StopReading(backfill.ticket))
        backfill.close()

    def forget(self, cursor: Cursor) -> None:
        """A cursor was closed."""
        cursor.release()
        if self.cursors.get(cursor.name) is cursor:
            del self.cursors[cursor.name]

    # Queries

    def anchor(self, seqno: int) -> SnapshotAnchor | None:
        """The highest mutation known at or below a seqno, where a read that is to reach it can begin."""
        snapshot = self.chain.find(seqno)
        if snapshot is not None and snapshot.rows:
            return SnapshotAnchor(snapshot.start, snapshot.first_position)
        return self.index.anchor(seqno)

    def statistics(self) -> ManagerStatistics:
        chain = self.chain
        counters = chain.counters
        snapshots = list(chain)
        return ManagerStatistics(
            chain.high,
            chain.open.start,
            len(snapshots),
            sum(chunk.live for snapshot in snapshots for chunk in snapshot.chunks),
            chain.account.bytes,
            sum(snapshot.index_bytes for snapshot in snapshots),
            self.backfills.bytes,
            self.leaving.bytes,
            len(self.cursors),
            len(self.index),
            counters.queued,
            counters.deduplicated,
            counters.snapshots_removed,
            counters.snapshots_collapsed,
            counters.snapshots_evicted,
            counters.items_expelled,
            counters.bytes_removed,
            counters.bytes_expelled,
            counters.bytes_evicted,
            self.cursors_dropped,
        )

    def cursor_statistics(self) -> list[CursorStatistics]:
        """Of each cursor, in the order of their registration, the persistence cursor first."""
        return [of_persistence(self.persistence), *(of_cursor(cursor, self.high) for cursor in self.cursors.values())]

    # Waking cursors

    def _wake_waiting(self) -> None:
        for cursor in self.cursors.values():
            if cursor.waiting and cursor.backfill is None:
                self._wake(cursor)

    def _wake(self, cursor: Cursor) -> None:
        if cursor.waiting:
            cursor.waiting = False
            self._effects.append(Wake(cursor.name))

    def _fail(self, cursor: Cursor, error: Exception) -> None:
        cursor.error = error
        self._wake(cursor)
