"""The mutation manager of one topic, which gives its visible mutations to cursors, and the memory of all managers.

A cursor gets the mutations in order and without repeats. Mutations are queued once. Snapshots in memory serve cursors
that are nearly up to date; the others read the log. The manager has neither clock nor input or output: `take_effects`
returns the reads of the log that it requests and the cursors to wake, and `backfilled` takes the answers. One thread
owns it.

The persistence cursor is part of it and never dropped: `persist` moves it through all snapshots and adds them to the
index, by which a backfill finds its place in the log. It needs the bounds of snapshots, not their mutations, so it
keeps no evicted mutations in memory however late it is. The buffer's snapshot stores the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeAlias

from txnbuffer.errors import InvalidRequest, MutationsTrimmed, SeqnoGap
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.cursor import UNLIMITED, Backfill, BackfillMemory, Cursor
from txnbuffer.mutations.index import SnapshotAnchor, SnapshotIndex, SnapshotIndexEntry
from txnbuffer.mutations.snapshot import Chain, MemoryAccount, MutationSnapshot

PERSISTENCE = "persistence"
"""The name of the persistence cursor in statistics; other cursors can't use it."""


class CursorStatistics(NamedTuple):
    """Statistics of one cursor.

    `snapshot_start`: start of the snapshot in memory where it has its place, None without one. `last_read_seqno`: it
    has returned everything up to it. `items_remaining`: mutations still to come; those in the log are counted by their
    seqnos, so this is an upper bound. `backfill_items`: mutations read in the current backfill; `backfill_held` of
    them, in `backfill_bytes` bytes, are not taken yet. `drops`: how often it lost its place.
    """

    name: str
    snapshot_start: int | None
    last_read_seqno: int
    end_seqno: int | None
    items_sent: int
    items_remaining: int
    waiting: bool = False
    drops: int = 0
    backfilling: bool = False
    backfill_items: int = 0
    backfill_held: int = 0
    backfill_bytes: int = 0


class ManagerStatistics(NamedTuple):
    """Statistics of a topic's manager: bytes and items are those in memory; counts from `queued` on are totals."""

    high_seqno: int
    open_snapshot_start: int
    snapshots: int
    items: int
    memory_bytes: int
    index_bytes: int
    backfill_bytes: int
    leaving_bytes: int
    cursors: int
    index_entries: int
    queued: int
    deduplicated: int
    snapshots_removed: int
    snapshots_collapsed: int
    snapshots_evicted: int
    items_expelled: int
    bytes_removed: int
    bytes_expelled: int
    bytes_evicted: int
    cursors_dropped: int


def of_cursor(cursor: Cursor, high: int) -> CursorStatistics:
    backfill = cursor.backfill
    return CursorStatistics(
        cursor.name,
        None if cursor.pin is None else cursor.pin.start,
        cursor.after,
        cursor.end,
        cursor.items_sent,
        _remaining(cursor, high),
        cursor.waiting,
        cursor.drops,
        *(() if backfill is None else (True, backfill.items, _rows_in(backfill), backfill.bytes)),
    )


def _rows_in(backfill: Backfill) -> int:
    """The number of mutations read and not taken yet."""
    return sum(snapshot.rows for snapshot in backfill.snapshots)


def _remaining(cursor: Cursor, high: int) -> int:
    reading, backfill, pin = cursor.reading, cursor.backfill, cursor.pin
    after, items = cursor.after, 0
    if reading is not None and reading is not pin:
        items += reading.rows_above(after)
        after = reading.end
    if backfill is not None:
        items += _rows_in(backfill) + backfill.last - backfill.next + 1
        after = backfill.last
    return items + (high - after if pin is None else _from(pin, after))


def _from(snapshot: MutationSnapshot | None, after: int) -> int:
    """The number of mutations above `after`, from a snapshot on."""
    items = 0
    while snapshot is not None:
        items += snapshot.rows_above(after)
        snapshot = snapshot.newer
    return items


class ReadLog(NamedTuple):
    """Read the visible mutations from `first` on, up to `last`, and answer with `backfilled(ticket, ...)`.

    The answer has those from `first` on without a gap, at least one, with keys and values of about `max_bytes`
    together; the rest is requested when there is room. Reading can begin at `anchor` if no nearer position is known;
    None: at the beginning of the log. Requests may be answered later, in any order.
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
    """A cursor that had no mutations now has some, or has failed."""

    cursor: str


Effect: TypeAlias = ReadLog | StopReading | Wake


MAX_SNAPSHOT_BYTES = 8 * 1024 * 1024
BACKFILL_BYTES = 16 * 1024 * 1024


class MutationManager:
    """The manager of one topic. At its start mutations `first_seqno` to `high` are in the log, and none in memory.

    `max_snapshot_bytes` and `backfill_bytes` (for each cursor) are soft limits, which one batch may exceed. The
    second must be twice the first, so that the rest of a snapshot always fits. Bytes are added to `account`. All
    backfills share `backfill_memory`.
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
        backfill_memory: BackfillMemory | None = None,
    ) -> None:
        self.account = MemoryAccount(account)
        self.leaving = MemoryAccount(self.account)
        self.index = index or SnapshotIndex()
        self.first_seqno = first_seqno
        self.backfill_bytes = backfill_bytes
        self.backfill_memory = backfill_memory or BackfillMemory(UNLIMITED)
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
        """Queue mutations that follow `high` without a gap. Otherwise raises SeqnoGap, and queues none."""
        if not len(rows):
            return
        if rows.first != self.high + 1 or not rows.dense():
            raise SeqnoGap(
                f"mutations {rows.first} to {rows.last} ({len(rows)}) do not follow {self.high} without a gap"
            )
        for part in rows.parts(self.chain.limit):
            if self.chain.append(part.owned()):
                for cursor in self.cursors.values():
                    if cursor.backfill is None:
                        self._wake(cursor)

    def register(self, name: str, after: int, *, end: int | None = None, snapshot_end: int = 0) -> Cursor:
        """A cursor for a reader that has all mutations up to `after`; it replaces a cursor of the same name.

        `end`: the last seqno wanted; the snapshot that contains it is returned whole. `snapshot_end`: the end of the
        snapshot that contains `after`; the first one returned ends there, or later if memory has collapsed it.
        `after` 0 starts at the oldest mutation. Raises InvalidRequest if a seqno is above `high`, MutationsTrimmed if
        the next mutation was trimmed.
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
        """Move the persistence cursor to the end, closing the open snapshot; the entries added to the index."""
        if not self.chain.open.empty:
            self.chain.close()
        added: list[SnapshotIndexEntry] = []
        left = snapshot = self.persistence
        while snapshot.newer is not None:
            rows = max(snapshot.rows, 1)  # all may be emptied; an entry has at least one
            entry = SnapshotIndexEntry(
                snapshot.start, snapshot.end, snapshot.first_position, snapshot.last_position, rows
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
        """The log now begins with `first_seqno`; mutations below it can't be read."""
        if first_seqno > self.first_seqno:
            self.first_seqno = first_seqno
            self.index.trim(first_seqno)

    def compacted(self, seqno: int) -> None:
        """The log may be compacted up to a seqno from now on: `compacted_to` grows to it. Call it before that.

        Above `compaction_bound()` some streams must begin the snapshot that they are in again, with a later end.
        """
        seqno = min(seqno, self.high)
        if seqno > self.chain.compacted_to:
            self.chain.compacted_to = seqno
            self.read_again(seqno)

    def read_again(self, upto: int) -> None:
        """The log has changed up to a seqno: free what backfills have read of it and nobody has taken."""
        for cursor in self.cursors.values():
            if cursor.backfill is not None and cursor.after < min(upto, cursor.backfill.last):
                cursor.read_again()
                self._wake(cursor)

    def backfilled(self, ticket: int, rows: MutationBatch) -> None:
        """The answer to a `ReadLog`; it is ignored if no cursor waits for it.

        Raises SeqnoGap, as the cursor does from then on, if the mutations are not those requested.
        """
        cursor = self._requests.pop(ticket, None)
        if cursor is None or cursor.backfill is None:
            return
        backfill = cursor.backfill
        backfill.ticket = None
        if not len(rows) or rows.first != backfill.next or rows.last > backfill.stop or not rows.dense():
            got = f"{rows.first} to {rows.last} ({len(rows)})" if len(rows) else "none"
            cursor.error = SeqnoGap(f"the log returned {got} instead of mutations {backfill.next} to {backfill.stop}")
            self._wake(cursor)
            raise cursor.error
        backfill.feed(rows)
        if backfill.ready:
            self._wake(cursor)
        self.demand(cursor, backfill)

    def backfill_failed(self, ticket: int, error: Exception) -> None:
        """A `ReadLog` failed: its cursor raises `error` after the mutations that it has."""
        cursor = self._requests.pop(ticket, None)
        if cursor is not None and cursor.backfill is not None:
            cursor.backfill.ticket = None
            self._fail(cursor, error)

    def take_effects(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # Freeing memory; `account` shows how much was freed

    def free_passed(self) -> None:
        """Free what all cursors have passed, and the indexes that make collapsing faster."""
        chain = self.chain
        inside = [cursor.after for cursor in self.cursors.values() if cursor.pin is chain.oldest]
        if inside:
            chain.expel(min(inside))
        chain.drop_indexes()

    def collapse(self) -> None:
        """Collapse adjacent snapshots without cursors wherever the result is not too large."""
        self.chain.collapse_all()
        self.chain.drop_indexes()

    def evict(self, goal: int) -> None:
        """Evict snapshots that the log has and no cursor is in, until `goal` bytes are freed."""
        self.chain.evict(goal)

    def drop_cursors(self, goal: int) -> None:
        """Make cursors read the log, the slowest first, until `goal` bytes are freed.

        The persistence cursor, and cursors at or after its position, are left: dropping them frees nothing.
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
        """Make a cursor read the log; its reader does not notice."""
        if cursor.drop():
            self.cursors_dropped += 1
            self._wake(cursor)

    # Called by cursors

    def new_backfill(self, first: int, last: int, floor: int, *, parts: bool) -> Backfill:
        memory = self.backfill_memory
        memory.active += 1
        return Backfill(first, last, floor, self.backfill_bytes, parts, memory, self.backfills, self.leaving)

    def demand(self, cursor: Cursor, backfill: Backfill) -> None:
        """Ask the log for what there is room for."""
        wanted = backfill.wanted()
        if not wanted:
            return
        if backfill.next < self.first_seqno:
            self._fail(cursor, MutationsTrimmed(backfill.next, self.first_seqno))
            return
        if not self.backfill_memory.begin_turn(cursor, backfill):
            return
        self._last_ticket += 1
        backfill.ticket = self._last_ticket
        self._requests[backfill.ticket] = cursor
        anchor = self.anchor(backfill.next)
        self._effects.append(ReadLog(backfill.ticket, cursor.name, backfill.next, backfill.stop, anchor, wanted))

    def end_backfill(self, backfill: Backfill) -> None:
        """A backfill is no longer used."""
        self.backfill_memory.active -= 1
        self.backfill_memory.leave(backfill)
        if backfill.ticket is not None:
            del self._requests[backfill.ticket]
            self._effects.append(StopReading(backfill.ticket))
        for snapshot in backfill.snapshots:
            snapshot.free()

    def forget(self, cursor: Cursor) -> None:
        """A cursor was closed."""
        cursor.release()
        if self.cursors.get(cursor.name) is cursor:
            del self.cursors[cursor.name]

    # Queries

    def anchor(self, seqno: int) -> SnapshotAnchor | None:
        """The highest mutation at or below `seqno` with a known position, where a read up to `seqno` can begin."""
        snapshot = self.chain.find(seqno)
        if snapshot is not None and not snapshot.empty:
            return SnapshotAnchor(snapshot.start, snapshot.first_position)
        return self.index.anchor(seqno)

    @property
    def compacted_to(self) -> int:
        """Seqno up to which the log may be compacted: a snapshot that is read from it ends at or above this one."""
        return self.chain.compacted_to

    def compaction_bound(self) -> int | None:
        """The lowest end of the snapshots that cursors have begun and are reading from the log; None without any."""
        begun = [one.snapshot[1] for one in self.cursors.values() if one.backfill is not None and one.snapshot]
        return min(begun, default=None)

    def statistics(self) -> ManagerStatistics:
        chain = self.chain
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
            **asdict(chain.counters),
            cursors_dropped=self.cursors_dropped,
        )

    def cursor_statistics(self) -> list[CursorStatistics]:
        """The statistics of each cursor, in the order of registration, the persistence cursor first."""
        start = self.persistence.start  # it has passed all snapshots before its own, and returns no items
        persistence = CursorStatistics(PERSISTENCE, start, start - 1, None, 0, _from(self.persistence, start - 1))
        return [persistence, *(of_cursor(cursor, self.high) for cursor in self.cursors.values())]

    # Waking cursors

    def _wake(self, cursor: Cursor) -> None:
        if cursor.waiting:
            cursor.waiting = False
            self._effects.append(Wake(cursor.name))

    def _fail(self, cursor: Cursor, error: Exception) -> None:
        cursor.error = error
        self._wake(cursor)


UPPER_MARK = 0.9
LOWER_MARK = 0.6
STEPS = 64
"""The budget in steps: memory that could not be freed is looked at again after each."""
SNAPSHOTS_PER_TOPIC = 10
MIN_SNAPSHOT_BYTES = 64 * 1024

Means: TypeAlias = Callable[[MutationManager, int], None]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Bytes freed by each step; `missing` is still to be freed to reach the lower mark."""

    passed: int = 0
    collapsed: int = 0
    evicted: int = 0
    dropped: int = 0
    missing: int = 0


class MemoryBudget:
    """The memory limit of all managers made with `account`, which sums their bytes; `budget` is in bytes.

    Above the upper mark memory is freed down to the lower mark. Each step is applied to all topics, the largest first,
    before the next step, so no cursor has to read the log while a cheaper step suffices:

    1. free what every cursor has passed, and the indexes that make collapsing faster;
    2. collapse adjacent snapshots in which newer mutations replace older ones;
    3. evict mutations that the log has and that no cursor needs next;
    4. make cursors read the log, the slowest first.

    Backfills are made with `backfill_memory`, half of the budget, so the steps are enough for the other half. If there
    are too many for it, they take turns.

    Memory that was freed while a reader still refers to it counts as freed.

    The steps look at all cursors. If they did not free enough, because cursors still need the rest, they would not
    free more a moment later: `due` is true again once there is more by a STEP.
    """

    __slots__ = ("_tolerated", "account", "backfill_memory", "budget", "lower", "managers", "upper")

    def __init__(self, budget: int, *, upper: float = UPPER_MARK, lower: float = LOWER_MARK) -> None:
        if not 0 < lower <= upper <= 1:
            raise ValueError(f"the marks must satisfy 0 < lower <= upper <= 1, got {lower} and {upper}")
        self.account = MemoryAccount()
        self.backfill_memory = BackfillMemory(0)
        self.managers: dict[str, MutationManager] = {}
        self.upper = upper
        self.lower = lower
        self._tolerated = 0
        self.resize(budget)

    def resize(self, budget: int) -> None:
        """Change the budget, and the size of snapshots accordingly."""
        self.budget = budget
        self.backfill_memory.bytes = budget // 2
        self._fit()

    def add(self, topic: str, manager: MutationManager) -> None:
        """Add the manager of a topic, which must have been made with this `account`."""
        self.managers[topic] = manager
        self._fit()

    def remove(self, topic: str) -> None:
        """Remove a manager whose cursors were all closed."""
        manager = self.managers.pop(topic)
        self.account.add(-manager.account.bytes)
        manager.account.parent = None
        self._fit()

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes at which each topic can have ten snapshots."""
        share = self.budget // max(1, len(self.managers)) // SNAPSHOTS_PER_TOPIC
        return min(max(share, MIN_SNAPSHOT_BYTES), MAX_SNAPSHOT_BYTES)

    @property
    def pressed(self) -> bool:
        """Whether more memory is used than the upper mark allows."""
        return self.account.bytes > self.budget * self.upper

    @property
    def due(self) -> bool:
        """Whether `recover` is likely to free memory."""
        if not self.pressed:
            self._tolerated = 0
            return False
        return self._in_use() > self._tolerated

    def recover(self) -> Recovery:
        """Free memory down to the lower mark if more is used than the upper mark allows."""
        if not self.pressed:
            return Recovery()
        passed = self._use(lambda manager, _: manager.free_passed())
        collapsed = self._use(lambda manager, _: manager.collapse())
        evicted = self._use(MutationManager.evict)
        dropped = self._use(MutationManager.drop_cursors)
        missing = max(0, self._missing())
        self._tolerated = self._in_use() + self.budget // STEPS if missing else 0
        return Recovery(passed, collapsed, evicted, dropped, missing)

    def _in_use(self) -> int:
        return self.account.bytes - sum(manager.leaving.bytes for manager in self.managers.values())

    def _missing(self) -> int:
        return self._in_use() - int(self.budget * self.lower)

    def _use(self, means: Means) -> int:
        before = self._missing()
        biggest = sorted(self.managers.values(), key=lambda manager: manager.chain.account.bytes, reverse=True)
        for manager in biggest:
            missing = self._missing()
            if missing <= 0:
                break
            means(manager, missing)
        return before - self._missing()

    def _fit(self) -> None:
        for manager in self.managers.values():
            manager.chain.limit = self.snapshot_bytes
