"""A clock and a source of randomness that repeat themselves, for simulated environments."""

from __future__ import annotations

import random

START_MS = 1_700_000_000_000


class SimulatedClock:
    """Time that stands still until somebody sleeps or advances it."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now = now_ms / 1000
        self._monotonic = 0.0

    def now_ms(self) -> int:
        return round(self._now * 1000)

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
        self._monotonic += seconds

    def set_ms(self, now_ms: int) -> None:
        """Set the wall clock, as an operator or NTP does; `monotonic` takes no notice."""
        self._now = now_ms / 1000


class SeededRandomness:
    """The same tokens for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - it has to be repeatable

    def token(self, size: int) -> bytes:
        return self._random.randbytes(size)
