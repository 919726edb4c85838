"""When a standby may open the exclusive writer of a topic: not while the last one is there, or may come back.

A cluster that loads a topic again, because its broker was restarted or the topic was unloaded, gives it to the first
writer that opens it. The one that had it reconnects by itself, but the library doubles its pauses up to a minute: that
may take as long as the outage lasted. A writer that leaves a loaded topic has ended, or lost its connection alone.
"""

from __future__ import annotations

from typing import NamedTuple

GONE_SECONDS = 0.3
"""Seconds without a writer in a loaded topic after which it is gone: one that only reconnects is back sooner."""
LEAST, LONGEST = 5.0, 75.0
"""Head start in seconds, at least and at most, of a writer whose topic was loaded again."""
OF_THE_OUTAGE = 1.25
"""Head start as a part of the time for which the writer was not seen."""
UNKNOWN = 30.0
"""Head start in seconds if the writer was never seen."""


class Presence(NamedTuple):
    """What a cluster says of a topic that it has loaded.

    `writer`: whether there is a writer; `ledger`: the newest, another one after each load; `used`: whether a writer
    wrote to it, or there is no message at all.
    """

    writer: bool
    ledger: int
    used: bool


class HeadStart:
    """The head start of the last writer of one topic."""

    def __init__(self) -> None:
        self._seen_at: float | None = None
        self._seen_in = self._missed_in = -1
        self._until = 0.0
        self._ours = False

    def opened(self) -> None:
        """This process has opened the writer; when it asks again, its writer has ended."""
        self._ours = True

    def is_over(self, seen: Presence | None, now: float) -> bool:
        """Whether the writer will not come back. `seen`: None while the topic is being closed or loaded."""
        if seen is None:
            self._missed_in = -1
        elif seen.writer:
            self._seen_at, self._seen_in, self._missed_in, self._ours = now, seen.ledger, -1, False
        elif seen.ledger == self._missed_in:
            return now >= self._until
        else:
            self._missed_in = seen.ledger
            gone = seen.used or seen.ledger == self._seen_in or self._ours
            self._until = now + (GONE_SECONDS if gone else self._seconds(now))
        return False

    def _seconds(self, now: float) -> float:
        if self._seen_at is None:
            return UNKNOWN
        return min(max(OF_THE_OUTAGE * (now - self._seen_at), LEAST), LONGEST)
