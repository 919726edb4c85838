"""A reader of what compaction left that falls silent before the end of the log: was that all, or is the cluster slow?

The log itself tells, which compaction leaves as it is on a cluster: whoever folds what it holds behind the silence
comes to the same state as by what compaction would leave of it. Elsewhere a silence is the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker_io.batch import PlacedBatch
from broker_io.errors import PositionTrimmed, ServiceUnavailable
from broker_io.port import Broker, GuardedBroker
from broker_io.position import Position

PATIENCE = 30.0
"""Seconds in which a message that the log holds must be read."""


def behind_silence(broker: Broker, topic: str, at: Position, end: Position) -> Iterator[PlacedBatch]:
    """What a log holds behind `at`, up to its `end` at least; nothing where that is trimmed, and silence is all.

    Raises ServiceUnavailable where it does not come.
    """
    if at >= end or not isinstance(broker, GuardedBroker):
        return
    if not any(ledger.ledger == end.ledger and ledger.entries > end.entry for ledger in broker.ledgers(topic)):
        return
    try:
        reader = broker.reader(topic, at, inclusive=False)
    except PositionTrimmed:
        return
    with reader:
        while at < end:
            placed = reader.read(timeout=PATIENCE)
            if placed is None:
                raise ServiceUnavailable(
                    f"topic {topic!r} ends at {end}, but nothing came behind {at} within {PATIENCE:.0f} s: look "
                    "whether the broker is well, and try again"
                )
            at = placed.positions.last
            yield placed
