"""What a cluster knows of a topic's ledgers and cursors, as of one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker_io.port import Ledger
from broker_io.position import Position

HOLD = "__txnbuffer"
"""The durable subscription of ours by which a topic's messages are kept."""
COMPACTION = "__compaction"
"""The cursor of Pulsar's compaction: it saw everything up to there."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """`ledgers` ascend; `last` is the last entry ever written as far as the cluster remembers, its batch not told.

    `cursors` maps the names of durable and other cursors to the last position that each has done with.
    """

    ledgers: list[Ledger]
    last: Position
    cursors: dict[str, Position]

    @property
    def newest(self) -> int:
        return self.ledgers[-1].ledger

    def find(self, number: int) -> Ledger | None:
        return next((ledger for ledger in self.ledgers if ledger.ledger == number), None)

    def empty_between(self, low: int, high: int) -> bool:
        """Whether no ledger between two holds an entry."""
        return not any(ledger.entries for ledger in self.ledgers if low < ledger.ledger < high)


NEW = TopicState([], Position(-1, -1), {})
"""What is known of a topic that was made just now."""


def read_state(stats: Any) -> TopicState:
    """The state that an answer to `internalStats` tells."""
    rows = stats["ledgers"]
    ledgers = []
    for index, row in enumerate(rows):
        entries, size, newest = row["entries"], row["size"], index == len(rows) - 1
        if newest:  # its own row counts nothing while it is open
            entries, size = max(entries, stats["currentLedgerEntries"]), max(size, stats["currentLedgerSize"])
        # Whoever loads the topic next replaces an empty one.
        ledgers.append(Ledger(row["ledgerId"], entries, size, not newest, lasting=entries > 0))
    cursors = {name: read_place(cursor["markDeletePosition"]) for name, cursor in stats["cursors"].items()}
    return TopicState(ledgers, read_place(stats["lastConfirmedEntry"]), cursors)


def read_place(text: str) -> Position:
    """`LEDGER:ENTRY` as the cluster writes it, which may be `LEDGER:-1`, behind no entry."""
    ledger, _, entry = text.partition(":")
    return Position(int(ledger), int(entry))
