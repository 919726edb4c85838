"""Marks: a message that was read and its time, by which a log is told from an older copy that has grown since."""

from __future__ import annotations

import time
from collections.abc import Sequence

from broker_io.errors import PositionTrimmed
from broker_io.port import Broker
from broker_io.position import NO_INDEX
from txnbuffer.errors import LogReplaced
from txnbuffer.model import Position
from txnbuffer.pipeline.fixing import Fixed
from txnbuffer.pipeline.offsets import Mark, Reached
from txnbuffer.pipeline.ranges import Extent

PATIENCE = 10.0
"""Seconds in which a message that is there comes; where none does, nothing is told by it."""

EVERY = 300.0
"""So many seconds a mark is good for in a query that goes on: whoever restores a cluster goes back farther."""


class Marks:
    """Marks of a query's topics, each looked at when the query goes on with the topic, and every so many seconds after.

    With 0 each is the last message that was read: an older copy in which that is missing is told, however young it is.
    """

    def __init__(self, every: float = EVERY) -> None:
        self._every = every
        self._checked: dict[str, float] = {}
        self._made: dict[str, float] = {}

    def check(self, broker: Broker, one: Fixed, before: Reached) -> None:
        """Raises LogReplaced if what follows is not of the log that was read."""
        if before.mark is not None and one.stop > before.at and self._due(self._checked, one.topic):
            check_mark(broker, one.topic, before.mark)

    def of(self, broker: Broker, one: Fixed, before: Reached | None, at: Position) -> Mark | None:
        """A mark for a place up to which a topic is read; looking for one may take long where there is none."""
        known = None if before is None else before.mark
        place = _before(one.extents, at)
        if place is None or not self._due(self._made, one.topic):
            return known
        return _mark_at(broker, one, place) or known

    def _due(self, times: dict[str, float], topic: str) -> bool:
        now = time.monotonic()
        if now < times.get(topic, float("-inf")) + self._every:
            return False
        times[topic] = now
        return True


def mark_below(broker: Broker, one: Fixed, at: Position, known: Mark | None) -> Mark | None:
    """The last message below a place, if it can be had; else what was known before."""
    place = _before(one.extents, at)
    return known if place is None else _mark_at(broker, one, place) or known


def _mark_at(broker: Broker, one: Fixed, place: Position) -> Mark | None:
    published = _published(broker, one.topic, place)
    return None if published is None else Mark(place, published)


def check_mark(broker: Broker, topic: str, mark: Mark) -> None:
    """Raises LogReplaced if another message stands where one was read. One that is gone tells nothing."""
    published = _published(broker, topic, mark.at)
    if published is not None and published != mark.published:
        raise LogReplaced(
            f"topic {topic} has another message at {mark.at} than was read there: its log is an older copy that has "
            f"grown since, and what was written below the place up to which it was read would be passed over; begin "
            f"anew (a query with another checkpoint, an export with another directory), or say "
            f"fail_on_data_loss=false to go on from that place"
        )


def _before(extents: Sequence[Extent], at: Position) -> Position | None:
    """The place of the last entry that begins below another place."""
    if at.batch > NO_INDEX:
        return at._replace(batch=NO_INDEX)
    if at.entry > 0:
        return Position(at.ledger, at.entry - 1)
    full = [extent for extent in extents if extent.ledger < at.ledger and extent.entries]
    return Position(full[-1].ledger, full[-1].entries - 1) if full else None


def _published(broker: Broker, topic: str, at: Position) -> int | None:
    """When the message at a place was published, in milliseconds since 1970; None if it can't be had."""
    try:
        with broker.reader(topic, at) as reader:
            placed = reader.read(limit=1, timeout=PATIENCE)
    except PositionTrimmed:
        return None
    if placed is None or placed.positions.first[:2] != at[:2]:
        return None
    return int(placed.publish_times[0])
