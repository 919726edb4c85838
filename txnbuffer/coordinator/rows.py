"""Decisions by the row and by the column: a new owner reads them by the hundred thousand, and most are done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from pyroaring import BitMap64

from txnbuffer.coordinator.progress import Progress
from txnbuffer.model import Outcome

_OUTCOMES = (Outcome.ABORT, Outcome.COMMIT)


class Row(NamedTuple):
    """The decision of one TxnId; `topics` and the `records` in each as far as they are known."""

    least: int
    outcome: Outcome
    topics: tuple[str, ...]
    records: tuple[int, ...]


class Rows(Sequence[Row]):
    """Rows as the log has them; one is made when it is asked for.

    `outcomes`: a byte each. `counts`: how many topics each names. `named` has those of all, one behind the other, as
    places in `topics`, and `records` how many records each.
    """

    __slots__ = ("counts", "least", "named", "outcomes", "records", "topics")

    def __init__(
        self,
        least: Sequence[int],
        outcomes: bytes,
        counts: Sequence[int],
        topics: Sequence[str],
        named: Sequence[int],
        records: Sequence[int],
    ) -> None:
        self.least = least
        self.outcomes = outcomes
        self.counts = counts
        self.topics = topics
        self.named = named
        self.records = records

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """The columns of rows."""
        if isinstance(rows, Rows):
            return rows
        table: dict[str, int] = {}
        named = [table.setdefault(topic, len(table)) for row in rows for topic in row.topics]
        return cls(
            [row.least for row in rows],
            bytes([row.outcome for row in rows]),
            [len(row.topics) for row in rows],
            list(table),
            named,
            [count for row in rows for count in row.records],
        )

    def __len__(self) -> int:
        return len(self.least)

    def __iter__(self) -> Iterator[Row]:
        ends = itertools.accumulate(self.counts, initial=0)
        for least, outcome, (first, last) in zip(self.least, self.outcomes, itertools.pairwise(ends), strict=True):
            yield self._row(least, outcome, first, last)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Rows | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def split(self, progress: Progress) -> tuple[BitMap64, BitMap64, list[Row]]:
        """The ids that were aborted, those that committed, and the rows of those that are not settled."""
        ids = np.array(self.least, np.uint64)
        counts = np.array(self.counts, np.int64)
        ends = np.cumsum(counts)
        unsettled = [
            index
            for index in np.flatnonzero((ids > progress.low_water_mark) & (counts > 0)).tolist()
            if not progress.has_ended(self.least[index])
        ]
        undone = [
            self._row(self.least[at], self.outcomes[at], int(ends[at] - counts[at]), int(ends[at])) for at in unsettled
        ]
        done = np.ones(len(ids), np.bool_)
        done[unsettled] = False
        committed = np.frombuffer(self.outcomes, np.uint8) == Outcome.COMMIT
        return BitMap64(ids[done & ~committed]), BitMap64(ids[done & committed]), undone

    def _row(self, least: int, outcome: int, first: int, last: int) -> Row:
        topics = tuple([self.topics[at] for at in self.named[first:last]])
        return Row(least, _OUTCOMES[outcome], topics, tuple(self.records[first:last]))
