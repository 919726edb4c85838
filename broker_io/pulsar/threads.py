"""Threads between this package and the client library: one for acknowledgements, one per call that may hang.

A callback of a future may call anything, but a call into the client library from its own thread would stop the library
for ever. So the library's thread only queues results, and a thread of this package resolves the futures.

The calls that open a reader or a writer can wait for ever although the library has a timeout, if an answer of the
cluster is lost; so each runs in a thread, too.

The library's asynchronous flush and close hold Python's global lock while they wait for a lock of the library, under
which it calls back into Python: a deadlock. The blocking calls release the global lock, so each runs in a thread.

A forked child inherits the objects of the client library, but not its threads, and its locks as they were at the fork.
A call, or the end of an object, would wait for ever and then abort the child. So in a forked child the connections to
the cluster are detached and never used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import pulsar

from broker_io.errors import Closed, Error


class Resolver:
    """One thread that runs queued work in order; it is started on first use."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pulsar acknowledgements", daemon=True)
                self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.put(work)
        if self._stopped:  # of a writer that was opened meanwhile: its appends need their outcome too
            threading.Thread(target=self._drain, name="late pulsar acknowledgements", daemon=True).start()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def wait(self, seconds: float) -> None:
        """Wait for all work that was queued before."""
        if self._thread is None or self.is_current():
            return
        done = threading.Event()
        self.put(done.set)
        done.wait(seconds)

    def stop(self) -> None:
        with self._lock:
            thread = self._thread
            self._stopped = True
        if thread is not None:
            self._queue.put(None)
            if not self.is_current():
                thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _drain(self) -> None:
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(Empty):
            while True:
                if (work := self._queue.get_nowait()) is not None:
                    work()


class Closable(Protocol):
    def close(self) -> object: ...


Opened = TypeVar("Opened", bound=Closable)


class Flusher:
    """The threads of this process that run calls of the library."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget all threads, as in a forked child."""
        self._changed = threading.Condition()
        self._busy = 0

    def run(self, call: Callable[[], Any], seconds: float) -> None:
        """Run a flush or close in a thread, and wait for it at most `seconds`."""
        self._start(call, "pulsar closing").join(seconds)

    def open(self, opening: Callable[[], Opened], seconds: float) -> Opened:
        """The reader or writer that `opening` opens in a thread. One that comes later is closed.

        Raises TimeoutError after `seconds`, and what `opening` raises.
        """
        opened: Future[Opened] = Future()

        def call() -> None:
            try:
                handle = opening()
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    opened.set_exception(error)
                return
            try:
                opened.set_result(handle)
            except InvalidStateError:
                handle.close()

        self._start(call, "pulsar opening")
        try:
            return opened.result(seconds)
        finally:
            opened.cancel()  # does nothing to a future that is done

    def _start(self, call: Callable[[], Any], name: str) -> threading.Thread:
        with self._changed:
            self._busy += 1
        thread = threading.Thread(target=self._do, args=(call,), name=name, daemon=True)
        thread.start()
        return thread

    def wait_idle(self, seconds: float) -> None:
        """Wait until no thread is in the library: one that returns while Python ends would abort it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, seconds)

    def _do(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(pulsar.PulsarException):  # the acknowledgements report it
            call()
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()


flusher = Flusher()


class ForkedResource(Protocol):
    def detach(self, why: Error) -> None:
        """Make every later call fail with `why`; closing does nothing then."""


_open: weakref.WeakSet[ForkedResource] = weakref.WeakSet()


def watch(one: ForkedResource) -> None:
    """Detach a resource in forked children of this process."""
    _open.add(one)


def keep(one: Any) -> None:
    """Keep an object alive for ever, even at the end of Python."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _forked() -> None:
    why = Closed("the connection to the cluster was opened before this process was forked: open another one here")
    for one in [*_open]:
        one.detach(why)
    _open.clear()


os.register_at_fork(after_in_child=_forked)
