"""Sending at once what the client library would keep for a batch.

Its asynchronous flush keeps Python's global lock while it waits for a lock of its own, under which it calls back
into Python: sooner or later both stand still for ever. The one that blocks lets go of it, so threads of ours call that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pulsar

THREADS = 4
"""Flushes at the same time. One more waits, at most for as long as batches wait that nobody flushes."""


class Flusher:
    """The threads of a process, started when they are first needed; they end with it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._changed = threading.Condition()
        self._started = False
        self._busy = 0

    def flush(self, producer: Any) -> None:
        """Have what a producer holds sent now; returns at once."""
        if not self._started:
            self._start()
        with self._changed:
            self._busy += 1
        self._queue.put(producer.flush)

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

    def _start(self) -> None:
        with self._changed:
            if not self._started:
                self._started = True
                for _ in range(THREADS):
                    threading.Thread(target=self._run, name="pulsar flushes", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._do(self._queue.get())

    def _do(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(pulsar.PulsarException):  # the messages' own acknowledgements tell
            call()
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()


flusher = Flusher()
