"""Aborted transactions and suppressed ranges as columns, and the sealed parts that are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from broker_io.position import Int64s, Position, Positions
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


class PartSummary(NamedTuple):
    """What the state of a buffer keeps of a sealed part."""

    number: int
    last_ledger: int
    aborts: int
    suppressed: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A sealed part; numbers start at 1."""

    number: int
    items: Items

    @property
    def summary(self) -> PartSummary:
        items = self.items
        return PartSummary(self.number, items.last.ledger, len(items.least), len(items.firsts))
