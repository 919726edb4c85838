"""The states of a stream at server and client, with a transition table for each; credits; keep-alive of connections.

Credits limit the mutations and bytes of a stream in flight, as the receiver grants them. Both sides count totals since
the stream was opened on its connection, so their counts agree even if a grant is lost with the connection or arrives
twice.

The server's pulse detects that the client is gone. Times are seconds of any monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

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


PRODUCER_STEPS: dict[tuple[Producing, Event], Producing] = {
    (Producing.ASKED, Event.OK): Producing.BETWEEN,
    (Producing.ASKED, Event.ROLLBACK): Producing.DEAD,
    (Producing.ASKED, Event.REFUSED): Producing.DEAD,
    (Producing.ASKED, Event.CLOSED): Producing.DEAD,
    (Producing.BETWEEN, Event.SNAPSHOT_BEGIN): Producing.INSIDE,
    (Producing.INSIDE, Event.SNAPSHOT_BEGIN): Producing.INSIDE,
    (Producing.INSIDE, Event.MUTATIONS): Producing.INSIDE,
    (Producing.INSIDE, Event.SNAPSHOT_END): Producing.BETWEEN,
    (Producing.BETWEEN, Event.REACHED_END): Producing.DEAD,
    (Producing.BETWEEN, Event.ENDED): Producing.DEAD,
    (Producing.INSIDE, Event.ENDED): Producing.DEAD,
    (Producing.BETWEEN, Event.CLOSED): Producing.DEAD,
    (Producing.INSIDE, Event.CLOSED): Producing.DEAD,
}
CONSUMER_STEPS: dict[tuple[Consuming, Event], Consuming] = {
    (Consuming.WAITING, Event.REQUEST): Consuming.REQUESTED,
    (Consuming.WAITING, Event.REACHED_END): Consuming.DEAD,
    (Consuming.REQUESTED, Event.OK): Consuming.BETWEEN,
    (Consuming.REQUESTED, Event.ROLLBACK): Consuming.ROLLING_BACK,
    (Consuming.REQUESTED, Event.REFUSED_NOW): Consuming.WAITING,
    (Consuming.REQUESTED, Event.REFUSED): Consuming.DEAD,
    (Consuming.ROLLING_BACK, Event.ROLLED_BACK): Consuming.WAITING,
    (Consuming.BETWEEN, Event.SNAPSHOT_BEGIN): Consuming.INSIDE,
    (Consuming.INSIDE, Event.SNAPSHOT_BEGIN): Consuming.INSIDE,
    (Consuming.INSIDE, Event.MUTATIONS): Consuming.INSIDE,
    (Consuming.INSIDE, Event.SNAPSHOT_END): Consuming.BETWEEN,
    (Consuming.BETWEEN, Event.REACHED_END): Consuming.DEAD,
    (Consuming.BETWEEN, Event.ENDED): Consuming.WAITING,
    (Consuming.INSIDE, Event.ENDED): Consuming.WAITING,
    (Consuming.REQUESTED, Event.DISCONNECTED): Consuming.WAITING,
    (Consuming.BETWEEN, Event.DISCONNECTED): Consuming.WAITING,
    (Consuming.INSIDE, Event.DISCONNECTED): Consuming.WAITING,
    (Consuming.WAITING, Event.DISCONNECTED): Consuming.WAITING,
    (Consuming.ROLLING_BACK, Event.DISCONNECTED): Consuming.ROLLING_BACK,
    **{(state, Event.CLOSED): Consuming.DEAD for state in Consuming if state is not Consuming.DEAD},
    **{(state, Event.FAILED): Consuming.DEAD for state in Consuming if state is not Consuming.DEAD},
}
"""The next state for each state and event."""
_STEPS: dict[tuple[Any, Event], Any] = {**PRODUCER_STEPS, **CONSUMER_STEPS}

S = TypeVar("S", Producing, Consuming)


def next_state(state: S, event: Event) -> S:
    """The state of a stream after an event. Raises StreamViolation if the table has none."""
    after: S | None = _STEPS.get((state, event))
    if after is None:
        raise StreamViolation(f"a stream in state {state.value} must not have: {event.value}; close the connection")
    return after


GRANT_SHARE = 5
"""A grant is sent once it frees this fraction of the window."""


@dataclass(slots=True)
class Allowance:
    """The sender's side: what was granted and sent. The last mutation may exceed the bytes granted.

    `window_*`: the most that was granted and unsent at once, an estimate of the receiver's window.
    """

    granted_items: int = 0
    granted_bytes: int = 0
    sent_items: int = 0
    sent_bytes: int = 0
    window_items: int = 0
    window_bytes: int = 0

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


class Pulse:
    """Keep-alive at the server: it sends a noop after an interval without messages, and gives up after one more."""

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
