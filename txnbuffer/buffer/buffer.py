"""The transaction buffer of one topic: a fold over the messages of its log.

The rules of the log protocol that it applies, in log order; the code names them by their numbers:

1. A record of a transaction that has ended here is late: suppressed and counted. A transaction has ended
   here if a marker said so, or if it is at or below the low-water mark and not ongoing.
2. A record whose seq is not above the highest accepted of its transaction is a duplicate: suppressed
   and counted.
3. An item of a marker ends its transaction, unless that has ended here: then it is ignored. An ABORT without
   records is stored as an end, not as an abort.
4. A one-phase item of an epoch older than the newest seen here from that coordinator is void. A decided
   one holds whatever its epoch.
5. Of a marker the items count first, then its low-water mark and epoch. A message is applied whole.
6. A COMMIT is damage if the number of accepted records differs from the number in the marker.
7. A marker that can't be decoded and a message of another protocol version stop the topic; a record
   that can't be decoded is suppressed and counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_io.batch import PlacedBatch
from broker_io.position import Position, Positions
from txnbuffer.buffer.decoding import PlacedMarker, decode
from txnbuffer.buffer.effects import Damage, Effect, EpochRaised, Ignored, Reason, Suppressed, TransactionEnded, Void
from txnbuffer.buffer.segments import BufferSegments
from txnbuffer.buffer.sets import (
    AbortedSet,
    CoordinatorState,
    Ongoing,
    OpenTxn,
    SuppressedRanges,
    coordinator_columns,
    coordinator_states,
)
from txnbuffer.buffer.state import BufferSegment, BufferState, Counters, Items
from txnbuffer.errors import OutOfOrder, ProtocolStopped, SegmentMismatch
from txnbuffer.model import Marker, Outcome, RecordSlice, TxnId, Undecodable

SEGMENT_SIZE = 8000
DAMAGE_KEPT = 1000
"""The first damaged commits are kept, up to this many; all are counted."""

_COUNTER_OF = {Reason.LATE: "late", Reason.DUPLICATE: "duplicates", Reason.UNDECODABLE: "undecodable"}


class TransactionBuffer:
    """What is visible in one topic, as of the last message applied.

    `segment_size` is the number of aborts and suppressed ranges in a sealed part.
    """

    __slots__ = (
        "_applied",
        "_counters",
        "_stopped",
        "_until",
        "aborted",
        "coordinators",
        "damage",
        "first_ledger",
        "ongoing",
        "segments",
        "suppressed",
    )

    def __init__(self, segment_size: int = SEGMENT_SIZE) -> None:
        self.aborted = AbortedSet()
        self.suppressed = SuppressedRanges()
        self.ongoing = Ongoing()
        self.coordinators: dict[int, CoordinatorState] = {}
        self.segments = BufferSegments(segment_size)
        self.first_ledger = 0
        self.damage: list[Damage] = []
        self._counters = Counters()
        self._applied: Position | None = None
        self._until: Position | None = None
        self._stopped: ProtocolStopped | None = None

    @classmethod
    def restore(cls, state: BufferState, segments: Iterable[BufferSegment]) -> TransactionBuffer:
        """The buffer whose `snapshot_state()` was `state`; `segments` are all that it names, ascending.

        Raises SegmentMismatch if they are not.
        """
        buffer = cls(state.segment_size)
        buffer.segments = BufferSegments.of(state.segment_size, state.segments, state.unsealed)
        buffer.ongoing = Ongoing.of(state.ongoing)
        buffer.coordinators = coordinator_states(state.coordinators)
        buffer.first_ledger = state.first_ledger
        buffer.damage = list(state.damage)
        buffer._counters = state.counters
        buffer._applied = state.applied
        expected = iter(buffer.segments.summaries)
        for segment in segments:
            if segment.summary != next(expected, None):
                raise SegmentMismatch(
                    f"part {segment.number} is not the one that the state names: recover from an older snapshot"
                )
            buffer._load(segment.items)
        missing = next(expected, None)
        if missing is not None:
            raise SegmentMismatch(f"part {missing.number} is missing: recover from an older snapshot")
        buffer._load(state.unsealed)
        return buffer

    def snapshot_state(self) -> BufferState:
        """All but the sealed parts, copied. Parts that `take_sealed` has not given out yet belong to it."""
        return BufferState(
            segment_size=self.segments.segment_size,
            applied=self._applied,
            max_read=self.decided_position,
            first_ledger=self.first_ledger,
            ongoing=self.ongoing.columns(),
            coordinators=coordinator_columns(self.coordinators),
            segments=self.segments.columns(),
            unsealed=self.segments.unsealed(),
            counters=self._counters,
            damage=tuple(self.damage),
        )

    # Queries

    @property
    def applied(self) -> Position | None:
        """The end of the last applied message; None before the first."""
        return self._applied

    @property
    def max_read_position(self) -> Position | None:
        """All messages up to this one are decided; None if there are none, or while a replay is under way."""
        return None if self.replaying else self.decided_position

    @property
    def decided_position(self) -> Position | None:
        """`max_read_position`, also while a replay is under way."""
        oldest = self.ongoing.oldest()
        return self._applied if oldest is None else oldest.before

    @property
    def replaying(self) -> bool:
        """Whether the end given to `replay_until` is not reached yet."""
        return self._until is not None and (self._applied is None or self._applied < self._until)

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def transactional(self) -> bool:
        """Whether any applied message belongs to a transaction, even if it can't be decoded."""
        return bool(self.coordinators or len(self.ongoing) or self._counters.undecodable)

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
        """Show nothing until the message at `end` is applied (None: the log is empty)."""
        self._until = end

    def apply_batch(self, placed: PlacedBatch) -> list[Effect]:
        """Apply the messages that follow the applied ones; returns the effects in log order.

        Raises ProtocolStopped (rule 7) with the effects of the messages before; from then on each call raises it.
        """
        if self._stopped is not None:
            raise self._stopped
        effects: list[Effect] = []
        if not len(placed):
            return effects
        if self._applied is not None and placed.positions.first <= self._applied:
            raise OutOfOrder(placed.positions.first, self._applied)
        for item in decode(placed):
            if isinstance(item, RecordSlice):
                self._apply_run(item, placed.positions, effects)
            elif isinstance(item, PlacedMarker):
                self._apply_marker(item.position, item.marker, effects)
            elif isinstance(item, Undecodable):  # rule 7
                self._suppress(Reason.UNDECODABLE, None, item.first, item.last, 1, effects)
                self._applied = item.last
            else:
                item.effects = tuple(effects)
                self._stopped = item
                raise item
        return effects

    def take_sealed(self) -> list[BufferSegment]:
        """The parts sealed since the last call: an owner writes them, a reader drops them."""
        return self.segments.take_sealed()

    def trim(self, first_ledger: int) -> list[int]:
        """Drop what only records of ledgers below `first_ledger` need: these ledgers are deleted.

        Returns the numbers of the parts dropped, ascending; hand each to `forget`. Only whole parts go,
        from the front, and only those that were taken. Which transactions have ended stays known.
        """
        if first_ledger > self.first_ledger:
            self.first_ledger = first_ledger
            self.suppressed.trim(first_ledger)
        return self.segments.trim(first_ledger)

    def forget(self, segment: BufferSegment) -> None:
        """Take the ids of a dropped part out of the aborted set; doing so again changes nothing."""
        if segment.number >= self.segments.first_number:
            raise ValueError(f"part {segment.number} was not dropped")
        self.aborted.discard(segment.items.most, segment.items.least)

    # The fold

    def _apply_run(self, run: RecordSlice, positions: Positions, effects: list[Effect]) -> None:
        txn, first, last, first_seq, size = run
        if txn is not None:
            entry = self.ongoing.get(txn)
            if entry is None:
                coordinator = self.coordinators.get(txn.most)
                if coordinator is not None and coordinator.has_ended(txn.least):  # rule 1
                    self._suppress(Reason.LATE, txn, first, last, size, effects)
                else:
                    self.ongoing.open(OpenTxn(txn, first, self._applied, first_seq + size - 1, size))
            else:
                repeated = min(size, entry.highest - first_seq + 1)
                if repeated > 0:  # rule 2
                    end = last if repeated == size else _record_at(run, repeated - 1, positions)
                    self._suppress(Reason.DUPLICATE, txn, first, end, repeated, effects)
                if repeated < size:
                    entry.highest = first_seq + size - 1
                    entry.accepted += size - max(repeated, 0)
        self._applied = last

    def _apply_marker(self, position: Position, marker: Marker, effects: list[Effect]) -> None:
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
        self._applied = position

    def _end(self, marker: Marker, state: CoordinatorState, position: Position, effects: list[Effect]) -> None:
        committed: set[int] = set()
        aborted: set[int] = set()
        hidden: list[TxnId] = []
        for txn, outcome, records in marker.items:
            least = txn.least
            entry = self.ongoing.end(txn)
            if entry is not None:
                accepted = entry.accepted
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
            effects.append(TransactionEnded(txn, outcome, position, marker.decided, accepted))
        state.add(committed, aborted)
        if hidden:
            self.aborted.add(hidden)
            self.segments.add_aborts(hidden, position)
        self.ongoing.tidy()

    def _suppress(
        self, reason: Reason, txn: TxnId | None, first: Position, last: Position, size: int, effects: list[Effect]
    ) -> None:
        self._count(**{_COUNTER_OF[reason]: size})
        longer = self.segments.add_range(first, last, self._applied)
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
        counted = {name: getattr(self._counters, name) + count for name, count in more.items()}
        self._counters = self._counters._replace(**counted)

    def _load(self, items: Items) -> None:
        self.aborted.update(items.most, items.least)
        for first, last in zip(items.firsts, items.lasts, strict=True):
            if first.ledger >= self.first_ledger:
                self.suppressed.add(first, last)


def _record_at(run: RecordSlice, index: int, positions: Positions) -> Position:
    """Position of one record of a run; `positions` are those of the messages that it was read from."""
    row = positions.search(run.first)
    if row < len(positions) and positions[row] == run.first:
        return positions[row + index]
    return run.first._replace(batch=index)  # a record set: its message is before its records
