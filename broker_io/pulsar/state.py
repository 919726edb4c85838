"""What a cluster knows of a topic's ledgers and cursors, as of one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker_io.port import Ledger
from broker_io.position import Position
from broker_io.pulsar.cluster import Cluster

HOLD = "__txnbuffer"
"""The durable subscription of ours by which a topic's messages are kept."""
COMPACTION = "__compaction"
"""The cursor of Pulsar's compaction: it saw everything up to there."""
LAST = "txnbuffer.last"
"""The property that keeps the last position where trimming leaves no message."""


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


def topic_state(cluster: Cluster, topic: str, *, patiently: bool = True) -> TopicState:
    return read_state(cluster.ask("GET", topic, "internalStats", patiently=patiently))


def last_position(cluster: Cluster, topic: str) -> Position | None:
    found = cluster.ask("GET", topic, "lastMessageId")
    if found["entryId"] >= 0:
        return Position(found["ledgerId"], found["entryId"], found["batchIndex"])
    # The message itself is gone, if there ever was one: the best of what remembers it.
    state = topic_state(cluster, topic)
    kept = (cluster.ask("GET", topic, "properties") or {}).get(LAST)
    known = [state.last, state.cursors.get(HOLD, state.last)]
    known = [place for place in known if place.entry >= 0]
    if kept is not None:
        known.append(Position.parse(kept))
    return max(known, default=None)


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
