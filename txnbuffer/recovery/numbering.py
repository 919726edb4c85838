"""Seqnos of one tailed topic: a sequencer fed from the tail, or from the log again where it trails too far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from broker_io.batch import PlacedBatch
from broker_io.port import Broker, Reader
from broker_io.position import Position
from snapshots.layout import reaches
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.sequencer import Sequenced, Sequencer

Told = Callable[[PlacedBatch, Sequenced], None]

HELD_BYTES = 8 * 1024 * 1024
"""Undecided messages held in memory a topic, about; beyond it they are read from the log again."""

STEP_MESSAGES = 4096
"""Messages that one step reads again at most, about."""


class Numbering:
    """Gives seqnos behind `renumber` (exclusive), in step with a buffer that was applied up to `resume`.

    `trails`: what is to be numbered is read from the log again. `told` is called with what got seqnos.
    """

    def __init__(
        self,
        broker: Broker,
        topic: str,
        buffer: TransactionBuffer,
        sequencer: Sequencer,
        *,
        renumber: Position,
        resume: Position,
    ) -> None:
        self.sequencer = sequencer
        self.held_limit = HELD_BYTES
        self.told: Told | None = None
        self._broker = broker
        self._topic = topic
        self._buffer = buffer
        self._renumber = renumber
        self.trails = renumber != resume
        self._reader: Reader | None = None
        self._held: deque[PlacedBatch] = deque()
        self._held_bytes = 0

    @property
    def behind(self) -> bool:
        """Whether something is decided that has to be read from the log again to be numbered."""
        limit = self._buffer.max_read_position
        return self.trails and limit is not None and not reaches(self._renumber, limit)

    def applied(self, placed: PlacedBatch) -> None:
        """The buffer has applied these messages, the next of the tail."""
        if not self.trails:
            self._held.append(placed)
            self._held_bytes += _weight(placed)
            if self._held_bytes > self.held_limit:
                self.advance()
                self.trails = self._held_bytes > self.held_limit
            if self.trails:
                self._held.clear()
                self._held_bytes = 0

    def goes_on(self, ledger: int) -> None:
        """The log goes on in this ledger behind what is applied: once all that is numbered, the next is there.

        Then the ledger before may vanish, whatever comes and however long it stays undecided.
        """
        if self.sequencer.position is not None and reaches(self.sequencer.position, self._buffer.applied):
            self._renumber = self.sequencer.position = max(self._renumber, Position(ledger, -1))

    def advance(self) -> None:
        """Number all that is decided by now."""
        while self.step():
            pass

    def step(self) -> bool:
        """Number some of what is decided by now, a bounded amount; False if nothing was left to do."""
        if self.trails:
            return self._read()
        while self._held:
            placed = self._held[0]
            if self._number(placed) < len(placed):
                return False
            self._held.popleft()
            self._held_bytes -= _weight(placed)
        return False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _number(self, placed: PlacedBatch) -> int:
        """Number what is decided of a batch; how many of its messages have been numbered by now."""
        numbered = self.sequencer.advance(placed, self._buffer)
        if self.told is not None and numbered.stop > numbered.start:
            self.told(placed, numbered)
        at = self.sequencer.position
        if at is None:
            return 0
        self._renumber = max(self._renumber, at)
        return placed.positions.search(at, right=True)

    def _read(self) -> bool:
        """Number one batch of the log behind the last number; False if nothing more is decided there."""
        limit = self._buffer.max_read_position
        if limit is None or reaches(self._renumber, limit):
            self.trails = not reaches(self._renumber, self._buffer.applied)
            if not self.trails:
                self.close()
            return False
        if self._reader is None:
            self._reader = self._broker.reader(self._topic, self._renumber, inclusive=False)
        placed = self._reader.read(limit=STEP_MESSAGES)
        if placed is None:
            return False
        if self._number(placed) < len(placed):
            self.close()  # the rest of the batch is read again once it is decided
            return False
        return True


def _weight(placed: PlacedBatch) -> int:
    return len(placed.messages.values.data) + len(placed.messages.keys.data) + 64 * len(placed)
