"""The transaction buffer of one topic: a fold over the messages of its log.

The rules of the log protocol that it applies, in log order; the code names them by their numbers:

1. A record of a transaction that has ended here is late: suppressed and counted. A transaction has ended
   here if a marker said so, or if it is at or below the low-water mark and not ongoing.
2. A record whose seq is not above the highest accepted of its transaction is a duplicate: suppressed
   and counted.
3. An item of a marker ends its transaction; if that has ended here, the item is ignored. An ABORT without
   records is stored as an end, not as an abort.
4. A one-phase item is void if a newer epoch of its coordinator was seen here. A decided item counts
   whatever its epoch.
5. A marker's items are applied first, then its low-water mark and epoch. A message is applied whole.
6. A COMMIT is damaged if the number of accepted records differs from the number in the marker.
7. A marker that can't be decoded and a message of another protocol version stop the topic; a record
   that can't be decoded is suppressed and counted.

The buffer also cuts its aborts and suppressed ranges, in log order, into segments with permanent numbers. They are
appended to the unsealed items. When there are `segment_size` of them, the next item seals these: they become the next
segment, which never changes. So the cuts depend on the log alone, not on how it was read or when snapshots were
written. The items of one marker may fall into two segments. Consecutive suppressed messages are one range as long as
the range is unsealed. The stored format calls a segment a *part* and the unsealed items the *tail*.

A batch is first decoded into what the buffer folds: slices of records, markers, undecodable records. The properties are
read as whole columns. Only a message that is neither an ordinary nor a valid transactional record is decoded as a row.
A few messages are cheaper to decode row by row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.position import NO_INDEX, Position, Positions
from txnbuffer.buffer.state import (
    AbortedSet,
    BufferSegment,
    BufferState,
    CoordinatorState,
    Counters,
    Damage,
    Effect,
    EpochRaised,
    Ignored,
    Items,
    Ongoing,
    OpenTxn,
    Reason,
    SegmentColumns,
    SegmentSummary,
    Suppressed,
    SuppressedRanges,
    Void,
    as_ended,
    coordinator_columns,
    coordinator_states,
)
from txnbuffer.errors import OutOfOrder, ProtocolStopped, SegmentMismatch, UndecodableMarker, UnsupportedProtocol
from txnbuffer.model import (
    MAX_LEAST,
    PROTOCOL_VERSION,
    Marker,
    Outcome,
    RecordSlice,
    TxnId,
    Undecodable,
    as_record_slice,
    as_txn_id,
)
from txnbuffer.protocol import (
    ABSENT,
    FEW_ROWS,
    MARKER,
    MARKER_TEXT,
    MAX_SET_RECORDS,
    RECORDS,
    SEQ,
    TXN,
    VERSION,
    decode_marker,
    number,
    numbers,
    present,
    texts_equal,
    transaction_codes,
    without_copies,
)

_DECODED = frozenset((VERSION, TXN, SEQ, RECORDS, MARKER))


class PlacedMarker(NamedTuple):
    """A marker and its position."""

    position: Position
    marker: Marker


Item: TypeAlias = RecordSlice | PlacedMarker | Undecodable | ProtocolStopped
"""What a log consists of. A `ProtocolStopped` comes last: nothing after it can be read."""


def decode(placed: PlacedBatch) -> list[Item]:
    """The items of a batch in log order; if the topic stops, the last one is the error.

    A slice has consecutive rows: of one transaction with consecutive seqs, or ordinary ones. A record
    set is a slice of its own; its positions are `(ledger, entry, 0 … n - 1)`.
    """
    return decode_rows(placed) if len(placed.publish_times) < FEW_ROWS else decode_columns(placed)


def decode_rows(placed: PlacedBatch) -> list[Item]:
    """`decode`, row by row."""
    items: list[Item] = []
    run: RecordSlice | None = None  # the last item, if it has no record set
    columns: list[tuple[str, list[str | None]]] = []
    for name, column in placed.messages.properties.items():
        if name in _DECODED:
            columns.append((name, column.to_list()))
    for row, position in enumerate(placed.positions):
        properties: dict[str, str] = {}
        for name, texts in columns:
            if (text := texts[row]) is not None:
                properties[name] = text
        item = _row(position, properties, placed.messages.values[row] if MARKER in properties else None)
        if RECORDS in properties or not isinstance(item, RecordSlice):
            items.append(item)
            run = None
            if isinstance(item, ProtocolStopped):
                break
        elif run and run.txn == item.txn and (run.txn is None or item.first_seq == run.first_seq + run.size):
            items[-1] = run = run._replace(last=item.last, size=run.size + 1)
        else:
            items.append(item)
            run = item
    return items


def decode_columns(placed: PlacedBatch) -> list[Item]:
    """`decode`, by columns."""
    properties = placed.messages.properties
    count = len(placed)
    if _DECODED.isdisjoint(properties):
        return [RecordSlice(None, placed.positions.first, placed.positions.last, 0, count)] if count else []
    codes, table = transaction_codes(properties.get(TXN), count)
    most, least = table.most[codes], table.least[codes]
    seqs = numbers(properties.get(SEQ), count, MAX_LEAST)
    sizes = numbers(properties.get(RECORDS), count, MAX_SET_RECORDS)
    version = properties.get(VERSION)
    current = texts_equal(version, count, str(PROTOCOL_VERSION))
    sets = (sizes > 0) & (placed.positions.indexes == NO_INDEX)

    plain = (least == ABSENT) & (seqs == ABSENT)
    sound = (least > 0) & (seqs > 0) & (seqs - 1 <= MAX_LEAST - np.maximum(sizes, 1))
    records = (sets & current & (plain | sound)) | ((sizes == ABSENT) & (plain | (sound & current)))
    odd = ~records | present(properties.get(MARKER), count) | (present(version, count) & ~current)

    starts = _starts(odd | sets, sound, most, least, seqs)
    lasts = np.append(starts[1:], count) - 1
    size = np.where(sets[starts], sizes[starts], lasts - starts + 1)
    runs = _runs(placed.positions, starts, lasts, sets[starts], size, TxnColumns(most, least, seqs))
    return _with_odd(placed, starts, odd[starts], runs) if odd.any() else [*runs]


class TxnColumns(NamedTuple):
    """Transaction and seq of each row; `least` is positive if the row has a transaction."""

    most: NDArray[np.int64]
    least: NDArray[np.int64]
    seqs: NDArray[np.int64]


def _starts(
    alone: NDArray[np.bool_],
    sound: NDArray[np.bool_],
    most: NDArray[np.int64],
    least: NDArray[np.int64],
    seqs: NDArray[np.int64],
) -> NDArray[np.intp]:
    """Rows at which a slice begins; a row that is `alone` is a slice of its own."""
    begins = np.ones(len(alone), np.bool_)
    follows = (most[1:] == most[:-1]) & (least[1:] == least[:-1]) & (~sound[1:] | (seqs[1:] - 1 == seqs[:-1]))
    begins[1:] = alone[1:] | alone[:-1] | ~follows
    return np.flatnonzero(begins)


def _runs(
    positions: Positions,
    starts: NDArray[np.intp],
    ends: NDArray[np.intp],
    sets: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    txns: TxnColumns,
) -> list[RecordSlice]:
    first = positions.take(starts)
    last = positions.take(ends)
    if sets.any():
        first = Positions(first.ledgers, first.entries, np.where(sets, 0, first.indexes))
        last = Positions(last.ledgers, last.entries, np.where(sets, sizes - 1, last.indexes))
    firsts = [*first]
    lasts = firsts if sizes.max(initial=0) == 1 else [*last]
    least = txns.least[starts]
    ids: list[TxnId | None] = [*map(as_txn_id, zip(txns.most[starts].tolist(), least.tolist(), strict=True))]
    for row in np.flatnonzero(least < 0).tolist():
        ids[row] = None
    seqs = np.maximum(txns.seqs[starts], 0).tolist()
    return [*map(as_record_slice, zip(ids, firsts, lasts, seqs, sizes.tolist(), strict=True))]


def _with_odd(
    placed: PlacedBatch, starts: NDArray[np.intp], odd: NDArray[np.bool_], runs: list[RecordSlice]
) -> list[Item]:
    items: list[Item] = [*runs]
    for at in np.flatnonzero(odd).tolist():
        row = int(starts[at])
        message = placed.messages[row]
        items[at] = item = _row(placed.positions[row], message.properties, message.value)
        if isinstance(item, ProtocolStopped):
            return items[: at + 1]
    return items


def _row(position: Position, properties: Mapping[str, str], value: bytes | None) -> Item:
    version = properties.get(VERSION)
    if version is not None and version != str(PROTOCOL_VERSION):
        return UnsupportedProtocol(position, repr(version[:40]))
    if MARKER in properties:
        return _marker(position, properties, value)
    first = last = position
    size, refused = 1, None
    if RECORDS in properties:
        size = number(properties[RECORDS], MAX_SET_RECORDS)
        if size > 0 and position.batch == NO_INDEX:
            first, last = position._replace(batch=0), position._replace(batch=size - 1)
        else:
            refused = f"{_quoted(properties, RECORDS)} at batch index {position.batch}"
    if TXN not in properties and SEQ not in properties:
        if refused is None and RECORDS in properties and version is None:
            refused = f"{RECORDS} without {VERSION}"
        return Undecodable(first, last, refused) if refused else as_record_slice((None, first, last, 0, size))
    return _transactional(properties, first, last, size, refused)


def _transactional(
    properties: Mapping[str, str], first: Position, last: Position, size: int, refused: str | None
) -> Item:
    if refused is None and VERSION not in properties:
        refused = f"{TXN} without {VERSION}"
    seq = number(properties.get(SEQ, ""), MAX_LEAST)
    if refused is None and not 1 <= seq <= MAX_LEAST - size + 1:
        refused = _quoted(properties, SEQ)
    try:
        txn = TxnId.parse(properties.get(TXN, ""))
    except ValueError:
        return Undecodable(first, last, refused or _quoted(properties, TXN))
    return Undecodable(first, last, refused) if refused else as_record_slice((txn, first, last, seq, size))


def _marker(position: Position, properties: Mapping[str, str], value: bytes | None) -> PlacedMarker | UndecodableMarker:
    try:
        if properties[MARKER] != MARKER_TEXT:
            raise ValueError(_quoted(properties, MARKER))
        if VERSION not in properties:
            raise ValueError(f"{MARKER} without {VERSION}")
        return PlacedMarker(position, decode_marker(value))
    except ValueError as error:
        return UndecodableMarker(position, str(error))


def _quoted(properties: Mapping[str, str], name: str) -> str:
    text = properties.get(name)
    return f"no {name}" if text is None else f"{name}={text[:40]!r}"


SEGMENT_SIZE = 8000
DAMAGE_KEPT = 1000
"""The first damaged commits are kept, up to this many; all are counted."""

_COUNTER_OF = {Reason.LATE: "late", Reason.DUPLICATE: "duplicates", Reason.UNDECODABLE: "undecodable"}


class BufferSegments:
    """The unsealed items, the sealed segments not taken yet, and the summaries of all segments not dropped."""

    __slots__ = ("_aborts", "_ranges", "_sealed", "next_number", "segment_size", "summaries")

    def __init__(self, segment_size: int) -> None:
        if segment_size < 1:
            raise ValueError(f"segment_size must be at least 1, got {segment_size}")
        self.segment_size = segment_size
        self.next_number = 1
        self.summaries: deque[SegmentSummary] = deque()
        self._sealed: list[BufferSegment] = []
        self._aborts: list[tuple[TxnId, Position]] = []
        self._ranges: list[tuple[Position, Position]] = []

    @property
    def unsealed_size(self) -> int:
        return len(self._aborts) + len(self._ranges)

    def add_aborts(self, txns: list[TxnId], marker: Position) -> None:
        """Add transactions that one marker aborted."""
        start = 0
        while start < len(txns):
            if self.unsealed_size >= self.segment_size:
                self._seal()
            stop = start + self.segment_size - self.unsealed_size
            self._aborts += [(txn, marker) for txn in txns[start:stop]]
            start = stop

    def add_range(self, first: Position, last: Position, before: Position | None) -> bool:
        """Add suppressed positions; `before` is the end of the message before them.

        Return True if they extended the newest range, False if they are a new one.
        """
        if self._ranges and self._ranges[-1][1] == before and before.ledger == first.ledger:
            self._ranges[-1] = (self._ranges[-1][0], last)
            return True
        if self.unsealed_size >= self.segment_size:
            self._seal()
        self._ranges.append((first, last))
        return False

    @property
    def first_number(self) -> int:
        """The number of the oldest segment not dropped, or of the next one if there is none."""
        return self.next_number - len(self.summaries)

    def unsealed(self) -> Items:
        return Items.of(self._aborts, self._ranges)

    def columns(self) -> SegmentColumns:
        rows = np.array(self.summaries, np.int64).reshape(-1, len(SegmentSummary._fields)).T
        return SegmentColumns(self.first_number, rows[1], rows[2], rows[3])

    @classmethod
    def of(cls, segment_size: int, sealed: SegmentColumns, unsealed: Items) -> BufferSegments:
        """Restored from a snapshot; all sealed segments were taken."""
        segments = cls(segment_size)
        numbers = range(sealed.first, sealed.end)
        rows = zip(
            numbers, sealed.last_ledgers.tolist(), sealed.aborts.tolist(), sealed.suppressed.tolist(), strict=True
        )
        segments.summaries.extend(map(SegmentSummary._make, rows))
        segments.next_number = sealed.end
        ids = map(TxnId, unsealed.most.tolist(), unsealed.least.tolist())
        segments._aborts = list(zip(ids, unsealed.markers, strict=True))
        segments._ranges = list(zip(unsealed.firsts, unsealed.lasts, strict=True))
        return segments

    def take_sealed(self) -> list[BufferSegment]:
        """The segments sealed since the last call: an owner writes them, a reader drops them."""
        taken, self._sealed = self._sealed, []
        return taken

    def trim(self, first_ledger: int) -> list[int]:
        """Drop the oldest segments, if all their items are in ledgers below `first_ledger`; return their numbers.

        The numbers ascend. Segments that were not taken yet stay.
        """
        untaken = self.next_number - len(self._sealed)
        dropped: list[int] = []
        while self.summaries and self.summaries[0].last_ledger < first_ledger and self.summaries[0].number < untaken:
            dropped.append(self.summaries.popleft().number)
        return dropped

    def _seal(self) -> None:
        segment = BufferSegment(self.next_number, self.unsealed())
        self._sealed.append(segment)
        self.summaries.append(segment.summary)
        self.next_number += 1
        self._aborts, self._ranges = [], []


class TransactionBuffer:
    """What is visible in one topic, as of the last message applied.

    `segment_size` is the number of aborts and suppressed ranges in a sealed segment. `applied` is the end of the last
    applied message; None before the first. `transactional`: whether any message applied since it was created or
    restored belongs to a transaction, even if it can't be decoded; an epoch marker does not. `unregistered`: the topic
    has had no transactions, so dead letters are ordinary records.
    `ended`: the transactions that the last applied messages have ended. `decided_position`: all messages up to this one
    are decided; None if there are none. `max_read_position`: the same, but None while `replaying`,
    before the end given to `replay_until` is reached.
    """

    __slots__ = (
        "_stopped",
        "_until",
        "aborted",
        "applied",
        "coordinators",
        "counters",
        "damage",
        "decided_position",
        "ended",
        "first_ledger",
        "max_read_position",
        "ongoing",
        "replaying",
        "segments",
        "suppressed",
        "transactional",
        "unregistered",
    )

    def __init__(self, segment_size: int = SEGMENT_SIZE) -> None:
        self.aborted = AbortedSet()
        self.suppressed = SuppressedRanges()
        self.ongoing = Ongoing()
        self.ended: list[OpenTxn] = []
        self.coordinators: dict[int, CoordinatorState] = {}
        self.segments = BufferSegments(segment_size)
        self.first_ledger = 0
        self.damage: list[Damage] = []
        self.counters = Counters()
        self.applied: Position | None = None
        self.decided_position: Position | None = None
        self.max_read_position: Position | None = None
        self.replaying = False
        self.transactional = self.unregistered = False
        self._until: Position | None = None
        self._stopped: ProtocolStopped | None = None

    @classmethod
    def restore(cls, state: BufferState, segments: Iterable[BufferSegment]) -> TransactionBuffer:
        """The buffer whose `snapshot_state()` was `state`; `segments`: all that the state names, ascending.

        Raises SegmentMismatch for any others.
        """
        buffer = cls(state.segment_size)
        buffer.segments = BufferSegments.of(state.segment_size, state.segments, state.unsealed)
        buffer.ongoing = Ongoing.of(state.ongoing)
        buffer.coordinators = coordinator_states(state.coordinators)
        buffer.first_ledger = state.first_ledger
        buffer.damage = list(state.damage)
        buffer.counters = state.counters
        buffer.applied = state.applied
        expected = iter(buffer.segments.summaries)
        for segment in segments:
            if segment.summary != next(expected, None):
                raise SegmentMismatch(
                    f"segment {segment.number} is not the one that the state names: recover from an older snapshot"
                )
            buffer._load(segment.items)
        missing = next(expected, None)
        if missing is not None:
            raise SegmentMismatch(f"segment {missing.number} is missing: recover from an older snapshot")
        buffer._load(state.unsealed)
        buffer._decide()
        return buffer

    def snapshot_state(self) -> BufferState:
        """A copy of all but the sealed segments; it names these, also those that were not taken yet."""
        return BufferState(
            segment_size=self.segments.segment_size,
            applied=self.applied,
            max_read=self.decided_position,
            first_ledger=self.first_ledger,
            ongoing=self.ongoing.columns(),
            coordinators=coordinator_columns(self.coordinators),
            segments=self.segments.columns(),
            unsealed=self.segments.unsealed(),
            counters=self.counters,
            damage=tuple(self.damage),
        )

    # Queries

    def is_aborted(self, txn: TxnId) -> bool:
        return txn in self.aborted

    def outcome(self, txn: TxnId) -> Outcome | None:
        """How a transaction ended here; None if it did not, or is at or below the low-water mark (forgotten)."""
        coordinator = self.coordinators.get(txn.most)
        return None if coordinator is None else coordinator.outcome(txn.least)

    def has_ended(self, txn: TxnId) -> bool:
        coordinator = self.coordinators.get(txn.most)
        return txn not in self.ongoing and coordinator is not None and coordinator.has_ended(txn.least)

    # Input

    def replay_until(self, end: Position | None) -> None:
        """Make nothing visible until the message at `end` is applied (None: the log is empty)."""
        self._until = end
        self._decide()

    def apply_batch(self, placed: PlacedBatch) -> list[Effect]:
        """Apply the messages that follow the applied ones; return the effects in log order.

        Raises ProtocolStopped (rule 7) with the effects of the messages before; each later call raises it too.
        """
        if self._stopped is not None:
            raise self._stopped
        effects: list[Effect] = []
        if self.ended:
            self.ended = []
        if not len(placed.publish_times):
            return effects
        first = placed.positions.first
        if self.applied is not None and first <= self.applied:
            raise OutOfOrder(first, self.applied)
        if self.unregistered:
            placed = replace(placed, messages=without_copies(placed.messages))
        for kind, items in groupby(decode(placed), type):
            if kind is RecordSlice:
                self._apply_runs(items, placed.positions, effects)  # type: ignore[arg-type]  # by their kind
                continue
            for item in items:
                if isinstance(item, PlacedMarker):
                    self._apply_marker(item.position, item.marker, effects)
                elif isinstance(item, Undecodable):  # rule 7
                    self.transactional = True
                    self._suppress(Reason.UNDECODABLE, None, item.first, item.last, 1, effects)
                    self.applied = item.last
                elif isinstance(item, ProtocolStopped):
                    item.effects = tuple(effects)
                    self._stopped = item
                    self._decide()
                    raise item
        self._decide()
        return effects

    def trim(self, first_ledger: int) -> list[int]:
        """Drop what only records of ledgers below `first_ledger` need: these ledgers are deleted.

        Return the numbers of the dropped segments, ascending; pass each segment to `forget`. Only the oldest
        segments are dropped, whole, and only after `segments.take_sealed`. Which transactions have ended stays known.
        """
        if first_ledger > self.first_ledger:
            self.first_ledger = first_ledger
            self.suppressed.trim(first_ledger)
        return self.segments.trim(first_ledger)

    def forget(self, segment: BufferSegment) -> None:
        """Remove the ids of a dropped segment from the aborted set; a second call changes nothing."""
        if segment.number >= self.segments.first_number:
            raise ValueError(f"segment {segment.number} was not dropped")
        self.aborted.discard(segment.items.most, segment.items.least)

    # The fold

    def _decide(self) -> None:
        """What is applied, what is ongoing or the end of the replay has changed."""
        oldest = self.ongoing.oldest()
        self.decided_position = self.applied if oldest is None else oldest.before
        self.replaying = self._until is not None and (self.applied is None or self.applied < self._until)
        self.max_read_position = None if self.replaying else self.decided_position

    def _apply_runs(self, runs: Iterable[RecordSlice], positions: Positions, effects: list[Effect]) -> None:
        ongoing = self.ongoing
        for run in runs:
            txn, first, last, first_seq, size = run
            if txn is not None:
                self.transactional = True
                entry = ongoing.get(txn)
                if entry is None:
                    coordinator = self.coordinators.get(txn.most)
                    if coordinator is not None and coordinator.has_ended(txn.least):  # rule 1
                        self._suppress(Reason.LATE, txn, first, last, size, effects)
                    else:
                        ongoing[txn] = OpenTxn(txn, first, self.applied, first_seq + size - 1, size, last)
                else:
                    repeated = min(size, entry.highest - first_seq + 1)
                    if repeated > 0:  # rule 2
                        end = last if repeated == size else _record_at(run, repeated - 1, positions)
                        self._suppress(Reason.DUPLICATE, txn, first, end, repeated, effects)
                    if repeated < size:
                        entry.highest = first_seq + size - 1
                        entry.accepted += size - max(repeated, 0)
                        entry.last = last
            self.applied = last

    def _apply_marker(self, position: Position, marker: Marker, effects: list[Effect]) -> None:
        self.transactional = self.transactional or bool(marker.items)
        state = self.coordinators.get(marker.coordinator)
        if state is None:
            state = self.coordinators[marker.coordinator] = CoordinatorState()
        if not marker.decided and marker.epoch < state.epoch:  # rule 4
            self._count(void=len(marker.items))
            effects += [Void(txn, outcome, position, marker.epoch, state.epoch) for txn, outcome, _ in marker.items]
        else:
            self._end(marker, state, position, effects)
        state.raise_low_water_mark(marker.low_water_mark)  # rule 5
        if marker.epoch > state.epoch:
            state.epoch = marker.epoch
            effects.append(EpochRaised(marker.coordinator, marker.epoch, position))
        self.applied = position

    def _end(self, marker: Marker, state: CoordinatorState, position: Position, effects: list[Effect]) -> None:
        committed: set[int] = set()
        aborted: set[int] = set()
        hidden: list[TxnId] = []
        for txn, outcome, records in marker.items:
            least = txn.least
            entry = self.ongoing.pop(txn, None)
            if entry is not None:
                accepted = entry.accepted
                self.ended.append(entry)
            elif state.has_ended(least) or least in committed or least in aborted:  # rule 3
                effects.append(Ignored(txn, outcome, position))
                continue
            else:
                accepted = 0
            if outcome:
                committed.add(least)
                if accepted != records:  # rule 6
                    self._report(Damage(txn, position, records, accepted), effects)
            else:
                aborted.add(least)
                if entry is not None:
                    hidden.append(txn)
            effects.append(as_ended((txn, outcome, position, marker.decided, accepted)))
        state.add(committed, aborted)
        if hidden:
            self.aborted.add(hidden)
            self.segments.add_aborts(hidden, position)

    def _suppress(
        self, reason: Reason, txn: TxnId | None, first: Position, last: Position, size: int, effects: list[Effect]
    ) -> None:
        self._count(**{_COUNTER_OF[reason]: size})
        longer = self.segments.add_range(first, last, self.applied)
        if first.ledger >= self.first_ledger:
            if longer:
                self.suppressed.extend(last)
            else:
                self.suppressed.add(first, last)
        effects.append(Suppressed(reason, txn, first, last, size))

    def _report(self, damage: Damage, effects: list[Effect]) -> None:
        self._count(damaged=1)
        if len(self.damage) < DAMAGE_KEPT:
            self.damage.append(damage)
        effects.append(damage)

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self.counters, name) + count for name, count in more.items()}
        self.counters = self.counters._replace(**counted)

    def _load(self, items: Items) -> None:
        self.aborted.update(items.most, items.least)
        for first, last in zip(items.firsts, items.lasts, strict=True):
            if first.ledger >= self.first_ledger:
                self.suppressed.add(first, last)


def _record_at(run: RecordSlice, index: int, positions: Positions) -> Position:
    """Position of one record of a slice; `positions`: of the messages that the slice was read from."""
    row = positions.search(run.first)
    if row < len(positions) and positions[row] == run.first:
        return positions[row + index]
    return run.first._replace(batch=index)  # a record set: its message is before its records
