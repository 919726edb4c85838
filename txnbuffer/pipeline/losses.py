"""Whether a topic is still the one that was looked at, and its log as long: what was read or planned must be there."""

from __future__ import annotations

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import LogShortened
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.ranges import behind


def check_same(broker: Broker, topic: str, incarnation: str) -> None:
    """Raises TopicNotFound if the name is another topic's by now, or none's.

    Readers stay with the topic that they were opened at, so for theirs one look behind the opening is enough.
    """
    if broker.incarnation(topic) != incarnation:
        raise TopicNotFound(
            f"topic {topic} was deleted and made anew since its records were to be read: run the query again to read "
            f"the new one, or say fail_on_data_loss=false to go on without the old one"
        )


def check_as_long(broker: Broker, topic: str, place: Position) -> None:
    """Raises LogShortened if a log ends below a place up to which there were messages."""
    end = end_of_log(broker, topic)
    if place > end:
        raise LogShortened(
            f"topic {topic} ends at {end}, and there were records up to {place}: the log lost its end, or is an older "
            f"copy; bring the lost records back, or begin anew (a query with another checkpoint, an export with "
            f"another directory), or say fail_on_data_loss=false to go on from the end that there is"
        )


def end_of_log(broker: Broker, topic: str) -> Position:
    """Behind all that a log holds or has held: no place where somebody has read to is above it."""
    newest = broker.ledgers(topic)[-1]
    last = broker.last_position(topic)
    return max(EARLIEST if last is None else behind(last), Position(newest.ledger, newest.entries))
