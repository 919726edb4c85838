"""The values of a transaction buffer: its state as plain columns, as a snapshot stores it, its sealed segments, and the
effects of applying messages. Records that are simply accepted have no effect.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from pyroaring import BitMap64

from broker_io.position import EARLIEST, Int64s, Position, Positions
from txnbuffer.model import Outcome, TxnId


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Columns of `a` aborts and `r` ranges, each in log order.

    `most`, `least`: int64[a], the aborted transactions; `markers`: the a positions of their markers.
    `firsts`, `lasts`: the r ranges of suppressed positions, ends included, each within one ledger.
    """

    most: Int64s
    least: Int64s
    markers: Positions
    firsts: Positions
    lasts: Positions

    @classmethod
    def of(
        cls, aborts: Iterable[tuple[TxnId, Position]] = (), ranges: Iterable[tuple[Position, Position]] = ()
    ) -> Items:
        aborted, suppressed = list(aborts), list(ranges)
        ids = np.array([txn for txn, _ in aborted], np.int64).reshape(-1, 2)
        return cls(
            ids[:, 0].copy(),
            ids[:, 1].copy(),
            Positions.of([marker for _, marker in aborted]),
            Positions.of([first for first, _ in suppressed]),
            Positions.of([last for _, last in suppressed]),
        )

    def __len__(self) -> int:
        return len(self.least) + len(self.firsts)

    @property
    def first(self) -> Position:
        """Position of the first item: of its marker, or of its first suppressed record."""
        return min(column.first for column in (self.markers, self.firsts) if len(column))

    @property
    def last(self) -> Position:
        return max(column.last for column in (self.markers, self.lasts) if len(column))


class SegmentSummary(NamedTuple):
    """What the state of a buffer keeps of a sealed segment."""

    number: int
    last_ledger: int
    aborts: int
    suppressed: int


@dataclass(frozen=True, slots=True, eq=False)
class BufferSegment:
    """A sealed segment; numbers start at 1."""

    number: int
    items: Items

    @property
    def summary(self) -> SegmentSummary:
        items = self.items
        return SegmentSummary(self.number, items.last.ledger, len(items.least), len(items.firsts))


NOWHERE = EARLIEST
"""No position, in a column of positions: before the first message of a log."""


@dataclass(frozen=True, slots=True, eq=False)
class OngoingColumns:
    """`n` ongoing transactions, oldest first; `befores` is NOWHERE for one that began with the log."""

    most: Int64s
    least: Int64s
    firsts: Positions
    befores: Positions
    highest: Int64s
    accepted: Int64s

    def __len__(self) -> int:
        return len(self.least)


@dataclass(frozen=True, slots=True, eq=False)
class CoordinatorColumns:
    """`k` coordinators, ascending by `most`; the bitmaps in Roaring's portable 64-bit form.

    Equal sets can have different bytes: Roaring may store a few numbers as a list or as a run of the same size.
    """

    most: Int64s
    low_water_marks: Int64s
    epochs: Int64s
    committed: tuple[bytes, ...]
    aborted: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.most)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Summaries of the segments `first`, `first + 1`, … that are not dropped: ledger of the last item, counts."""

    first: int
    last_ledgers: Int64s
    aborts: Int64s
    suppressed: Int64s

    def __len__(self) -> int:
        return len(self.last_ledgers)

    @property
    def end(self) -> int:
        """The number that the next segment will get."""
        return self.first + len(self)


class Counters(NamedTuple):
    """Counted since the topic's first message: records, except `undecodable` messages and `void` marker items."""

    late: int = 0
    duplicates: int = 0
    undecodable: int = 0
    void: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BufferState:
    """State between two messages: it includes all up to `applied`, nothing after it.

    `max_read` follows from the rest; it is kept for callers that need only it. Suppressed ranges of
    ledgers below `first_ledger` are dropped. `damage` holds the first damaged commits, `counters` the
    number of all.
    """

    segment_size: int
    applied: Position | None
    max_read: Position | None
    first_ledger: int
    ongoing: OngoingColumns
    coordinators: CoordinatorColumns
    segments: SegmentColumns
    unsealed: Items
    counters: Counters
    damage: tuple[Damage, ...]

    def differences(self, other: BufferState) -> list[str]:
        """One line for each field that differs, with both values; empty if the states are equal."""
        mine, theirs = _plain("", self), _plain("", other)
        return [f"{name}: {mine[name]!r} != {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


def _plain(name: str, value: object) -> dict[str, object]:
    if isinstance(value, CoordinatorColumns):
        sets = {
            f"{name}.{what}": [BitMap64.deserialize(bitmap).to_array().tolist() for bitmap in bitmaps]
            for what, bitmaps in (("committed", value.committed), ("aborted", value.aborted))
        }
        return {
            f"{name}.most": value.most.tolist(),
            f"{name}.low_water_marks": value.low_water_marks.tolist(),
            f"{name}.epochs": value.epochs.tolist(),
            **sets,
        }
    if isinstance(value, np.ndarray):
        return {name: value.tolist()}
    if is_dataclass(value):
        plain: dict[str, object] = {}
        for field in fields(value):
            plain |= _plain(f"{name}.{field.name}" if name else field.name, getattr(value, field.name))
        return plain
    return {name: value}


class Reason(enum.Enum):
    """Why records are suppressed."""

    LATE = "late"
    DUPLICATE = "duplicate"
    UNDECODABLE = "undecodable"


class Suppressed(NamedTuple):
    """`size` records (undecodable: messages) from `first` to `last` will never be visible.

    `txn` is None if it can't be read.
    """

    reason: Reason
    txn: TxnId | None
    first: Position
    last: Position
    size: int


class TransactionEnded(NamedTuple):
    """A transaction ended here by the marker at `position`; `accepted` of its records were accepted before."""

    txn: TxnId
    outcome: Outcome
    position: Position
    decided: bool
    accepted: int


class Ignored(NamedTuple):
    """A marker's item without effect: its transaction had ended here."""

    txn: TxnId
    outcome: Outcome
    position: Position


class Void(NamedTuple):
    """A one-phase item of an owner with `epoch`, after an owner with the epoch `newest` was seen."""

    txn: TxnId
    outcome: Outcome
    position: Position
    epoch: int
    newest: int


class Damage(NamedTuple):
    """A commit that expects `expected` records in this topic found `accepted`."""

    txn: TxnId
    position: Position
    expected: int
    accepted: int


class EpochRaised(NamedTuple):
    """A marker of a newer owner of a coordinator was read in this topic."""

    coordinator: int
    epoch: int
    position: Position


Effect: TypeAlias = Suppressed | TransactionEnded | Ignored | Void | Damage | EpochRaised
