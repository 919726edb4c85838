"""The waits of this process, shown to users who look for the cause of a stall, and the retries that wait.

A wait is shown once it has lasted `LONG_SECONDS`. A wait that ended with an error is shown for `KEPT_SECONDS` more, and
counts as one wait with the next attempt if that begins within this time. When an attempt fails after `LONG_SECONDS`,
the logger `txnbuffer.waits` gets a warning; a service writes it to its own log.

There is one policy of retries, for the clients of a service and of a cluster, while it is unavailable. A `Waker` ends
the wait of a loop for other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from broker_io.environment import ThreadQueue, current
from broker_io.errors import Error, ServiceUnavailable

LONG_SECONDS = 3.0
"""Seconds after which a wait is shown."""
KEPT_SECONDS = 30.0
"""Seconds for which a wait that ended with an error is still shown."""
SIGNAL_SECONDS = 1.0
"""A signal that comes just before a wait does not interrupt it; it is handled within this many seconds."""
LOG = logging.getLogger("txnbuffer.waits")


class LongWait(NamedTuple):
    """A wait for `what` that has lasted `seconds`; `reason` is the error of the last attempt, or empty."""

    what: str
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"waiting for {self.what} for {self.seconds:.0f} s: {self.reason or 'no answer yet'}"


class Wait:
    """One wait: it runs from its creation until `pause`, and again from `resume`. Safe from any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._monotonic = current().clock.monotonic
        self._since: float | None = self._monotonic()
        self._reason = ""
        self._logged = False

    @property
    def paused(self) -> bool:
        """Whether the wait is paused."""
        return self._since is None

    def resume(self) -> None:
        """Continue the wait, counting from now."""
        self._since = self._monotonic()

    def pause(self) -> None:
        """Suspend the wait until `resume`, after which it may be logged again."""
        self._since, self._reason, self._logged = None, "", False

    def failed(self, error: BaseException | None) -> None:
        """Note that an attempt failed and another one follows."""
        self._reason = str(error)
        found = self.current()
        if found is not None and not self._logged:
            self._logged = True
            LOG.warning("%s", found)

    def current(self) -> LongWait | None:
        """The wait as it is shown; None if it has not lasted long enough."""
        since = self._since
        seconds = 0.0 if since is None else self._monotonic() - since
        return LongWait(self._what, seconds, self._reason) if seconds > LONG_SECONDS else None


_waits: dict[Wait, None] = {}  # no lock: each change is a single dict operation
_failed: dict[str, tuple[Wait, float]] = {}  # ended with an error, by name; each with the time until it is shown


def begin(what: str) -> Wait:
    """Begin a wait that is shown until `end` is called with it."""
    wait = Wait(what)
    _waits[wait] = None
    return wait


def end(wait: Wait) -> None:
    """End a wait; ending it twice is harmless."""
    _waits.pop(wait, None)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Wait]:
    """Show a wait while the block runs, and for some time longer if the block raises a retryable error."""
    monotonic = current().clock.monotonic
    before, until = _failed.pop(what, (None, 0.0))
    wait = Wait(what) if before is None or monotonic() > until else before
    _waits[wait] = None
    try:
        yield wait
    except Error as error:
        if error.retryable:
            wait.failed(error)
            _failed[what] = wait, monotonic() + KEPT_SECONDS
        raise
    finally:
        end(wait)


def long_waits() -> list[LongWait]:
    """The waits that have lasted `LONG_SECONDS`, longest first."""
    now = current().clock.monotonic()
    for what, (_, until) in [*_failed.items()]:
        if now > until:
            _failed.pop(what, None)
    found = (wait.current() for wait in {**_waits, **dict.fromkeys(wait for wait, _ in [*_failed.values()])})
    return sorted((wait for wait in found if wait is not None), key=lambda wait: -wait.seconds)


T = TypeVar("T")


def next_of(waiting: ThreadQueue[T], seconds: float = math.inf) -> T:
    """Wait for the next item of a queue, so that Ctrl-C ends the wait at whatever time it comes.

    Raises queue.Empty if none comes in some seconds.
    """
    while seconds > SIGNAL_SECONDS:
        with contextlib.suppress(queue.Empty):
            return waiting.get(timeout=SIGNAL_SECONDS)
        seconds -= SIGNAL_SECONDS
    return waiting.get(timeout=seconds)


class Waker:
    """Calls a function on a loop, once for all events of other threads since the last call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self._woken = False

    def wake(self, _: object = None) -> None:
        """Schedule the call after an event, in any thread."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False
        self._call()


FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
MOST_DOUBLINGS = 60
"""The pause has its longest value long before."""


class Backoff:
    """Pauses between the attempts of a shell: up to `first` seconds, then twice as long each time, at most `longest`.

    A random part of each is waited, so that those who lost the same service do not all return at once.
    """

    def __init__(self, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE) -> None:
        self._first, self._longest = first, longest
        self._uniform = current().randomness.uniform

    def after(self, failures: int) -> float:
        """The seconds to wait after this many failures in a row, at least one."""
        doublings = min(failures - 1, MOST_DOUBLINGS)
        return self._uniform(0.0, min(self._first * 2**doublings, self._longest))


class RetryPolicy:
    """Retries for up to `seconds` after ServiceUnavailable; `check` raises once the result is not needed any more.

    The seconds count from the first failure, because an attempt may be a long read; with `from_start` they count from
    the first attempt. `broker_io.waits` shows the wait meanwhile.
    """

    def __init__(self, seconds: float, check: Callable[[], None], *, from_start: bool = False) -> None:
        self.seconds = seconds
        self._check = check
        self._from_start = from_start
        self._environment = current()
        self._backoff = Backoff()

    def __call__(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`; `what` names the wait. Raises the last ServiceUnavailable."""
        clock = self._environment.clock
        began = clock.monotonic() if self._from_start else None
        failures = 0
        with waiting(what) as wait:
            while True:
                try:
                    return attempt()
                except ServiceUnavailable as error:
                    self._check()
                    now = clock.monotonic()
                    began = now if began is None else began
                    if now - began >= self.seconds:
                        raise
                    wait.failed(error)
                failures += 1
                clock.sleep(self._backoff.after(failures))
