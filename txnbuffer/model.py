"""The basic values: positions, transaction ids, outcomes, markers and ranges of records.

They are immutable and validated where they enter. On hot paths records stay in the columns of
`broker_io.batch`; only a whole range of them becomes an object here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from broker_io.position import EARLIEST, LATEST, Position

__all__ = [
    "EARLIEST",
    "LATEST",
    "MAX_LEAST",
    "PROTOCOL_VERSION",
    "Marker",
    "MarkerItem",
    "Outcome",
    "Position",
    "RecordSlice",
    "TxnId",
    "Undecodable",
]

PROTOCOL_VERSION = 1
"""The version of the log protocol that this release reads and writes."""

MAX_LEAST = 2**63 - 1


class TxnId(NamedTuple):
    """A transaction id: shard of the coordinator and sequence number; printed and parsed as `most:least`."""

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}:{self.least}"

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """Parse the text of an id. Raises ValueError that quotes it."""
        most, colon, least = text.partition(":")
        if not (colon and most.isascii() and most.isdigit() and least.isascii() and least.isdigit()):
            raise ValueError(f"{text!r} is not a transaction id: write MOST:LEAST, such as 0:17")
        txn = cls(int(most), int(least))
        if txn.most > MAX_LEAST or not 1 <= txn.least <= MAX_LEAST:
            raise ValueError(f"{text!r} is not a transaction id: both numbers must fit 63 bits, the second from 1 on")
        return txn


class Outcome(enum.IntEnum):
    """How a transaction ended. The values are written in markers."""

    ABORT = 0
    COMMIT = 1


class MarkerItem(NamedTuple):
    """One transaction that a marker ends, and how many of its records this topic must hold."""

    txn: TxnId
    outcome: Outcome
    records: int


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of transactions of one coordinator, as one message of a topic.

    If `decided`, the outcomes are in the decision log; otherwise the marker itself is the decision
    (one-phase). A marker without items is an epoch marker: it fences owners of lower epochs.
    """

    coordinator: int
    epoch: int
    low_water_mark: int
    decided: bool
    items: tuple[MarkerItem, ...]

    def __post_init__(self) -> None:
        if min(self.coordinator, self.epoch, self.low_water_mark) < 0:
            raise ValueError(
                "coordinator, epoch and low-water mark of a marker must be at least 0, got "
                f"{self.coordinator}, {self.epoch} and {self.low_water_mark}"
            )
        for txn, _, records in self.items:
            if txn.most != self.coordinator:
                raise ValueError(f"a marker of coordinator {self.coordinator} can't end transaction {txn}")
            if records < 0:
                raise ValueError(f"transaction {txn} can't hold {records} records")


class RecordSlice(NamedTuple):
    """Consecutive records of one ledger: of one transaction, with consecutive seqs, or ordinary ones.

    The range has `size` records, from `first` to `last`. For ordinary records `txn` is None and `first_seq` is 0.
    """

    txn: TxnId | None
    first: Position
    last: Position
    first_seq: int
    size: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.size - 1


class Undecodable(NamedTuple):
    """A record whose transaction can't be decoded: it is suppressed and counted."""

    first: Position
    last: Position
    reason: str
