"""The meaning of a topic's log, by definition: every query scans the whole history.

It follows the rules of the log protocol and shares no code with the transaction buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from histories import Event

from broker_io.position import Position
from txnbuffer.model import Outcome, TxnId


class Naive:
    """Evaluates each message of a history once, in order, by scanning all earlier ones."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)
        self.accepted: list[tuple[int, TxnId, int, Position]] = []
        self.ends: list[tuple[int, TxnId, Outcome]] = []
        self.late: list[Position] = []
        self.duplicates: list[Position] = []
        self.undecodable: list[Position] = []
        self.void: list[tuple[int, TxnId]] = []
        self.damage: list[tuple[TxnId, int, int]] = []
        for index, event in enumerate(self.events):
            if event.bad:
                self.undecodable.append(event.position)
            elif event.marker is not None:
                self._judge_marker(index, event)
            elif event.txn is not None:
                self._judge_records(index, event)

    # Queries about the log before message `index`

    def low_water_mark(self, most: int, index: int) -> int:
        seen = [event.marker for event in self.events[:index] if event.marker is not None]
        return max((marker.low_water_mark for marker in seen if marker.coordinator == most), default=0)

    def newest_epoch(self, most: int, index: int) -> int:
        seen = [event.marker for event in self.events[:index] if event.marker is not None]
        return max((marker.epoch for marker in seen if marker.coordinator == most), default=0)

    def has_marker_end(self, txn: TxnId) -> bool:
        return any(ended == txn for _, ended, _ in self.ends)

    def is_ongoing(self, txn: TxnId) -> bool:
        return not self.has_marker_end(txn) and any(mine == txn for _, mine, _, _ in self.accepted)

    def has_ended(self, txn: TxnId, index: int) -> bool:
        below = txn.least <= self.low_water_mark(txn.most, index) and not self.is_ongoing(txn)
        return self.has_marker_end(txn) or below

    # The rules

    def _judge_records(self, index: int, event: Event) -> None:
        txn = event.txn
        assert txn is not None
        for step, position in enumerate(event.records):
            seq = event.seq + step
            highest = max((number for _, mine, number, _ in self.accepted if mine == txn), default=0)
            if self.has_ended(txn, index):
                self.late.append(position)
            elif seq <= highest:
                self.duplicates.append(position)
            else:
                self.accepted.append((index, txn, seq, position))

    def _judge_marker(self, index: int, event: Event) -> None:
        marker = event.marker
        assert marker is not None
        for txn, outcome, records in marker.items:
            if not marker.decided and marker.epoch < self.newest_epoch(marker.coordinator, index):
                self.void.append((index, txn))
            elif not self.has_ended(txn, index):
                held = sum(mine == txn for _, mine, _, _ in self.accepted)
                if outcome is Outcome.COMMIT and held != records:
                    self.damage.append((txn, records, held))
                self.ends.append((index, txn, outcome))

    # Results

    def outcome(self, txn: TxnId) -> Outcome | None:
        return next((outcome for _, ended, outcome in self.ends if ended == txn), None)

    def aborted_ids(self) -> set[TxnId]:
        return {txn for _, txn, _, _ in self.accepted if self.outcome(txn) is Outcome.ABORT}

    def undecided(self) -> list[tuple[int, TxnId]]:
        return [(index, txn) for index, txn, _, _ in self.accepted if self.outcome(txn) is None]

    def max_read_index(self) -> int:
        """The number of messages at the start of the log that are decided."""
        return min((index for index, _ in self.undecided()), default=len(self.events))

    def max_read(self) -> Position | None:
        index = self.max_read_index()
        return end_of(self.events[index - 1]) if index else None

    def visible(self) -> list[Position]:
        """Positions of all visible records, in order; the n-th has seqno n."""
        committed = {place for _, txn, _, place in self.accepted if self.outcome(txn) is Outcome.COMMIT}
        found: list[Position] = []
        for event in self.events[: self.max_read_index()]:
            if event.bad or event.marker is not None:
                continue
            found += [place for place in event.records if event.txn is None or place in committed]
        return found


def end_of(event: Event) -> Position:
    """The position of the last record of a message."""
    return event.records[-1] if event.records else event.position
