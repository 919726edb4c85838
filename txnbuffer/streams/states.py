"""The states of a stream on either side: one transition table each, from which all else is derived."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from txnbuffer.errors import StreamViolation


class Producing(enum.Enum):
    """A stream at the server. BETWEEN and INSIDE are of snapshots."""

    ASKED = "asked"
    BETWEEN = "between"
    INSIDE = "inside"
    DEAD = "dead"


class Consuming(enum.Enum):
    """A stream at the client, where it outlives connections."""

    WAITING = "waiting"
    REQUESTED = "requested"
    BETWEEN = "between"
    INSIDE = "inside"
    ROLLING_BACK = "rolling back"
    DEAD = "dead"


class Event(enum.Enum):
    """What happens to a stream."""

    REQUEST = "it is asked for"
    OK = "Ok"
    ROLLBACK = "Rollback"
    REFUSED = "Refused"
    REFUSED_NOW = "Refused, but trying again can help"
    SNAPSHOT_BEGIN = "SnapshotBegin"
    MUTATIONS = "mutations"
    SNAPSHOT_END = "SnapshotEnd"
    REACHED_END = "StreamEnd: it reached its end"
    ENDED = "StreamEnd: another reason"
    ROLLED_BACK = "the data was rolled back"
    DISCONNECTED = "the connection is lost"
    CLOSED = "the client closes it"
    FAILED = "it can't go on"


S = TypeVar("S", bound=enum.Enum)


class StreamTransition(NamedTuple, Generic[S]):
    """One way from a state to the next."""

    before: S
    event: Event
    after: S


PRODUCER_STEPS = (
    StreamTransition(Producing.ASKED, Event.OK, Producing.BETWEEN),
    StreamTransition(Producing.ASKED, Event.ROLLBACK, Producing.DEAD),
    StreamTransition(Producing.ASKED, Event.REFUSED, Producing.DEAD),
    StreamTransition(Producing.ASKED, Event.CLOSED, Producing.DEAD),
    StreamTransition(Producing.BETWEEN, Event.SNAPSHOT_BEGIN, Producing.INSIDE),
    StreamTransition(Producing.INSIDE, Event.SNAPSHOT_BEGIN, Producing.INSIDE),
    StreamTransition(Producing.INSIDE, Event.MUTATIONS, Producing.INSIDE),
    StreamTransition(Producing.INSIDE, Event.SNAPSHOT_END, Producing.BETWEEN),
    StreamTransition(Producing.BETWEEN, Event.REACHED_END, Producing.DEAD),
    StreamTransition(Producing.BETWEEN, Event.ENDED, Producing.DEAD),
    StreamTransition(Producing.INSIDE, Event.ENDED, Producing.DEAD),
    StreamTransition(Producing.BETWEEN, Event.CLOSED, Producing.DEAD),
    StreamTransition(Producing.INSIDE, Event.CLOSED, Producing.DEAD),
)

CONSUMER_STEPS = (
    StreamTransition(Consuming.WAITING, Event.REQUEST, Consuming.REQUESTED),
    StreamTransition(Consuming.WAITING, Event.REACHED_END, Consuming.DEAD),
    StreamTransition(Consuming.REQUESTED, Event.OK, Consuming.BETWEEN),
    StreamTransition(Consuming.REQUESTED, Event.ROLLBACK, Consuming.ROLLING_BACK),
    StreamTransition(Consuming.REQUESTED, Event.REFUSED_NOW, Consuming.WAITING),
    StreamTransition(Consuming.REQUESTED, Event.REFUSED, Consuming.DEAD),
    StreamTransition(Consuming.ROLLING_BACK, Event.ROLLED_BACK, Consuming.WAITING),
    StreamTransition(Consuming.BETWEEN, Event.SNAPSHOT_BEGIN, Consuming.INSIDE),
    StreamTransition(Consuming.INSIDE, Event.SNAPSHOT_BEGIN, Consuming.INSIDE),
    StreamTransition(Consuming.INSIDE, Event.MUTATIONS, Consuming.INSIDE),
    StreamTransition(Consuming.INSIDE, Event.SNAPSHOT_END, Consuming.BETWEEN),
    StreamTransition(Consuming.BETWEEN, Event.REACHED_END, Consuming.DEAD),
    StreamTransition(Consuming.BETWEEN, Event.ENDED, Consuming.WAITING),
    StreamTransition(Consuming.INSIDE, Event.ENDED, Consuming.WAITING),
    StreamTransition(Consuming.REQUESTED, Event.DISCONNECTED, Consuming.WAITING),
    StreamTransition(Consuming.BETWEEN, Event.DISCONNECTED, Consuming.WAITING),
    StreamTransition(Consuming.INSIDE, Event.DISCONNECTED, Consuming.WAITING),
    StreamTransition(Consuming.WAITING, Event.DISCONNECTED, Consuming.WAITING),
    StreamTransition(Consuming.ROLLING_BACK, Event.DISCONNECTED, Consuming.ROLLING_BACK),
    *(StreamTransition(state, Event.CLOSED, Consuming.DEAD) for state in Consuming if state is not Consuming.DEAD),
    *(StreamTransition(state, Event.FAILED, Consuming.DEAD) for state in Consuming if state is not Consuming.DEAD),
)

_PRODUCER = {(step.before, step.event): step.after for step in PRODUCER_STEPS}
_CONSUMER = {(step.before, step.event): step.after for step in CONSUMER_STEPS}


def produced(state: Producing, event: Event) -> Producing:
    """The server's next state. Raises StreamViolation where the table has none."""
    return _next(_PRODUCER, state, event)


def consumed(state: Consuming, event: Event) -> Consuming:
    """The client's next state. Raises StreamViolation where the table has none."""
    return _next(_CONSUMER, state, event)


def _next(table: dict[tuple[S, Event], S], state: S, event: Event) -> S:
    after = table.get((state, event))
    if after is None:
        raise StreamViolation(f"a stream that is {state.value} can't have: {event.value}; close the connection")
    return after


def table(steps: Iterable[StreamTransition[S]]) -> str:
    """A table as Markdown, as the documentation shows it."""
    rows = [f"| {step.before.name} | {step.event.value} | {step.after.name} |" for step in steps]
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])
