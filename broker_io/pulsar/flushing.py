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
        self._lock = threading.Lock()
        self._started = False

    def flush(self, producer: Any) -> None:
        """Have what a producer holds sent now; returns at once."""
        if not self._started:
            self._start()
        self._queue.put(producer.flush)

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(THREADS):
                    threading.Thread(target=self._run, name="pulsar flushes", daemon=True).start()

    def _run(self) -> None:
        while True:
            _try(self._queue.get())


def within(call: Callable[[], Any], seconds: float) -> None:
    """Have a producer flush or close, and wait for that so long at most."""
    thread = threading.Thread(target=_try, args=(call,), name="pulsar closing", daemon=True)
    thread.start()
    thread.join(seconds)


def _try(call: Callable[[], Any]) -> None:
    with contextlib.suppress(pulsar.PulsarException):  # the messages' own acknowledgements tell
        call()


flusher = Flusher()
