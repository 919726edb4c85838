"""The effects of applying messages to a buffer; records that are simply accepted have none."""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from broker_io.position import Position
from txnbuffer.model import Outcome, TxnId


class Reason(enum.Enum):
    """Why records are suppressed."""

    LATE = "late"
    DUPLICATE = "duplicate"
    UNDECODABLE = "undecodable"


class Suppressed(NamedTuple):
    """`size` records (undecodable: messages) from `first` to `last` will never be visible.

    `txn` is None where it can't be read.
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
    """A marker's item that says nothing new: its transaction had ended here."""

    txn: TxnId
    outcome: Outcome
    position: Position


class Void(NamedTuple):
    """A one-phase item of an owner of `epoch`, after an owner of the epoch `newest` was seen."""

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
    """A newer owner of a coordinator showed itself in this topic."""

    coordinator: int
    epoch: int
    position: Position


Effect: TypeAlias = Suppressed | TransactionEnded | Ignored | Void | Damage | EpochRaised
