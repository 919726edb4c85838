"""The nouns of txnbuffer: positions, transaction ids, records, markers and mutations.

Small, immutable and validated where they enter; on hot paths records stay in the columns of
`broker_io.batch` and only whole runs of them become an object here.
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
    "RecordRun",
    "TxnId",
    "Undecodable",
]

PROTOCOL_VERSION = 1
"""Version of the log protocol that this release writes, and the newest that it reads."""

MAX_LEAST = 2**63 - 1


class TxnId(NamedTuple):
    """A transaction id: shard of the coordinator and sequence number; printed and parsed as `most:least`."""

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}:{self.least}"

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """Read what `str` printed. Raises ValueError that quotes the text."""
        most, colon, least = text.partition(":")
        if not (colon and most.isascii() and most.isdigit() and least.isascii() and least.isdigit()):
            raise ValueError(f"{text!r} is no transaction id: write most:least")
        txn = cls(int(most), int(least))
        if txn.most > MAX_LEAST or not 1 <= txn.least <= MAX_LEAST:
            raise ValueError(f"{text!r} is no transaction id: both numbers fit 63 bits, least starts at 1")
        return txn


class Outcome(enum.IntEnum):
    """How a transaction ended. The values are written in markers."""

    ABORT = 0
    COMMIT = 1


class MarkerItem(NamedTuple):
    """One transaction that a marker ends, and how many records of it this topic must hold."""

    txn: TxnId
    outcome: Outcome
    records: int


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of transactions of one coordinator, as one message of a topic.

    `decided`: the outcomes stand in the decision log; otherwise this very marker makes them
    (one-phase). A marker without items is a border: it announces its epoch.
    """

    coordinator: int
    epoch: int
    low_water_mark: int
    decided: bool
    items: tuple[MarkerItem, ...]

    def __post_init__(self) -> None:
        if min(self.coordinator, self.epoch, self.low_water_mark) < 0:
            raise ValueError("coordinator, epoch and low-water mark of a marker are never negative")
        for txn, _, records in self.items:
            if txn.most != self.coordinator:
                raise ValueError(f"a marker of coordinator {self.coordinator} can't end transaction {txn}")
            if records < 0:
                raise ValueError(f"transaction {txn} can't hold {records} records")


class RecordRun(NamedTuple):
    """Records that follow one another in one ledger: of one transaction with consecutive seqs, or of none.

    `first_seq` is 0 where `txn` is None. `size` records stand from `first` to `last`.
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
    """A record whose transaction can't be read: suppressed, and counted."""

    first: Position
    last: Position
    reason: str
