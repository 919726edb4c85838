"""Which messages of a batch are visible according to a transaction buffer, and the seqnos of the visible records.

A record at or before maxReadPosition is visible unless its transaction is aborted or its position is suppressed;
a marker never is. The rule needs nothing else, whatever position a reader starts from. It is applied to a transaction
buffer, or to a pinned copy that no longer changes.

The visible records of a topic have the seqnos 1, 2, 3 … in the order of their positions. The sequencer follows the max
read position: a record gets its seqno once all records before it are decided. Seqnos depend on the log alone, so every
reader and every recovery assigns the same. After a recovery the log is read again from the sequencer's position, which
may be before the buffer's applied position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.position import NO_INDEX, Int64s, Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import AbortedSet, SuppressedRanges
from txnbuffer.protocol import MARKER, MAX_SET_RECORDS, RECORDS, TXN, numbers, present, transaction_codes


class Visibility(Protocol):
    """All up to `max_read_position` is decided; None: nothing is."""

    @property
    def aborted(self) -> AbortedSet: ...

    @property
    def suppressed(self) -> SuppressedRanges: ...

    @property
    def max_read_position(self) -> Position | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class PinnedVisibility:
    """The visibility of one moment, which can be sent to other processes."""

    aborted: AbortedSet
    suppressed: SuppressedRanges
    max_read_position: Position | None

    @classmethod
    def of(cls, visibility: Visibility) -> PinnedVisibility:
        """Pin a buffer's visibility; it shares the buffer's sets, so nothing more may be applied to the buffer."""
        return cls(visibility.aborted, visibility.suppressed, visibility.max_read_position)

    @classmethod
    def copy_of(cls, visibility: Visibility) -> PinnedVisibility:
        """Copy a buffer's visibility, so that the buffer may change while the copy is used in another thread."""
        return cls(visibility.aborted.copy(), visibility.suppressed.copy(), visibility.max_read_position)


def visible_counts(placed: PlacedBatch, buffer: Visibility, *, decided: bool = False) -> Int64s:
    """int64[n]: how many visible records each message holds. `decided`: whether all are known to be decided.

    Some records of a record set may be suppressed: `buffer.suppressed.mask` of their positions shows which.
    """
    count = len(placed.publish_times)
    properties = placed.messages.properties
    visible = np.zeros(count, np.bool_)
    visible[: count if decided else decided_rows(placed, buffer)] = True
    if MARKER in properties:
        visible &= ~present(properties[MARKER], count)
    if TXN in properties and buffer.aborted:
        codes, table = transaction_codes(properties[TXN], count)
        visible &= ~buffer.aborted.mask(table.most, table.least)[codes]
    counts = visible.astype(np.int64)
    if buffer.suppressed.ledgers:
        counts[buffer.suppressed.mask(placed.positions)] = 0
    if RECORDS in properties:
        sizes = numbers(properties[RECORDS], count, MAX_SET_RECORDS)
        sets = np.flatnonzero((sizes > 0) & (placed.positions.indexes == NO_INDEX))
        counts[sets] = np.where(visible[sets], _unsuppressed(placed, buffer, sets, sizes[sets]), 0)
    return counts


def decided_rows(placed: PlacedBatch, buffer: Visibility) -> int:
    """How many of the messages, from the first, are at or before maxReadPosition."""
    limit = buffer.max_read_position
    count = len(placed.publish_times)
    if limit is None or not count:
        return 0
    return count if placed.positions.last <= limit else placed.positions.search(limit, right=True)


def _unsuppressed(placed: PlacedBatch, buffer: Visibility, sets: NDArray[np.intp], sizes: Int64s) -> Int64s:
    """How many records of each record set, given by row and size, are not suppressed."""
    positions = placed.positions
    if not len(sets) or not buffer.suppressed.touch(positions.first, positions.last._replace(batch=MAX_SET_RECORDS)):
        return sizes
    hidden = [
        buffer.suppressed.count(Position(ledger, entry, 0), size)
        for (ledger, entry, _), size in zip(positions.take(sets), sizes.tolist(), strict=True)
    ]
    return sizes - np.array(hidden, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SequencerState:
    """All up to `position` is sequenced, `next_seqno` comes next; `(ledger, -1)` is the start of a ledger.

    `first_seqnos[i]` is the seqno of the first visible record from the start of `ledgers[i]` on, ascending.
    """

    position: Position | None
    next_seqno: int
    ledgers: Int64s
    first_seqnos: Int64s


class Sequenced(NamedTuple):
    """Messages `start` to `stop` (exclusive) of a batch were sequenced.

    `counts`: int64[stop - start], how many visible records each holds; they have the seqnos
    `first_seqno`, `first_seqno + 1`, …
    """

    start: int
    stop: int
    counts: Int64s
    first_seqno: int


@dataclass(slots=True, eq=False)
class Sequencer:
    """`position`: the end of the last sequenced message, or the start of the next ledger; None before the first.

    `first_seqnos` has ledgers in ascending order, with the seqno of the first visible record from each one's start on.
    """

    position: Position | None = None
    next_seqno: int = 1
    first_seqnos: dict[int, int] = field(default_factory=dict)

    @classmethod
    def restore(cls, state: SequencerState) -> Sequencer:
        first_seqnos = dict(zip(state.ledgers.tolist(), state.first_seqnos.tolist(), strict=True))
        return cls(state.position, state.next_seqno, first_seqnos)

    def snapshot_state(self) -> SequencerState:
        ledgers = np.array([*self.first_seqnos], np.int64)
        seqnos = np.array([*self.first_seqnos.values()], np.int64)
        return SequencerState(self.position, self.next_seqno, ledgers, seqnos)

    def advance(self, placed: PlacedBatch, buffer: TransactionBuffer, *, decided: bool = False) -> Sequenced:
        """Sequence the messages that follow those sequenced so far, up to maxReadPosition of the buffer.

        Messages of the batch that are sequenced already are skipped; those not decided yet have to be passed
        again later. No message may be missing between the last sequenced one and the batch. `decided`: whether all
        are known to be decided.
        """
        count = len(placed.publish_times)
        start, stop = 0, count if decided else decided_rows(placed, buffer)
        if self.position is not None and stop and placed.positions.first <= self.position:
            start = placed.positions.search(self.position, right=True)
        first = self.next_seqno
        if start >= stop:
            return Sequenced(start, start, np.zeros(0, np.int64), first)
        rows = placed if stop - start == count else placed.take(slice(start, stop))
        counts = visible_counts(rows, buffer, decided=True)
        self.first_seqnos.setdefault(rows.positions.ledgers.item(0), first)
        self.next_seqno += int(np.add.reduce(counts))
        self.position = end_of(rows.positions.last, buffer.max_read_position)
        return Sequenced(start, stop, counts, first)

    def oldest(self, first_ledger: int) -> int:
        """The seqno of the first visible record that a log beginning with `first_ledger` has, or will have."""
        firsts = [seqno for ledger, seqno in [*self.first_seqnos.items()] if ledger >= first_ledger]
        return min(firsts, default=self.next_seqno)

    def begin_at(self, first_ledger: int, written: int) -> None:
        """Let the log begin with `first_ledger`, though it and all others before the ledger `written` are empty."""
        if first_ledger < written and written in self.first_seqnos:
            firsts = self.first_seqnos | {first_ledger: self.first_seqnos[written]}
            self.first_seqnos = dict(sorted(firsts.items()))

    def last_in(self, ledger: int) -> int:
        """The last seqno in the ledgers up to this one, which are wholly numbered; 0 for the ledger 0."""
        return self.oldest(ledger + 1) - 1 if ledger else 0

    def trim(self, first_ledger: int) -> None:
        """Forget the ledgers below one."""
        self.first_seqnos = {ledger: seqno for ledger, seqno in self.first_seqnos.items() if ledger >= first_ledger}


def end_of(message: Position, limit: Position | None) -> Position:
    """The end of a message: for a record set its last record, as in maxReadPosition."""
    whole = limit is not None and message.batch == NO_INDEX and limit[:2] == message[:2]
    return limit if whole and limit is not None else message


def reader_floor(first_ledger: int, next_record: Position | None) -> int:
    """The ledger below which a reader may trim its copy of the buffer.

    Not above that of its next record: its visibility is still needed if it was read before its ledger was deleted.
    """
    return first_ledger if next_record is None else min(first_ledger, next_record.ledger)
