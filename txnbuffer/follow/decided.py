"""The decided messages of a log, in order.

Applied messages are held in memory until they are decided. If too many are held, they are dropped, and read from the
log again once they are decided. Reading again stops when it has caught up with the applied messages.
"""

from __future__ import annotations

from collections import deque

from broker_io.batch import PlacedBatch
from broker_io.errors import Error
from broker_io.port import Broker, Reader
from broker_io.position import Position
from snapshots.format import reaches
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import decided_rows, end_of
from txnbuffer.recordset import rows_within

HELD_BYTES = 8 * 1024 * 1024
"""Approximate limit on the bytes of a topic's undecided messages in memory."""
STEP_MESSAGES = 4096
"""Approximate limit on the messages that one step reads again."""


class DecidedLog:
    """The decided messages after `at` (exclusive) of a log whose messages up to `applied` the buffer has applied.

    `at`: the last message that was taken, or the start. `lagging`: messages are read from the log again.
    """

    def __init__(
        self, broker: Broker, topic: str, buffer: TransactionBuffer, *, at: Position, applied: Position
    ) -> None:
        self.at = at
        self.held_limit = HELD_BYTES
        self._broker = broker
        self._topic = topic
        self.buffer = buffer
        self._held: deque[PlacedBatch] = deque()
        self._held_bytes = 0
        self._read_to = at
        self._reader: Reader | None = None
        self.lagging = not reaches(at, applied)

    @property
    def has_backlog(self) -> bool:
        """Whether decided messages have to be read from the log again."""
        return self.lagging and not reaches(self._read_to, self.buffer.max_read_position)

    @property
    def overfull(self) -> bool:
        """Whether more is held than allowed: take what is decided, then `shed` the rest."""
        return self._held_bytes > self.held_limit

    def applied(self, placed: PlacedBatch) -> None:
        """Hold messages that the buffer has just applied, the next of the log."""
        if not self.lagging and len(placed):
            self._hold(placed)

    def shed(self) -> None:
        """Drop what is held; it is read from the log again."""
        self._held.clear()
        self._held_bytes = 0
        self._read_to = self.at
        self.lagging = True
        self.close()

    def take(self, limit: int | None = None) -> PlacedBatch | None:
        """The next decided messages, with at most about `limit` records; None if no more are decided.

        Raises what reading the log raises, PositionTrimmed among it.
        """
        while True:
            if (taken := self._from_held(limit)) is not None or not self.lagging:
                return taken
            if not self._read():
                return None

    def continued_in(self, ledger: int) -> bool:
        """The log continues in this ledger after all applied messages: continue there if all of them were taken."""
        if not reaches(self.at, self.buffer.applied):
            return False
        self.at = self._read_to = max(self.at, Position(ledger, -1))
        return True

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _from_held(self, limit: int | None) -> PlacedBatch | None:
        if not self._held:
            return None
        head = self._held[0]
        count = decided_rows(head, self.buffer)
        if limit is not None and count:
            count = min(count, rows_within(head, limit))
        if not count:
            return None
        taken = self._held.popleft()
        if count < len(head):
            taken = head.take(slice(count))
            self._held.appendleft(head.take(slice(count, None)))
        self._held_bytes -= taken.messages.weight
        self.at = end_of(taken.positions.last, self.buffer.max_read_position)
        return taken

    def _hold(self, placed: PlacedBatch) -> None:
        self._held.append(placed)
        self._held_bytes += placed.messages.weight

    def _read(self) -> bool:
        """Read on while more is decided; return whether anything was read. Stop lagging once all applied is read."""
        applied = self.buffer.applied
        if applied is None or reaches(self._read_to, applied):
            self._caught_up()
            return False
        if reaches(self._read_to, self.buffer.max_read_position):
            return False
        if self._reader is None:
            self._reader = self._broker.reader(self._topic, self._read_to, inclusive=False)
        try:
            placed = self._reader.read(limit=STEP_MESSAGES)
        except Error:
            self.close()  # the next attempt opens another reader
            raise
        if placed is None:
            return False
        known = placed.take(slice(placed.positions.search(applied, right=True)))
        if len(known):
            self._hold(known)
            self._read_to = end_of(known.positions.last, applied)
        if len(known) < len(placed) or reaches(self._read_to, applied):
            self._caught_up()
        return True

    def _caught_up(self) -> None:
        """All applied messages were read: the next ones are held when they are applied."""
        self.lagging = False
        self.close()
