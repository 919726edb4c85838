"""Whether the messages that a reader is given follow one another: pure.

A reader of Pulsar whose messages were trimmed gets no error, it is given the next that there are. So what comes is
looked at: within a ledger entries follow one another, and another ledger begins at its first entry once the one
before was read to its end and none between holds any.
"""

from __future__ import annotations

from broker_io.position import Position
from broker_io.pulsar.state import TopicState


def follows(last: Position, place: Position) -> bool:
    """Whether a place is the next one to another, as far as they tell by themselves."""
    if place.ledger != last.ledger:
        return False
    if place.entry == last.entry:
        return place.batch > last.batch
    return place.entry == last.entry + 1 and place.batch <= 0


def is_next_ledger(last: Position, place: Position, state: TopicState) -> bool:
    """Whether the ledgers prove that nothing stands between the last message of one and the first of another."""
    ended = state.find(last.ledger)
    return (
        ended is not None
        and last.entry + 1 >= ended.entries
        and place.entry == 0
        and place.batch <= 0
        and state.empty_between(last.ledger, place.ledger)
    )


def is_gone(start: Position, state: TopicState, *, compacted: bool, horizon: Position | None) -> bool:
    """Whether messages that a reader asks for from `start` on may be gone.

    Up to the `horizon` of the last compaction a compacted topic has kept what counts.
    """
    if state.find(start.ledger) is not None or start.ledger > state.newest:
        return False
    return not (compacted and horizon is not None and start.ledger <= horizon.ledger)
