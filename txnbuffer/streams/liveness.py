"""Whether the other side of a connection is still there; times are seconds of any clock that never goes back."""

from __future__ import annotations


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
        """A question stands unanswered for an interval."""
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
