"""The state of a transaction buffer as plain columns, as a snapshot stores it, and its sealed segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap64

from broker_io.position import EARLIEST, Int64s, Position, Positions
from txnbuffer.buffer.effects import Damage
from txnbuffer.model import TxnId


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Columns of a aborts and r ranges, each in log order.

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
    """What the state of a buffer keeps of a sealed part."""

    number: int
    last_ledger: int
    aborts: int
    suppressed: int


@dataclass(frozen=True, slots=True, eq=False)
class BufferSegment:
    """A sealed part; numbers start at 1."""

    number: int
    items: Items

    @property
    def summary(self) -> SegmentSummary:
        items = self.items
        return SegmentSummary(self.number, items.last.ledger, len(items.least), len(items.firsts))


NOWHERE = EARLIEST
"""Stands in a column of positions for "none": what is before the first message of a log."""


@dataclass(frozen=True, slots=True, eq=False)
class OngoingColumns:
    """n ongoing transactions, oldest first; `befores` is NOWHERE for one that began with the log."""

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
    """k coordinators, ascending by `most`; the bitmaps in roaring's portable 64-bit form.

    Equal sets can have different bytes: roaring may store a few numbers as a list or as a run of the same size.
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
    """The p parts that still count, with the numbers `first`, `first + 1`, ...: ledger of the last item, counts."""

    first: int
    last_ledgers: Int64s
    aborts: Int64s
    suppressed: Int64s

    def __len__(self) -> int:
        return len(self.last_ledgers)

    @property
    def end(self) -> int:
        """The number that the next part will get."""
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
    """State between two messages: all up to `applied` is in, nothing after it.

    `max_read` follows from the rest; it is kept for callers that need only it. Suppressed ranges of
    ledgers below `first_ledger` no longer count. `damage` holds the first damaged commits, `counters`
    the number of all.
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
