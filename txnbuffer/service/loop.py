"""The loop of an engine, as its parts see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from txnbuffer.coordinator.messages import Result, SessionResults


class Loop(Protocol):
    """The time, turns, background tasks and the end of an engine."""

    def now(self) -> float:
        """Seconds since 1970 by the wall clock at the start; monotonic."""

    def wake(self) -> None:
        """Schedule a turn."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a background task; an error that it does not handle ends the engine."""

    def fail(self, error: BaseException) -> None:
        """End the engine at once."""

    async def ask(self, put: Callable[[int], None]) -> Result:
        """Return the coordinator's answer to a request; `put` submits it under a request number."""

    def answer(self, results: SessionResults) -> None:
        """Send answers of the coordinator to a client or an operator."""
