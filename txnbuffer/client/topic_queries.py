"""Questions of a client about topics: which there are, and up to where one can be read

Both ask the broker, so they need no service, and see what any reader sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from broker_io.errors import PositionTrimmed
from broker_io.partitions import partition_of
from broker_io.port import Broker, Ledger, PartitionedBroker
from broker_io.position import Position
from snapshots.format import is_internal
from txnbuffer.follow import LogFollower, numbered_records, read_existing
from txnbuffer.recovery.restore import load

FIRST_WINDOW, WINDOW_GROWTH = 256, 4
"""Entries of the last part of the log that is searched for a visible record; each earlier part is larger."""


def topic_names(broker: Broker) -> list[str]:
    """The names of all topics with records, sorted; partitions are not listed, only their partitioned topic."""
    names = [name for name in broker.topics() if not is_internal(name)]
    if not isinstance(broker, PartitionedBroker):
        return names
    parts = {name: partition_of(name) for name in names}
    wholes = {part.topic for part in parts.values() if part is not None}
    partitioned = {topic for topic in wholes if broker.partitions(topic)}
    whole = {name: part.topic for name, part in parts.items() if part is not None and part.topic in partitioned}
    return sorted({whole.get(name, name) for name in names})


def last_visible(broker: Broker, topic: str) -> Position | None:
    """The position of the last record that readers of committed records get now; None if there is none.

    Searches the log from its end. Raises TopicNotFound, TopicPartitioned, and the errors of readers.
    """
    loaded = load(broker, topic)
    with LogFollower(broker, topic, loaded.buffer, loaded.resume) as log:
        log.replay()
    end = log.buffer.max_read_position
    found: Position | None = None
    with contextlib.suppress(PositionTrimmed):  # the rest was trimmed meanwhile
        for after, last in _windows(broker.ledgers(topic), end):
            for placed in read_existing(broker, topic, after, last):
                records, *_ = numbered_records(placed, log.buffer, 0)
                found = records.positions.last if len(records) else found
            if found is not None:
                break
    return found


def _windows(ledgers: Sequence[Ledger], end: Position | None) -> Iterator[tuple[Position, Position]]:
    """Parts of the log up to `end`, the last one first: each is after a position, and up to another one."""
    if end is None:
        return
    size, last = FIRST_WINDOW, end
    for ledger in reversed([ledger for ledger in ledgers if ledger.ledger <= end.ledger]):
        stop = min(ledger.entries, end.entry + 1) if ledger.ledger == end.ledger else ledger.entries
        while stop > 0:
            start = max(stop - size, 0)
            yield Position(ledger.ledger, start - 1), last
            stop, last, size = start, Position(ledger.ledger, start), WINDOW_GROWTH * size
