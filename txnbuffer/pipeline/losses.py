"""Whether a topic is still the one that was looked at, and its log as long: what was read or planned must be there."""

from __future__ import annotations

from collections.abc import Container, Iterable

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import LogShortened
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.fixing import Fixed
from txnbuffer.pipeline.options import ReadOptions
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


def end_below(broker: Broker, one: Fixed, at: Position, *, fail_on_data_loss: bool) -> Position | None:
    """The end of a log that was read up to a place, if that is above it by now; else None. Raises LogShortened."""
    newest = one.extents[-1]
    if at <= max(one.stop, Position(newest.ledger, newest.entries)):
        return None
    if fail_on_data_loss:
        check_as_long(broker, one.topic, at)
    end = end_of_log(broker, one.topic)
    return end if end < at else None


def gone(options: ReadOptions, begun: Iterable[str], there: Container[str]) -> list[str]:
    """Topics that were begun and are to be read, and are not there any more. Raises TopicNotFound."""
    missing = [topic for topic in begun if topic not in there and topic in options.chosen([topic])]
    if missing and options.fail_on_data_loss:
        raise TopicNotFound(
            f"topic {', '.join(missing)} was deleted, and with it what had not been read of it, if anything: say "
            f"fail_on_data_loss=false to go on without it"
        )
    return missing
