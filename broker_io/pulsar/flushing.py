"""Calls into the client library that may block or hang, each in a thread of ours.

Its asynchronous flush and close keep Python's global lock while they wait for a lock of the library's own, under which
it calls back into Python: sooner or later both stand still for ever. Those that block let go of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pulsar


class Flusher:
    """The threads of a process that are in the library."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Without any thread, as in a child of the process."""
        self._changed = threading.Condition()
        self._busy = 0

    def within(self, call: Callable[[], Any], seconds: float) -> None:
        """Have something flush or close, and wait for that so long at most."""
        with self._changed:
            self._busy += 1
        thread = threading.Thread(target=self._do, args=(call,), name="pulsar closing", daemon=True)
        thread.start()
        thread.join(seconds)

    def rest(self, seconds: float) -> None:
        """Wait until no thread is in the library any more: one that comes back while Python ends aborts it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, seconds)

    def _do(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(pulsar.PulsarException):  # the messages' own acknowledgements tell
            call()
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()


flusher = Flusher()
