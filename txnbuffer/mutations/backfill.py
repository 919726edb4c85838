"""What one cursor reads from the log: a capped queue of snapshots, made as the log's mutations come in.

The range that is asked for comes as one snapshot or several. Each holds every key once, as of its end, so it
is handed out only when its end is known: when the range ends, or when it holds half of what the queue may.
The log is read on demand, one request at a time, and only while there is room: a queue holds at most `cap` bytes
and one answer. Only a snapshot whose end is given (the rest of one that was begun elsewhere) is
completed whatever it takes.
"""

from __future__ import annotations

from collections import deque

from txnbuffer.mutations.account import Account
from txnbuffer.mutations.batch import MutationBatch
from txnbuffer.mutations.snapshot import Snapshot


class Backfill:
    """Seqnos `next` to `last` are still to come; no snapshot ends below `floor`.

    `ticket` is that of the request under way, None if there is none. `items` were read so far.
    """

    __slots__ = ("_account", "_building", "_leaving", "_ready", "cap", "floor", "items", "last", "next", "ticket")

    def __init__(self, first: int, last: int, floor: int, cap: int, account: Account, leaving: Account) -> None:
        self.next = first
        self.last = last
        self.floor = floor
        self.cap = cap
        self.ticket: int | None = None
        self.items = 0
        self._account = account
        self._leaving = leaving
        self._ready: deque[Snapshot] = deque()
        self._building: Snapshot | None = None

    @property
    def exhausted(self) -> bool:
        """Whether the whole range was read and taken."""
        return self.next > self.last and not self._ready

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def bytes(self) -> int:
        """What is held and not yet taken."""
        building = 0 if self._building is None else self._building.bytes
        return building + sum(snapshot.bytes for snapshot in self._ready)

    @property
    def rows(self) -> int:
        """How many mutations are held and not yet taken."""
        building = 0 if self._building is None else self._building.rows
        return building + sum(snapshot.rows for snapshot in self._ready)

    def wanted(self) -> int:
        """How many bytes to ask the log for now, 0 if none."""
        if self.ticket is not None or self.next > self.last:
            return 0
        room = self.cap - self.bytes
        if room > 0:
            return room
        return 0 if self._ready else max(1, self.cap // 2)

    def feed(self, rows: MutationBatch) -> int:
        """Take an answer: mutations from `next` on, none above `last`; how many of them were replaced."""
        if self._building is None:
            self._building = Snapshot(self.next, self._account, self._leaving)
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

    def pop(self) -> Snapshot | None:
        """The next snapshot, None if there is none yet; whoever takes it frees it."""
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Let go of everything."""
        for snapshot in self._ready:
            snapshot.free()
        self._ready.clear()
        if self._building is not None:
            self._building.free()
            self._building = None
