"""What this process waits for at the moment, so that whoever asks why nothing moves is told.

A wait is shown once it has lasted `LONG` seconds. One that ended in vain is shown for `KEPT` seconds more, and goes on
if the same is waited for again by then: who gives up and begins anew has waited all the time. It is told to the logger
`txnbuffer.waits` when an attempt fails after that; a service tells it in its own log.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import NamedTuple

from broker_io.errors import Error

LONG = 3.0
"""Seconds from which on a wait is shown."""
KEPT = 30.0
"""Seconds for which one that ended in vain is shown, too."""
LOG = logging.getLogger("txnbuffer.waits")


class LongWait(NamedTuple):
    """`what` has been waited for so many `seconds`; `reason`: what the last attempt was told, empty if nothing."""

    what: str
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"waiting for {self.what} for {self.seconds:.0f} s: {self.reason or 'there is no answer'}"


class Wait:
    """One wait; it goes on from its beginning until `rest`, and again from `goes_on`. Safe from any thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = time.monotonic()
        self._reason = ""
        self._told = False

    @property
    def resting(self) -> bool:
        """Whether nothing is waited for now."""
        return self._since is None

    def goes_on(self) -> None:
        """What is still waited for is waited for since now."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Nothing is waited for now."""
        self._since, self._reason = None, ""

    def failed(self, error: BaseException | None) -> None:
        """An attempt has failed, and there will be another one."""
        self._reason = str(error)
        found = self.look()
        if found is not None and not self._told:
            self._told = True
            LOG.warning("%s", found)

    def look(self) -> LongWait | None:
        """How it stands, None if it has not lasted long."""
        since = self._since
        seconds = 0.0 if since is None else time.monotonic() - since
        return LongWait(self._what, seconds, self._reason) if seconds > LONG else None


_waits: dict[Wait, None] = {}  # without a lock: each change of it is one step, also in a thread of a library
_in_vain: dict[str, tuple[Wait, float]] = {}  # by what was waited for, until when each is shown


def begin(what: str) -> Wait:
    """A wait that is shown until `end` is called with it."""
    wait = Wait(what)
    _waits[wait] = None
    return wait


def end(wait: Wait) -> None:
    """It is over; said twice it changes nothing."""
    _waits.pop(wait, None)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Wait]:
    """Inside, this is waited for; in vain, if it ends with an error."""
    before, until = _in_vain.pop(what, (None, 0.0))
    wait = Wait(what) if before is None or time.monotonic() > until else before
    _waits[wait] = None
    try:
        yield wait
    except Error as error:
        if error.retryable:
            wait.failed(error)
            _in_vain[what] = wait, time.monotonic() + KEPT
        raise
    finally:
        end(wait)


def long_waits() -> list[LongWait]:
    """Those that have lasted `LONG` seconds, the longest first."""
    now = time.monotonic()
    for what, (_, until) in [*_in_vain.items()]:
        if now > until:
            _in_vain.pop(what, None)
    found = (wait.look() for wait in {**_waits, **dict.fromkeys(wait for wait, _ in [*_in_vain.values()])})
    return sorted((wait for wait in found if wait is not None), key=lambda wait: -wait.seconds)
