"""How much of a partition one transaction takes, where its handler takes its time.

A transaction is aborted once its time is up, and a member is given up while its event loop stands still. What was
handled meanwhile is done again: fewer records at a time, with a commit after half of the time that was too long. A
record that takes too long alone is handled some times more and then has failed, as one that the handler raises for.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from txnbuffer.model import Position

LONGEST = 5.0
"""Seconds of handling records after which what is done commits: below the time after which a member counts as dead."""
MANY = 1 << 30
"""More records than any batch has."""
WELL = 16
"""Transactions one after the other that go well before twice as many records are tried."""
LEAST_CALLS = 3
"""How often a record is handled that takes too long: what stopped the process for a while comes once."""
BLOCKED = 4.0
"""Seconds for which an event loop stands still if its member may be given up for that."""
TURN = 0.5


class Pace:
    """Of one partition, whoever follows it: `seconds` after which what is done commits, `records` of a transaction."""

    def __init__(self) -> None:
        self.seconds = LONGEST
        self.records = MANY
        self._at: Position | None = None
        self._calls = 0
        self._well = 0

    def calls(self, position: Position) -> int:
        """How often a record alone has taken too long."""
        return self._calls if position == self._at else 0

    def too_long(self, position: Position, count: int, seconds: float, last: float) -> None:
        """So many records from a position on were handled in vain, as that took so long; `last`: the last of them."""
        self.seconds, self._well = min(self.seconds, seconds / 2), 0
        if count > 1:
            self.records = count - 1 if 2 * last >= seconds else (count + 1) // 2
        else:
            self._calls, self._at = self.calls(position) + 1, position

    def well(self) -> None:
        """A transaction has committed."""
        self._well += 1
        if self._well >= WELL:
            self.records, self._well = min(2 * self.records, MANY), 0


class Turns:
    """`longest`: seconds for which the event loop stood still at most, while in the block."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._last = self._loop.time()
        self._timer = self._loop.call_later(TURN, self._turned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._look()

    def _turned(self) -> None:
        self._look()
        self._timer = self._loop.call_later(TURN, self._turned)

    def _look(self) -> None:
        now = self._loop.time()
        self.longest, self._last = max(self.longest, now - self._last), now
