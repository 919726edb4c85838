"""The states of a stream at server and client, with a transition table for each; credits; keep-alive of connections.

Credits limit the mutations and bytes of a stream in flight, as the receiver grants them. Both sides count totals since
the stream was opened on its connection, so their counts agree even if a grant is lost with the connection or arrives
twice.

The pulse of a connection detects that the other side is gone; times are seconds of any monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from txnbuffer.errors import StreamViolation
from txnbuffer.streams.failover import MAX_SEQNO


class Producing(enum.Enum):
    """A stream at the server. BETWEEN and INSIDE: between snapshots, and inside one."""

    ASKED = "asked"
    BETWEEN = "between"
    INSIDE = "inside"
    DEAD = "dead"


class Consuming(enum.Enum):
    """A stream at the client, which outlives connections."""

    WAITING = "waiting"
    REQUESTED = "requested"
    BETWEEN = "between"
    INSIDE = "inside"
    ROLLING_BACK = "rolling back"
    DEAD = "dead"


class Event(enum.Enum):
    """An event of a stream."""

    REQUEST = "it is requested"
    OK = "Ok"
    ROLLBACK = "Rollback"
    REFUSED = "Refused"
    REFUSED_NOW = "Refused with a retryable error"
    SNAPSHOT_BEGIN = "SnapshotBegin"
    MUTATIONS = "mutations"
    SNAPSHOT_END = "SnapshotEnd"
    REACHED_END = "StreamEnd: it reached its end"
    ENDED = "StreamEnd: another reason"
    ROLLED_BACK = "the data was rolled back"
    DISCONNECTED = "the connection is lost"
    CLOSED = "the client closes it"
    FAILED = "it fails"


S = TypeVar("S", bound=enum.Enum)


class StreamTransition(NamedTuple, Generic[S]):
    """A transition from a state to the next."""

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
    """The server's next state. Raises StreamViolation if the table has none."""
    return _next(_PRODUCER, state, event)


def consumed(state: Consuming, event: Event) -> Consuming:
    """The client's next state. Raises StreamViolation if the table has none."""
    return _next(_CONSUMER, state, event)


def _next(table: dict[tuple[S, Event], S], state: S, event: Event) -> S:
    after = table.get((state, event))
    if after is None:
        raise StreamViolation(f"a stream in state {state.value} must not have: {event.value}; close the connection")
    return after


def table(steps: Iterable[StreamTransition[S]]) -> str:
    """A table as Markdown, as the documentation shows it."""
    rows = [f"| {step.before.name} | {step.event.value} | {step.after.name} |" for step in steps]
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])


GRANT_SHARE = 5
"""A grant is sent once it frees this fraction of the window."""


class Allowance:
    """The sender's side: what was granted and sent. The last mutation may exceed the bytes granted.

    `window_*`: the most that was granted and unsent at once, an estimate of the receiver's window.
    """

    __slots__ = ("granted_bytes", "granted_items", "sent_bytes", "sent_items", "window_bytes", "window_items")

    def __init__(self) -> None:
        self.granted_items = self.granted_bytes = 0
        self.sent_items = self.sent_bytes = 0
        self.window_items = self.window_bytes = 0

    def grant(self, items: int, size: int) -> None:
        """New totals; lower ones than before are ignored."""
        self.granted_items = max(self.granted_items, min(items, MAX_SEQNO))
        self.granted_bytes = max(self.granted_bytes, min(size, MAX_SEQNO))
        self.window_items = max(self.window_items, self.granted_items - self.sent_items)
        self.window_bytes = max(self.window_bytes, self.granted_bytes - self.sent_bytes)

    def left(self) -> tuple[int, int]:
        """Mutations and bytes that may still be sent; both 0 if one is used up."""
        items, size = self.granted_items - self.sent_items, self.granted_bytes - self.sent_bytes
        return (items, size) if items > 0 and size > 0 else (0, 0)

    def spend(self, items: int, size: int) -> None:
        self.sent_items += items
        self.sent_bytes += size


class Window:
    """The receiver's side: what may be in flight or waiting for the reader, over all connections of a stream.

    What one connection delivered and the reader has not consumed counts against the grants of the next one.
    """

    __slots__ = ("_granted", "_received", "bytes", "items", "waiting_bytes", "waiting_items")

    def __init__(self, items: int, size: int) -> None:
        if items < 1 or size < 1:
            raise ValueError(f"a window must have at least 1 mutation and 1 byte, got {items} and {size}")
        self.items, self.bytes = items, size
        self.waiting_items = self.waiting_bytes = 0
        self._received = self._granted = (0, 0)

    def opened(self) -> tuple[int, int]:
        """Start on a new connection; returns the first grant."""
        self._received = (0, 0)
        self._granted = self._limit()
        return self._granted

    def received(self, items: int, size: int) -> None:
        """Mutations arrived. Raises StreamViolation if they exceed the grant."""
        if self._received[0] + items > self._granted[0] or self._received[1] >= self._granted[1]:
            raise StreamViolation("a stream has sent more than was granted; close the connection")
        self._received = self._received[0] + items, self._received[1] + size
        self.waiting_items += items
        self.waiting_bytes += size

    def consumed(self, items: int, size: int) -> None:
        """The reader has processed mutations. Raises ValueError if fewer were delivered."""
        if not (0 <= items <= self.waiting_items and 0 <= size <= self.waiting_bytes):
            raise ValueError(
                f"{items} mutations of {size} bytes were consumed; "
                f"{self.waiting_items} of {self.waiting_bytes} were delivered and not consumed yet"
            )
        self.waiting_items -= items
        self.waiting_bytes -= size

    def due(self) -> tuple[int, int] | None:
        """The grant to send now, if it frees enough."""
        items, size = self._limit()
        if (items - self._granted[0]) * GRANT_SHARE >= self.items or (
            size - self._granted[1]
        ) * GRANT_SHARE >= self.bytes:
            self._granted = max(items, self._granted[0]), max(size, self._granted[1])
            return self._granted
        return None

    def _limit(self) -> tuple[int, int]:
        return (
            max(0, self._received[0] + self.items - self.waiting_items),
            max(0, self._received[1] + self.bytes - self.waiting_bytes),
        )


class ServerPulse:
    """The server's side: it sends a noop after an interval without messages, and gives up after one more."""

    __slots__ = ("_asked", "_heard", "_interval", "_sent", "noops")

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._heard = self._sent = now
        self._asked: float | None = None
        self.noops = 0

    def heard(self, now: float) -> None:
        self._heard = now
        self._asked = None

    def sent(self, now: float) -> None:
        self._sent = now

    def silent(self, now: float) -> bool:
        """A noop has been unanswered for an interval."""
        return self._asked is not None and now - self._asked >= self._interval

    def should_ask(self, now: float) -> bool:
        """A noop is due, also if the client sends messages but has received none."""
        if self._asked is None and now - self._heard >= self._interval:
            self._asked = now
        elif now - self._sent < self._interval:
            return False
        self._sent = now
        self.noops += 1
        return True

    def next_time(self) -> float:
        """The time of the next check."""
        heard = self._heard if self._asked is None else self._asked
        return min(heard, self._sent) + self._interval


class ClientPulse:
    """The client's side: it gives up after two intervals without a message."""

    __slots__ = ("_heard", "_interval")

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._heard = now

    def heard(self, now: float) -> None:
        self._heard = now

    def silent(self, now: float) -> bool:
        return now - self._heard >= 2 * self._interval

    def next_time(self) -> float:
        return self._heard + 2 * self._interval
