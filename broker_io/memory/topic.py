"""One topic in memory: a raw log that keeps everything until it is trimmed, and a compacted view.

Not thread-safe; `MemoryBroker` calls it under the lock of the log.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from broker_io.batch import Batch, PlacedBatch, PlacedMessage
from broker_io.port import Ledger
from broker_io.position import EARLIEST, Position, Positions


@dataclass(slots=True)
class LedgerLog:
    """One ledger: batches of messages that were appended together."""

    number: int
    batches: list[PlacedBatch] = field(default_factory=list)
    entries: int = 0
    bytes: int = 0
    closed: bool = False

    def describe(self, original: int) -> Ledger:
        return Ledger(self.number, self.entries, self.bytes, self.closed, original=self.number == original)


class TopicLog:
    """The messages of one incarnation of a topic."""

    def __init__(self, incarnation: str, new_ledger: Callable[[], int], ledger_entries: int) -> None:
        self.incarnation = incarnation
        self.deleted = False
        self.ledgers = [LedgerLog(new_ledger())]
        self.original = self.ledgers[0].number
        self.last: Position | None = None
        self.lost = EARLIEST  # the last message that trimming dropped
        self.horizon = EARLIEST  # compaction saw everything up to here
        self.waiting: dict[object, Callable[[], None]] = {}
        """Callbacks of readers, each called once when there are messages or the topic is gone."""
        self._compacted: list[PlacedBatch] = []
        self._new_ledger = new_ledger
        self._ledger_entries = ledger_entries

    def append(self, batch: Batch, now_ms: int) -> Positions:
        """Append messages, in as many ledgers as they need, and return their positions."""
        parts: list[Positions] = []
        sizes = batch.sizes()
        start = 0
        while start < len(batch):
            newest = self.ledgers[-1]
            if newest.entries >= self._ledger_entries:
                self.roll()
                continue
            stop = min(len(batch), start + self._ledger_entries - newest.entries)
            positions = Positions.consecutive(newest.number, newest.entries, stop - start, now_ms)
            times = np.full(stop - start, now_ms, np.int64)
            newest.batches.append(PlacedBatch(positions, times, batch.take(slice(start, stop))))
            newest.entries += stop - start
            newest.bytes += int(sizes[start:stop].sum())
            parts.append(positions)
            start = stop
        if parts:
            self.last = parts[-1].last
            self.notify()
        return Positions.concat(parts or [Positions.of([])])

    def notify(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for callback in waiting.values():
            callback()

    def roll(self) -> None:
        if self.ledgers[-1].entries:
            self.ledgers[-1].closed = True
            self.ledgers.append(LedgerLog(self._new_ledger()))

    def trim(self, first_ledger: int) -> None:
        while len(self.ledgers) > 1 and self.ledgers[0].number < first_ledger:
            ledger = self.ledgers.pop(0)
            self.lost = ledger.batches[-1].positions.last

    def compact(self) -> None:
        """Build the compacted view of all messages, trimmed ones included; the raw log stays as it is."""
        newest: dict[bytes, PlacedMessage] = {}
        batches = [*self.batches_after(EARLIEST, compacted=True)]
        for batch in batches:
            for placed in batch:
                if placed.message.key is not None:
                    newest[placed.message.key] = placed
        kept = {placed.position for placed in newest.values() if placed.message.value is not None}
        survivors = (
            batch.take(np.array([position in kept for position in batch.positions], np.bool_)) for batch in batches
        )
        self._compacted = [batch for batch in survivors if len(batch)]
        self.horizon = self.last or EARLIEST

    def batches_after(self, cursor: Position, *, compacted: bool = False) -> Iterator[PlacedBatch]:
        """All messages after `cursor`, batch by batch."""
        if compacted:
            yield from _cut(self._compacted, cursor)
            cursor = max(cursor, self.horizon)
        first = bisect.bisect_left(self.ledgers, cursor.ledger, key=lambda ledger: ledger.number)
        for ledger in self.ledgers[first:]:
            yield from _cut(ledger.batches, cursor)

    def read(self, cursor: Position, limit: int, *, compacted: bool) -> PlacedBatch | None:
        """Up to `limit` messages after `cursor`, all of one ledger; None if there are none."""
        gathered: list[PlacedBatch] = []
        missing = limit
        for batch in self.batches_after(cursor, compacted=compacted):
            if missing <= 0 or (gathered and batch.positions.first.ledger != gathered[0].positions.first.ledger):
                break
            gathered.append(batch if len(batch) <= missing else batch.take(slice(0, missing)))
            missing -= len(batch)
        return PlacedBatch.concat(gathered) if gathered else None

    def lost_after(self, cursor: Position, *, compacted: bool) -> bool:
        """Whether messages after `cursor` were trimmed that the compacted view does not cover."""
        return cursor < self.lost and not (compacted and self.lost <= self.horizon)

    def first_position(self) -> Position | None:
        return next((batch.positions.first for batch in self.batches_after(EARLIEST)), None)

    def position_at(self, time_ms: int) -> Position | None:
        for batch in self.batches_after(EARLIEST):
            if batch.publish_times[0] >= time_ms:  # a batch was published at one time
                return batch.positions.first
        return None


def _cut(batches: list[PlacedBatch], cursor: Position) -> Iterator[PlacedBatch]:
    first = bisect.bisect_right(batches, cursor, key=lambda batch: batch.positions.last)
    for batch in batches[first:]:
        before = batch.positions.search(cursor, right=True)
        yield batch.take(slice(before, len(batch))) if before else batch
