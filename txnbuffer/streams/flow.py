"""Flow control of streams (credits) and keep-alive of connections.

Credits limit the mutations and bytes of a stream in flight, as the receiver grants them. Both sides count totals since
the stream was opened on its connection. So a grant can be lost with the connection or arrive twice, and the counts of
both sides still agree.

The pulse of a connection says whether the other side is still there; times are seconds of any monotonic clock.
"""

from __future__ import annotations

from txnbuffer.errors import StreamViolation
from txnbuffer.streams.failover import MAX_SEQNO

GRANT_SHARE = 5
"""A grant is worth a message once it frees a fifth of the window."""


class Allowance:
    """The sender's side: what was granted, what was sent. The last mutation may go beyond the bytes granted.

    `window_*`: the most that was free at once, which is what the receiver has room for as far as can be told.
    """

    __slots__ = ("granted_bytes", "granted_items", "sent_bytes", "sent_items", "window_bytes", "window_items")

    def __init__(self) -> None:
        self.granted_items = self.granted_bytes = 0
        self.sent_items = self.sent_bytes = 0
        self.window_items = self.window_bytes = 0

    def grant(self, items: int, size: int) -> None:
        """New totals; one that is lower than before takes nothing back."""
        self.granted_items = max(self.granted_items, min(items, MAX_SEQNO))
        self.granted_bytes = max(self.granted_bytes, min(size, MAX_SEQNO))
        self.window_items = max(self.window_items, self.granted_items - self.sent_items)
        self.window_bytes = max(self.window_bytes, self.granted_bytes - self.sent_bytes)

    def left(self) -> tuple[int, int]:
        """Mutations and bytes that may still be sent; none of one if there is none of the other."""
        items, size = self.granted_items - self.sent_items, self.granted_bytes - self.sent_bytes
        return (items, size) if items > 0 and size > 0 else (0, 0)

    def spend(self, items: int, size: int) -> None:
        self.sent_items += items
        self.sent_bytes += size


class Window:
    """The receiver's side: how much may be on the way to its reader or waiting for it, over all openings of a stream.

    What one connection delivered and the reader has not consumed yet counts against the next one's grants.
    """

    __slots__ = ("_granted", "_received", "bytes", "items", "waiting_bytes", "waiting_items")

    def __init__(self, items: int, size: int) -> None:
        if items < 1 or size < 1:
            raise ValueError(f"a window of {items} mutations and {size} bytes: both are at least 1")
        self.items, self.bytes = items, size
        self.waiting_items = self.waiting_bytes = 0
        self._received = self._granted = (0, 0)

    def opened(self) -> tuple[int, int]:
        """A new stream begins: its first grant."""
        self._received = (0, 0)
        self._granted = self._limit()
        return self._granted

    def received(self, items: int, size: int) -> None:
        """Mutations came. Raises StreamViolation if more than were granted."""
        if self._received[0] + items > self._granted[0] or self._received[1] >= self._granted[1]:
            raise StreamViolation("a stream sends more than was granted; close the connection")
        self._received = self._received[0] + items, self._received[1] + size
        self.waiting_items += items
        self.waiting_bytes += size

    def consumed(self, items: int, size: int) -> None:
        """The reader is done with mutations. Raises ValueError if it never got so many."""
        if not (0 <= items <= self.waiting_items and 0 <= size <= self.waiting_bytes):
            raise ValueError(
                f"{items} mutations of {size} bytes were consumed; "
                f"{self.waiting_items} of {self.waiting_bytes} were delivered and not consumed yet"
            )
        self.waiting_items -= items
        self.waiting_bytes -= size

    def due(self) -> tuple[int, int] | None:
        """The grant that is worth sending now."""
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
    """The server's side: it asks once nothing was heard or sent for an interval, and gives up after one more."""

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
        """A question is unanswered for an interval."""
        return self._asked is not None and now - self._asked >= self._interval

    def should_ask(self, now: float) -> bool:
        """A noop is due; the client must hear something too, though it has nothing to answer to."""
        if self._asked is None and now - self._heard >= self._interval:
            self._asked = now
        elif now - self._sent < self._interval:
            return False
        self._sent = now
        self.noops += 1
        return True

    def next_time(self) -> float:
        """When to look again."""
        heard = self._heard if self._asked is None else self._asked
        return min(heard, self._sent) + self._interval


class ClientPulse:
    """The client's side: it gives up after two intervals in which it heard nothing."""

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
