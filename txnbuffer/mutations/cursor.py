"""Cursors: each reads the mutations of a topic in order, snapshot by snapshot, from memory or from the log.

A cursor is in a snapshot in memory, or reads from its own backfill, or both: while it is older than what memory holds,
it keeps its place there and reads the log up to that place. If the place is dropped meanwhile to free memory, it finds
another one when the backfill ends, until memory has all missing mutations.

A backfill is a capped queue of snapshots, made from the mutations that the log returns. Its range may become several
snapshots. Each has every key once, as of its end, so it is returned only when its end is known: when the range ends, or
when it is large enough, at most half of the queue's cap. The log is read on demand, one request at a time, and only
while there is room: a queue has at most `cap` bytes and one answer. The more backfills there are, the smaller is the
cap of each. Only a snapshot with a given end (the rest of one that the reader has in part) is completed whatever its
size.

Where the log is compacted, a key's newest mutation as of a seqno may be missing if the key has a newer one. So a
snapshot that is read from the log ends at or above `compacted_to`. It may be as large as the whole topic, so it is not
built: its end is known, and it is returned in parts as they are read. A key may be in several of them; the last one is
the newest. If `compacted_to` grows beyond the end of a snapshot that a cursor is reading from the log, the snapshot
begins again with a later end; `compaction_bound` is where this does not happen.

A cap is never too small for a useful read: if there are too many backfills for that, they take turns. A turn ends when
its cursor has taken what was read. If the cursor takes too long while others wait, the rest is freed and read again in
its next turn. A cursor that could take nothing gets twice as long then, so that every cursor advances in the end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.snapshot import Chain, Chunk, MemoryAccount, MutationSnapshot

FIRST_SNAPSHOT_BYTES = 64 * 1024
"""Size of the first snapshot that a backfill makes."""
TURN_BYTES = 2 * FIRST_SNAPSHOT_BYTES
"""Backfills that would share their memory in smaller parts take turns."""
TURN_TICKS = 4
"""Ticks for which a cursor may keep what its turn has read while others wait."""


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of `cursor`, which was at `after` when it began and has had its answer for `ticks`."""

    cursor: Cursor
    after: int
    ticks: int = 0


@dataclass(slots=True, eq=False)
class BackfillMemory:
    """The memory of all backfills: those that have a turn share `bytes` bytes.

    `active` counts all of them. A backfill without a turn has nothing in memory. `waiting`: those that need a turn to
    continue, in order. Call `give_turns` after every change, and `tick` periodically.
    """

    bytes: int
    active: int = 0
    turns: dict[Backfill, Turn] = field(default_factory=dict)
    waiting: dict[Backfill, Cursor] = field(default_factory=dict)

    @property
    def most_turns(self) -> int:
        return max(self.bytes // TURN_BYTES, 1)

    @property
    def share(self) -> int:
        return max(self.bytes // max(min(self.active, self.most_turns), 1), 1)

    def begin_turn(self, cursor: Cursor, backfill: Backfill) -> bool:
        """Whether a backfill has a turn now; otherwise it waits for one."""
        if backfill not in self.turns:
            if self.waiting or len(self.turns) >= self.most_turns:
                self.waiting.setdefault(backfill, cursor)
                return False
            self.turns[backfill] = Turn(cursor, cursor.after)
        return True

    def give_turns(self) -> bool:
        """Give free turns to those that have waited longest; returns whether any continued."""
        given = False
        while self.waiting and len(self.turns) < self.most_turns:
            backfill = next(iter(self.waiting))
            cursor = self.waiting.pop(backfill)
            self.turns[backfill] = Turn(cursor, cursor.after)
            cursor.continue_backfill()
            given = True
        return given

    def tick(self) -> None:
        """End the turns of cursors that take too long while others wait."""
        if not self.waiting:
            return
        for backfill, turn in [*self.turns.items()]:
            if backfill.ticket is None:
                turn.ticks += 1
                if turn.ticks > turn.cursor.turn_ticks:
                    turn.cursor.lose_turn(took=turn.cursor.after > turn.after)

    def leave(self, backfill: Backfill) -> None:
        """A backfill needs no turn."""
        self.turns.pop(backfill, None)
        self.waiting.pop(backfill, None)


@dataclass(slots=True, eq=False)
class Backfill:
    """Mutations read from the log for one cursor: `next` to `last` are to come.

    It may have `most` bytes, and at most its share of `memory`. `floor`: the given end of its first snapshot, 0 if
    there is none; `parts`: that one is ready in parts. `ready` snapshots and parts are complete; `building` is the next
    one, complete at `limit` bytes: few at first, so that the reader gets its first mutations soon, and eight times
    as many after each answer. `ticket`: that of the pending request, if there is one. `items`: the number of
    mutations read so far.
    """

    next: int
    last: int
    floor: int
    most: int
    parts: bool
    memory: BackfillMemory
    account: MemoryAccount
    leaving: MemoryAccount
    ticket: int | None = None
    items: int = 0
    ready: deque[MutationSnapshot] = field(default_factory=deque)
    building: MutationSnapshot | None = None
    wished: int = FIRST_SNAPSHOT_BYTES

    @property
    def cap(self) -> int:
        return min(self.most, self.memory.share)

    @property
    def limit(self) -> int:
        return max(1, min(self.wished, self.cap // 2))

    @property
    def snapshots(self) -> list[MutationSnapshot]:
        """What was read and is not taken yet."""
        return [*self.ready] if self.building is None else [*self.ready, self.building]

    @property
    def bytes(self) -> int:
        """Bytes read and not taken yet."""
        return sum(snapshot.bytes for snapshot in self.snapshots)

    @property
    def stop(self) -> int:
        """The last mutation of the snapshot that is being built, or of those that may follow it."""
        return min(self.floor, self.last) if self.next <= self.floor else self.last

    def wanted(self) -> int:
        """Bytes to request from the log now, 0 if none."""
        if self.ticket is not None or self.next > self.last:
            return 0
        if self.ready and self.memory.waiting:
            return 0  # those that wait read before this one reads ahead
        room = self.cap - self.bytes
        if room > 0:
            return min(room, self.limit)
        return 0 if self.ready else max(1, self.cap // 2)

    def feed(self, rows: MutationBatch) -> int:
        """Add an answer: mutations from `next` on, none above `stop`; returns how many were replaced."""
        stop = self.stop
        if self.building is None:
            self.building = MutationSnapshot(self.next, self.account, self.leaving)
        building = self.building
        self.items += len(rows)
        replaced = building.append(rows.owned())
        self.next = building.end + 1
        whole = stop == self.floor and not self.parts
        if self.next > stop or (not whole and building.bytes >= self.limit):
            building.seal()
            building.closed = True
            self.ready.append(building)
            self.building = None
        self.wished = min(8 * self.wished, self.most)
        return replaced

    def taken(self) -> None:
        """A snapshot was taken whole; the turn ends with the last one."""
        if self.ticket is None and not self.snapshots:
            self.memory.leave(self)


UNLIMITED = 2**62


class Slice(NamedTuple):
    """Mutations of the snapshot `start` to `end`; `begins`: they are its first, `ends`: its last.

    A snapshot has each key once, with its newest mutation of these seqnos; with `repeats` it may have older ones too.
    A snapshot that is not complete may begin again, with a later end or with `repeats`. There may be no `rows` if all
    were emptied by compaction. The manager may reuse the memory of `rows` after the next `take`.
    """

    start: int
    end: int
    begins: bool
    ends: bool
    rows: MutationBatch
    repeats: bool = False


NO_ROWS = MutationBatch.of(())


class CursorManager(Protocol):
    """The methods of the manager that cursors call."""

    @property
    def chain(self) -> Chain: ...
    def new_backfill(self, first: int, last: int, floor: int, *, parts: bool) -> Backfill: ...
    def demand(self, cursor: Cursor, backfill: Backfill) -> None: ...
    def end_backfill(self, backfill: Backfill) -> None: ...
    def forget(self, cursor: Cursor) -> None: ...


@dataclass(slots=True, eq=False)
class Cursor:
    """Returns the mutations above `after`, in order; `after` advances with them.

    Made by `MutationManager.register`. It is `finished` after the snapshot that contains the seqno `end`.

    `snapshot`: start and end of the snapshot that has begun and is not complete. `reading`: that snapshot, in memory
    or from the backfill. `pin`: the snapshot in memory where it has its place. `turn_ticks`: the length of its turns.
    """

    _manager: CursorManager
    name: str
    after: int
    end: int | None
    floor: int
    pin: MutationSnapshot | None = None
    backfill: Backfill | None = None
    error: Exception | None = None
    registered: bool = True
    waiting: bool = False
    drops: int = 0
    items_sent: int = 0
    reading: MutationSnapshot | None = None
    snapshot: tuple[int, int] | None = None
    turn_ticks: int = TURN_TICKS
    _repeats: bool = False
    _chunk: int = 0
    _row: int = 0
    _handed: list[Chunk] = field(default_factory=list)

    # Called by its reader

    @property
    def finished(self) -> bool:
        """Whether it has reached its end or was closed, so that it returns no more mutations."""
        return not self.registered or self._complete

    def has_next(self) -> bool:
        """Whether `take` would return something; continues a backfill. Raises as `take`."""
        if self._advance(enter=False):
            return True
        if self.error is not None:
            raise self.error
        return False

    @property
    def idle(self) -> bool:
        """Whether `take` has nothing to return or to free; a `Wake` ends that."""
        return self.waiting and not self._handed

    def take(self, limit: int, max_bytes: int = UNLIMITED) -> list[Slice]:
        """The next mutations: at most `limit`, with at most `max_bytes` bytes of keys and values, or a single one.

        Empty if there are none yet; a `Wake` follows when there are. Memory of the previous result may be reused.
        After `MutationManager.backfill_failed` it always raises that error.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1 mutation, got {limit}")
        self._give_back()
        slices: list[Slice] = []
        while limit > 0 and self._advance(enter=True) and self.reading is not None:
            number = self._chunk - self.reading.base
            if number == len(self.reading.chunks):
                slices.append(self._slice(self.reading, None, 0))
                continue
            chunk = self.reading.chunks[number]
            count = min(limit, len(chunk.rows) - self._row)
            if max_bytes < chunk.bytes:
                count = chunk.rows.fitting(self._row, count, max_bytes)
            if not count and slices:
                break
            one = self._slice(self.reading, chunk, count or 1)
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
            self._give_back()
            self._manager.forget(self)

    # Called by the manager

    def enter(self) -> None:
        """Take a place."""
        if not self._complete:
            self._place()

    def drop(self) -> bool:
        """Release the place in memory and read the log on the next request; returns whether it had a place."""
        pin = self.pin
        if pin is None:
            return False
        if self.reading is pin:
            self.reading = None
        if self.snapshot is not None and self.reading is None and self.backfill is None:
            self._read_log(0)
        self.drops += 1
        self._leave()
        return True

    def continue_backfill(self) -> None:
        """Read on: the backfill has a turn."""
        if self.backfill is not None:
            self._manager.demand(self, self.backfill)

    def lose_turn(self, *, took: bool) -> None:
        """Free what the backfill has read; the next turn reads it again, and is longer unless this one `took` some."""
        self.turn_ticks = TURN_TICKS if took else 2 * self.turn_ticks
        self.read_again()

    def read_again(self) -> None:
        """Free what the backfill has read, and read it from the log again."""
        if (backfill := self.backfill) is not None:
            self._end_backfill()
            self._read_log(backfill.last)
            if self.backfill is not None and self.backfill.last > backfill.last:
                self._leave()  # its place is no longer where the backfill ends

    def release(self) -> None:
        """Release the place in memory and the backfill."""
        self._end_backfill()
        self._leave()

    # Moving

    @property
    def _complete(self) -> bool:
        return self.end is not None and self.after >= max(self.end, self.floor) and self.snapshot is None

    def _advance(self, *, enter: bool) -> bool:
        """Move to the next mutation; returns whether there is one. Only `enter` closes an open snapshot."""
        while self.reading is None:
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
        if backfill.ready:
            self._read(backfill.ready.popleft())
        elif backfill.next > backfill.last:
            self._manager.end_backfill(backfill)
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
        if newer.closed or newer.empty or enter:
            self._move(newer)
            return True
        return False

    def _place(self) -> None:
        """Find a place in memory, and read the log up to it if mutations are missing before it."""
        last, place = self._manager.chain.place(self.after, self.floor)
        if last > self.after:
            self.floor = self._given_end()
        if self.end is not None:
            last = min(last, max(self.end, self.floor))
        if self.end is None or place.start <= max(self.end, self.floor):
            self._manager.chain.pin(place)
            self.pin = place
        if last > self.after:
            self._read_log(last)

    def _given_end(self) -> int:
        """The end that the next snapshot from the log must have, 0 for any."""
        end = self.floor if self.snapshot is None else self.snapshot[1]
        return max(end, self._compacted)

    @property
    def _compacted(self) -> int:
        """`compacted_to`, 0 for a cursor that is not below it."""
        compacted_to = self._manager.chain.compacted_to
        return compacted_to if self.after < compacted_to else 0

    def _read_log(self, last: int) -> None:
        """Read the log up to a seqno, and at least to the given end of the next snapshot."""
        self.floor = self._given_end()
        last, parts = max(last, self.floor), self._compacted > 0
        self.backfill = self._manager.new_backfill(self.after + 1, last, self.floor, parts=parts)

    def _move(self, newer: MutationSnapshot) -> None:
        self._manager.chain.pin(newer)
        self._leave()
        self.pin = newer

    def _end_backfill(self) -> None:
        if self.reading is not None and self.reading is not self.pin:
            self.reading.free()
        self.reading = None
        if self.backfill is not None:
            self._manager.end_backfill(self.backfill)
            self.backfill = None

    def _leave(self) -> None:
        pin = self.pin
        if pin is not None:
            self.pin = None
            if not pin.empty and self.after >= pin.end:
                pin.passed -= 1
            pin.pins -= 1
            self._manager.chain.settle(pin)

    def _wait(self) -> bool:
        self.waiting = self.error is None  # else the next `take` raises it
        return False

    # Reading

    def _read(self, snapshot: MutationSnapshot) -> None:
        self.reading = snapshot
        self._chunk, self._row = snapshot.find(self.after)

    def _slice(self, snapshot: MutationSnapshot, chunk: Chunk | None, count: int) -> Slice:
        """The next `count` mutations, all of one chunk; without a chunk, the end of the snapshot."""
        start, end, begins = self._announce(snapshot)
        rows = NO_ROWS if chunk is None else self._take_rows(chunk, count)
        repeats = self._repeats
        ends = False
        if self._chunk - snapshot.base == len(snapshot.chunks):
            self.after = snapshot.end
            ends = snapshot.end >= end
            self._finish(snapshot, complete=ends)
        return Slice(start, end, begins, ends, rows, repeats)

    def _announce(self, snapshot: MutationSnapshot) -> tuple[int, int, bool]:
        """Start and end of the snapshot that the next mutations belong to, and whether it begins, perhaps again."""
        end = max(snapshot.end, self.floor)
        repeats = snapshot is not self.pin and self._compacted > 0
        if self.snapshot is None:
            self.snapshot = (self.after + 1, end)
            self._repeats = repeats
            return (*self.snapshot, True)
        if end > self.snapshot[1] or (repeats and not self._repeats):
            self.snapshot = (self.snapshot[0], end)
            self._repeats = True
            return (*self.snapshot, True)
        return (*self.snapshot, False)

    def _take_rows(self, chunk: Chunk, count: int) -> MutationBatch:
        rows = chunk.rows
        whole = self._row + count == len(rows)
        if count < len(rows):
            rows = rows.take(slice(self._row, self._row + count))
        self._row += count
        self.items_sent += count
        self.after = rows.last
        chunk.handed += 1
        self._handed.append(chunk)
        if whole:
            self._chunk += 1
            self._row = 0
        return rows

    def _finish(self, snapshot: MutationSnapshot, *, complete: bool) -> None:
        """All of it is taken: release what is not needed, without closing an open snapshot."""
        self.reading = None
        if complete:
            self.snapshot = None
            self.floor = 0
        if snapshot is not self.pin:
            snapshot.free()
            if self.backfill is not None:
                self.backfill.taken()
                self.turn_ticks = TURN_TICKS
            if self._complete:
                self._leave()
            return
        snapshot.passed += 1
        newer = snapshot.newer
        if self._complete:
            self._leave()
        elif newer is not None and not newer.evicted and (newer.closed or newer.empty):
            self._move(newer)
        else:
            self._manager.chain.free()

    def _give_back(self) -> None:
        for chunk in self._handed:
            chunk.give_back()
        self._handed.clear()
