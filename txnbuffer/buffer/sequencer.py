"""Assigning sequence numbers to the visible records of a topic: 1, 2, 3 ... in the order of their positions.

The sequencer follows the max read position: a record gets its number once all records before it are decided.
Numbers depend on the log alone, so every reader and every recovery assigns the same. After a recovery the
log is read again from the sequencer's position, which may be before the buffer's applied position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from broker_io.batch import PlacedBatch
from broker_io.position import NO_INDEX, Int64s, Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import decided_rows, visible_counts


@dataclass(frozen=True, slots=True, eq=False)
class SequencerState:
    """All up to `position` is numbered, `next_seqno` comes next; it may be `(ledger, -1)`, before a ledger.

    `first_seqnos[i]` is the number of the first visible record from the beginning of `ledgers[i]` on, ascending.
    """

    position: Position | None
    next_seqno: int
    ledgers: Int64s
    first_seqnos: Int64s


class Sequenced(NamedTuple):
    """Messages `start` to `stop` of a batch were numbered.

    `counts`: int64[stop - start], how many visible records each holds; they have the numbers
    `first_seqno`, `first_seqno + 1`, ...
    """

    start: int
    stop: int
    counts: Int64s
    first_seqno: int


class Sequencer:
    """`position` is where the last numbered message ends, or before the next ledger; None before the first."""

    __slots__ = ("first_seqnos", "next_seqno", "position")

    def __init__(self) -> None:
        self.position: Position | None = None
        self.next_seqno = 1
        self.first_seqnos: dict[int, int] = {}

    @classmethod
    def restore(cls, state: SequencerState) -> Sequencer:
        sequencer = cls()
        sequencer.position = state.position
        sequencer.next_seqno = state.next_seqno
        sequencer.first_seqnos = dict(zip(state.ledgers.tolist(), state.first_seqnos.tolist(), strict=True))
        return sequencer

    def snapshot_state(self) -> SequencerState:
        ledgers = np.array([*self.first_seqnos], np.int64)
        return SequencerState(
            self.position, self.next_seqno, ledgers, np.array([*self.first_seqnos.values()], np.int64)
        )

    def advance(self, placed: PlacedBatch, buffer: TransactionBuffer) -> Sequenced:
        """Number the messages that follow those numbered so far, up to the buffer's max read position.

        Messages of the batch that are numbered already are passed over, those not yet decided have to be
        given again later. The first ones not numbered yet must not be missing before the batch.
        """
        start = 0 if self.position is None else placed.positions.search(self.position, right=True)
        stop = decided_rows(placed, buffer)
        first = self.next_seqno
        if start >= stop:
            return Sequenced(start, start, np.zeros(0, np.int64), first)
        rows = placed.take(slice(start, stop))
        counts = visible_counts(rows, buffer)
        self.first_seqnos.setdefault(rows.positions.first.ledger, first)
        self.next_seqno += int(counts.sum())
        self.position = _end_of(rows.positions.last, buffer.max_read_position)
        return Sequenced(start, stop, counts, first)

    def trim(self, first_ledger: int) -> None:
        """Forget the ledgers below one."""
        self.first_seqnos = {ledger: seqno for ledger, seqno in self.first_seqnos.items() if ledger >= first_ledger}


def _end_of(message: Position, limit: Position | None) -> Position:
    """Where a message ends: behind the last record of it if it is a record set, as the max read position tells."""
    whole = limit is not None and message.batch == NO_INDEX and limit[:2] == message[:2]
    return limit if whole and limit is not None else message


def reader_floor(first_ledger: int, next_record: Position | None) -> int:
    """The ledger below which a reader may trim its copy of the buffer.

    Not below its own next record: one that was fetched before its ledger vanished is still to be judged.
    """
    return first_ledger if next_record is None else min(first_ledger, next_record.ledger)
