"""Cursors: each reads the mutations of a topic in order, snapshot by snapshot, from memory or from the log.

A cursor is in a snapshot in memory, or reads from its own backfill, or both: while it is older than what memory holds,
it keeps its place there and reads the log up to that place. If the place is dropped meanwhile to free memory, it finds
another one when the backfill ends, until memory has all missing mutations.

A backfill is a capped queue of snapshots, made from the mutations that the log returns. Its range may become several
snapshots. Each has every key once, as of its end, so it is returned only when its end is known: when the range ends, or
when it has half of the queue's cap. The log is read on demand, one request at a time, and only while there is room: a
queue has at most `cap` bytes and one answer. Only a snapshot with a given end (the rest of one that the reader has in
part) is completed whatever its size.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol, TypeAlias

from txnbuffer.mutations.batch import Mutation, MutationBatch
from txnbuffer.mutations.snapshot import Chain, Chunk, MemoryAccount, MutationSnapshot


class Backfill:
    """Mutations read from the log for one cursor: `next` to `last` are to come; no snapshot ends below `floor`.

    `ticket` is that of the pending request, None if there is none. `items` is the number of mutations read so far.
    """

    __slots__ = ("_account", "_building", "_leaving", "_ready", "cap", "floor", "items", "last", "next", "ticket")

    def __init__(
        self, first: int, last: int, floor: int, cap: int, account: MemoryAccount, leaving: MemoryAccount
    ) -> None:
        self.next = first
        self.last = last
        self.floor = floor
        self.cap = cap
        self.ticket: int | None = None
        self.items = 0
        self._account = account
        self._leaving = leaving
        self._ready: deque[MutationSnapshot] = deque()
        self._building: MutationSnapshot | None = None

    @property
    def exhausted(self) -> bool:
        """Whether the whole range was read and taken."""
        return self.next > self.last and not self._ready

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def bytes(self) -> int:
        """Bytes read and not taken yet."""
        building = 0 if self._building is None else self._building.bytes
        return building + sum(snapshot.bytes for snapshot in self._ready)

    @property
    def rows(self) -> int:
        """The number of mutations read and not taken yet."""
        building = 0 if self._building is None else self._building.rows
        return building + sum(snapshot.rows for snapshot in self._ready)

    def wanted(self) -> int:
        """Bytes to request from the log now, 0 if none."""
        if self.ticket is not None or self.next > self.last:
            return 0
        room = self.cap - self.bytes
        if room > 0:
            return room
        return 0 if self._ready else max(1, self.cap // 2)

    def feed(self, rows: MutationBatch) -> int:
        """Add an answer: mutations from `next` on, none above `last`; returns how many were replaced."""
        if self._building is None:
            self._building = MutationSnapshot(self.next, self._account, self._leaving)
        building = self._building
        self.items += len(rows)
        replaced = building.append(rows.owned())
        self.next = building.end + 1
        if self.next > self.last or (building.end >= self.floor and building.bytes * 2 >= self.cap):
            building.seal()
            building.closed = True
            self._ready.append(building)
            self._building = None
        return replaced

    def pop(self) -> MutationSnapshot | None:
        """The next snapshot, None if there is none yet; the caller must free it."""
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Free all memory."""
        for snapshot in self._ready:
            snapshot.free()
        self._ready.clear()
        if self._building is not None:
            self._building.free()
            self._building = None


UNLIMITED = 2**62


class SnapshotStart(NamedTuple):
    """A snapshot begins: until its end, each key occurs once, with its newest mutation of seqnos `start` to `end`."""

    start: int
    end: int


class CursorSnapshotEnd(NamedTuple):
    """The snapshot that ends with this seqno is complete."""

    end: int


Item: TypeAlias = SnapshotStart | Mutation | CursorSnapshotEnd


class Slice(NamedTuple):
    """Mutations of the snapshot `start` to `end`; `begins`: they are its first, `ends`: its last.

    The manager may reuse the memory of `rows` after the next `take`. There is at least one row, unless `next()` has
    returned the last mutation of a snapshot and not its end.
    """

    start: int
    end: int
    begins: bool
    ends: bool
    rows: MutationBatch


class CursorManager(Protocol):
    """The methods of the manager that cursors call."""

    @property
    def chain(self) -> Chain: ...

    def new_backfill(self, first: int, last: int, floor: int) -> Backfill: ...

    def demand(self, cursor: Cursor, backfill: Backfill) -> None:
        """Request from the log what the backfill has room for."""

    def end_backfill(self, backfill: Backfill) -> None:
        """Stop reading for a backfill that is no longer used."""

    def forget(self, cursor: Cursor) -> None:
        """Release a cursor that was closed."""


class Cursor:
    """Returns the mutations above `after`, in order; `after` advances with them.

    Made by `MutationManager.register`. It is `finished` after the snapshot that contains the seqno `end`.
    """

    __slots__ = (
        "_chunk", "_handed", "_manager", "_pending", "_range", "_reading", "_row", "after", "backfill", "drops", "end",
        "error", "floor", "items_sent", "name", "pin", "registered", "waiting",
    )  # fmt: skip

    def __init__(self, manager: CursorManager, name: str, after: int, end: int | None, floor: int) -> None:
        self._manager = manager
        self.name = name
        self.after = after
        self.end = end
        self.floor = floor
        self.pin: MutationSnapshot | None = None
        self.backfill: Backfill | None = None
        self.error: Exception | None = None
        self.registered = True
        self.waiting = False
        self.drops = 0
        self.items_sent = 0
        self._reading: MutationSnapshot | None = None
        self._chunk = 0
        self._row = 0
        self._range: tuple[int, int] | None = None
        self._handed: list[Chunk] = []
        self._pending: Slice | None = None

    # Called by its reader

    @property
    def finished(self) -> bool:
        """Whether it has reached its end or was closed, so that it returns no more mutations."""
        return not self.registered or (self._pending is None and self._complete)

    @property
    def snapshot(self) -> tuple[int, int] | None:
        """Start and end of the snapshot that has begun and is not complete; None between snapshots."""
        return self._range

    def has_next(self) -> bool:
        """Whether `next` and `take` would return something; continues a backfill. Raises as `take`."""
        if self._pending is not None or self._advance(enter=False):
            return True
        if self.error is not None:
            raise self.error
        return False

    def next(self) -> Item | None:
        """The next item, None if there is none yet: the start of a snapshot, its mutations, its end.

        Raises as `take`.
        """
        pending = self._pending
        if pending is None:
            slices = self.take(1)
            if not slices:
                return None
            pending = slices[0]
        start, end, begins, ends, rows = pending
        if begins:
            self._pending = pending._replace(begins=False)
            return SnapshotStart(start, end)
        if not len(rows):
            self._pending = None
            return CursorSnapshotEnd(end)
        rest = rows.take(slice(1, None))
        self._pending = pending._replace(rows=rest) if len(rest) or ends else None
        return next(iter(rows.take(slice(0, 1))))

    def take(self, limit: int, max_bytes: int = UNLIMITED) -> list[Slice]:
        """The next mutations: at most `limit`, with at most `max_bytes` bytes of keys and values, or a single one.

        Empty if there are none yet; a `Wake` follows when there are. Memory of the previous result may be reused.
        After `MutationManager.backfill_failed` it always raises that error.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 mutation, got {limit}")
        self._give_back()
        slices: list[Slice] = []
        if self._pending is not None:
            slices.append(self._pending)
            self._pending = None
        while limit > 0 and self._advance(enter=True) and self._reading is not None:
            count = self._fitting(self._reading, limit, max_bytes)
            if not count and slices:
                break
            one = self._slice(self._reading, count or 1)
            limit -= len(one.rows)
            if max_bytes < UNLIMITED:
                max_bytes -= one.rows.payload()
            slices.append(one)
        if not slices and self.error is not None:
            raise self.error
        return slices

    def close(self) -> None:
        """Release all memory; may be called again."""
        if self.registered:
            self.registered = False
            self._pending = None
            self._give_back()
            self._manager.forget(self)

    # Called by the manager

    def enter(self) -> None:
        """Take a place."""
        if not self._complete:
            self._place()

    @property
    def reading(self) -> MutationSnapshot | None:
        """The snapshot that it has begun and not completed, in memory or in its backfill."""
        return self._reading

    def drop(self) -> bool:
        """Release the place in memory and read the log on the next request; returns whether it had a place."""
        pin = self.pin
        if pin is None:
            return False
        if self._reading is pin:
            self._reading = None
        if self._range is not None and self._reading is None and self.backfill is None:
            self.floor = self._range[1]
            self.backfill = self._manager.new_backfill(self.after + 1, self.floor, self.floor)
        self.drops += 1
        self._leave()
        return True

    def release(self) -> None:
        """Release the place in memory and the backfill."""
        if self._reading is not None and self._reading is not self.pin:
            self._reading.free()
        self._reading = None
        if self.backfill is not None:
            self._manager.end_backfill(self.backfill)
            self.backfill = None
        self._leave()

    # Moving

    @property
    def _complete(self) -> bool:
        return self.end is not None and self.after >= max(self.end, self.floor) and self._range is None

    def _advance(self, *, enter: bool) -> bool:
        """Move to the next mutation; returns whether there is one. Only `enter` closes an open snapshot."""
        while self._reading is None:
            if not self.registered or self._complete:
                return False
            if self.backfill is not None:
                if not self._from_backfill(self.backfill):
                    return False
            elif self.pin is None:
                self._place()
            elif not self._from_memory(self.pin, enter):
                return self.pin.newer is not None or self._wait()
        return True

    def _from_backfill(self, backfill: Backfill) -> bool:
        """Whether to continue; False: wait for the log."""
        snapshot = backfill.pop()
        if snapshot is not None:
            self._read(snapshot)
        elif backfill.exhausted:
            self.backfill = None
        else:
            if self.error is None:
                self._manager.demand(self, backfill)
            return self._wait()
        return True

    def _from_memory(self, pin: MutationSnapshot, enter: bool) -> bool:
        """Whether to continue; False: stay in an empty open snapshot, or before one that must not be closed."""
        if self.after < pin.end:
            self._read(pin)
            return True
        newer = pin.newer
        if newer is None:  # it is in the open snapshot, which is empty
            return False
        if newer.evicted:
            self._leave()
            return True
        if newer.closed or not newer.rows or enter:
            self._move(newer)
            return True
        return False

    def _place(self) -> None:
        """Find a place in memory, and read the log up to it if mutations are missing before it."""
        last, place = self._manager.chain.place(self.after, self.floor)
        if self.end is not None:
            last = min(last, max(self.end, self.floor))
        if self.end is None or place.start <= max(self.end, self.floor):
            self._manager.chain.pin(place)
            self.pin = place
        if last > self.after:
            self.backfill = self._manager.new_backfill(self.after + 1, last, self.floor)

    def _move(self, newer: MutationSnapshot) -> None:
        self._manager.chain.pin(newer)
        self._leave()
        self.pin = newer

    def _leave(self) -> None:
        pin = self.pin
        if pin is not None:
            self.pin = None
            if self._at_end_of(pin):
                pin.passed -= 1
            self._manager.chain.unpin(pin)

    def _at_end_of(self, pin: MutationSnapshot) -> bool:
        return pin.rows > 0 and self.after >= pin.end

    def _wait(self) -> bool:
        self.waiting = True
        return False

    # Reading

    def _read(self, snapshot: MutationSnapshot) -> None:
        self._reading = snapshot
        self._chunk, self._row = snapshot.find(self.after)

    def _fitting(self, snapshot: MutationSnapshot, limit: int, max_bytes: int) -> int:
        """The number of mutations to take from the current chunk."""
        chunk = snapshot.chunks[self._chunk - snapshot.base]
        count = min(limit, len(chunk.rows) - self._row)
        return count if max_bytes >= chunk.bytes else chunk.rows.fitting(self._row, count, max_bytes)

    def _slice(self, snapshot: MutationSnapshot, count: int) -> Slice:
        begins = self._range is None
        if self._range is None:
            self._range = (self.after + 1, snapshot.end)
        start, end = self._range
        chunk = snapshot.chunks[self._chunk - snapshot.base]
        rows = chunk.rows
        whole = self._row + count == len(rows)
        if count < len(rows):
            rows = rows.take(slice(self._row, self._row + count))
        self._row += count
        self.items_sent += count
        self.after = rows.last
        chunk.hand()
        self._handed.append(chunk)
        if whole:
            self._chunk += 1
            self._row = 0
            if self._chunk - snapshot.base == len(snapshot.chunks):
                self._finish(snapshot)
                return Slice(start, end, begins, True, rows)
        return Slice(start, end, begins, False, rows)

    def _finish(self, snapshot: MutationSnapshot) -> None:
        """The snapshot is complete: release what is not needed, without closing an open snapshot."""
        self._reading = None
        self._range = None
        self.floor = 0
        if snapshot is not self.pin:
            snapshot.free()
            if self._complete:
                self._leave()
            return
        snapshot.passed += 1
        newer = snapshot.newer
        if self._complete:
            self._leave()
        elif newer is not None and not newer.evicted and (newer.closed or not newer.rows):
            self._move(newer)
        else:
            self._manager.chain.free()

    def _give_back(self) -> None:
        for chunk in self._handed:
            chunk.give_back()
        self._handed.clear()
