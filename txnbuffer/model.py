"""The basic values: positions, transaction ids, outcomes, markers and ranges of records

They are immutable, and validated when they are created from input. Where speed matters, records stay in the columns of
`broker_io.batch`, and an object of this module describes a whole range of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from broker_io.position import EARLIEST as EARLIEST
from broker_io.position import Position as Position
from broker_io.position import maker

PROTOCOL_VERSION = 1
"""The version of the log protocol that this release reads and writes."""

MAX_LEAST = 2**63 - 1


class TxnId(NamedTuple):
    """A transaction id: the shard of its coordinator, and a number that grows; as text `most:least`."""

    most: int
    least: int

    def __str__(self) -> str:
        return txn_text(self)

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """Return the id with this text. Raises ValueError."""
        most, colon, least = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (colon and most.isascii() and most.isdigit() and least.isascii() and least.isdigit()):
            raise ValueError(f"{text!r} is not a transaction id: write MOST:LEAST, such as 0:17")
        txn = as_txn_id((int(most), int(least)))
        if txn.most > MAX_LEAST or not 1 <= txn.least <= MAX_LEAST:
            raise ValueError(f"{text!r} is not a transaction id: both numbers must fit in 63 bits, the second from 1")
        return txn


as_txn_id = maker(TxnId)
txn_text = "%d:%d".__mod__
"""The text of an id: in C."""


class Outcome(enum.IntEnum):
    """How a transaction ended. Markers contain these values."""

    ABORT = 0
    COMMIT = 1


class MarkerItem(NamedTuple):
    """One transaction that a marker ends, and how many of its records the topic must have."""

    txn: TxnId
    outcome: Outcome
    records: int


as_marker_item = maker(MarkerItem)


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of transactions of one coordinator, as one message of a topic.

    If `decided`, the outcomes are in the decision log; otherwise the marker itself is the decision (one-phase commit).
    A marker without items is an epoch marker: it fences owners with lower epochs.
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
                raise ValueError(f"a marker of coordinator {self.coordinator} cannot end transaction {txn}")
            if records < 0:
                raise ValueError(f"transaction {txn} cannot have {records} records")


class RecordSlice(NamedTuple):
    """Consecutive records of one ledger: all of one transaction, with consecutive seqs, or all ordinary.

    There are `size` records, from `first` to `last`. For ordinary records `txn` is None and `first_seq` is 0.
    """

    txn: TxnId | None
    first: Position
    last: Position
    first_seq: int
    size: int


as_record_slice = maker(RecordSlice)


class Undecodable(NamedTuple):
    """Records whose transaction id cannot be decoded, from `first` to `last`; they are suppressed and counted."""

    first: Position
    last: Position
    reason: str
