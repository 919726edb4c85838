"""The loop of an engine, as its parts see it: time, turns, background tasks, operators' requests and the end."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from broker_io.environment import current
from broker_io.errors import Error
from txnbuffer.coordinator.messages import Result, SessionResults


class Loop(ABC):
    """`now()`: seconds since 1970 by the wall clock at the start; monotonic.

    `ended` resolves when the engine has ended, with the error if it failed.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.ended: asyncio.Future[Error | None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._woken = False
        self.in_turn = False
        self.exchanges: list[Callable[[], None]] = []
        """Called at the beginning and at the end of each turn."""
        self._tasks: dict[asyncio.Task[object], None] = {}
        self._operator_requests: dict[int, asyncio.Future[Result]] = {}
        self._last_request = 0

    def wake(self) -> None:
        """Schedule a turn."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._turn)

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a background task; an error that it does not handle ends the engine."""
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._finished)

    async def ask(self, put: Callable[[int], None]) -> Result:
        """Return the coordinator's answer to an operator's request; `put` submits it under a request number."""
        self._last_request += 1
        answer: asyncio.Future[Result] = self._loop.create_future()
        self._operator_requests[self._last_request] = answer
        put(self._last_request)
        self.wake()
        return await answer

    @abstractmethod
    def answer(self, results: SessionResults) -> None:
        """Send answers of the coordinator to a client or an operator."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the engine at once."""

    @abstractmethod
    def _turn(self) -> None:
        """Process everything that has arrived."""

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def from_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call something on a loop, from any thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


LOOP_ERRORS = 1.0
"""Least seconds between two lines about the same error."""


class LoopErrors:
    """Logs the errors that asyncio reports, such as a connection that can't be accepted, at a bounded rate."""

    def __init__(self, log: Callable[..., Any]) -> None:
        self._log = log
        self._last: dict[str, float] = {}

    def handle(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one error, unless one of its kind was just logged."""
        now, error, what = current().clock.monotonic(), context.get("exception"), str(context.get("message", ""))
        if now - self._last.get(what, -LOOP_ERRORS) >= LOOP_ERRORS:
            self._last[what] = now
            self._log("problem", what=what, error="" if error is None else repr(error))
