"""Applies a history to a transaction buffer as an owner does, with sealed segments stored outside of it."""

from __future__ import annotations

from collections.abc import Sequence

from histories import History, Log
from written_form import through_written_form

from broker_io.position import Position
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import BufferSegment, Effect
from txnbuffer.buffer.visibility import Sequencer, visible_counts


class Owner:
    """A buffer and its sealed segments by number."""

    def __init__(self, segment_size: int = 8000) -> None:
        self.buffer = TransactionBuffer(segment_size)
        self.segments: dict[int, BufferSegment] = {}
        self.effects: list[Effect] = []

    def apply(self, log: Log, start: int = 0, stop: int | None = None, sizes: Sequence[int] = (1000,)) -> None:
        for placed in log.batches(start, stop, sizes):
            self.effects += self.buffer.apply_batch(placed)
            for part in self.buffer.segments.take_sealed():
                assert self.segments.setdefault(part.number, part) is part
                assert len(part.items) == self.buffer.segments.segment_size

    def trim(self, first_ledger: int) -> None:
        for number in self.buffer.trim(first_ledger):
            self.buffer.forget(self.segments.pop(number))

    def run(self, history: History, start: int = 0, stop: int | None = None, sizes: Sequence[int] = (1000,)) -> None:
        """Apply messages and trims from index `start` to `stop`, including trims at `stop` but not those at `start`."""
        stop = len(history.log.events) if stop is None else stop
        for at, ledger in history.trims:
            if start < at <= stop:
                self.apply(history.log, start, at, sizes)
                self.trim(ledger)
                start = at
        self.apply(history.log, start, stop, sizes)

    def recovered(self) -> Owner:
        """A new owner that recovers what this one wrote."""
        state, parts = through_written_form(self.buffer.snapshot_state(), [*self.segments.values()])
        other = Owner(state.segment_size)
        other.buffer = TransactionBuffer.restore(state, parts)
        other.segments = {part.number: part for part in parts}
        return other


def folded(log: Log, **options: int) -> Owner:
    owner = Owner(**options)
    owner.apply(log)
    return owner


def visible(log: Log, buffer: TransactionBuffer, start: int = 0, sizes: Sequence[int] = (1000,)) -> list[Position]:
    """Positions of the visible records from message `start` on, as a reader sees them."""
    found: list[Position] = []
    at = start
    for placed in log.batches(start, None, sizes):
        counts = visible_counts(placed, buffer).tolist()
        for event, count in zip(log.events[at : at + len(placed)], counts, strict=True):
            records = event.records
            if count and event.size is not None:
                records = [place for place in records if not buffer.suppressed.count(place, 1)]
            assert count in (0, len(records))
            found += records if count else []
        at += len(placed)
    return found


def numbered(
    log: Log, buffer: TransactionBuffer, sequencer: Sequencer, start: int = 0, sizes: Sequence[int] = (1000,)
) -> None:
    """Advance a sequencer over the log from message `start` on."""
    for placed in log.batches(start, None, sizes):
        sequencer.advance(placed, buffer)
