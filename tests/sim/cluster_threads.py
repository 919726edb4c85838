"""The threads that the broker port of a cluster starts for the client library, as threads of a simulated process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from sim.process_state import ProcessObject

from broker_io.environment import current
from broker_io.pulsar import cluster, reader, threads, writer

if TYPE_CHECKING:
    from sim.world import Process

Find = Callable[[], "Process | None"]


class ProcessThreading:
    """The names of `threading` that the port uses."""

    def __init__(self, find: Find) -> None:
        self._find = find

    def Thread(self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", **_: Any) -> Any:  # noqa: N802
        return StartedThread(lambda: target(*args), name)

    def Lock(self) -> Any:  # noqa: N802
        return current().threads.lock()

    def Condition(self) -> Any:  # noqa: N802
        return current().threads.condition()

    def Event(self) -> Any:  # noqa: N802
        return current().threads.event()

    def current_thread(self) -> Any:
        process = self._find()
        return None if process is None else StartedThread.running.get(process.world.scheduler.current)


class StartedThread:
    """A thread with the interface of `threading.Thread`."""

    running: ClassVar[dict[Any, StartedThread]] = {}

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._thread: Any = current().threads.thread(self._run, name=name, daemon=True)
        self._work = work

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        scheduler = self._thread._process.world.scheduler
        thread = scheduler.current
        self.running[thread] = self
        try:
            self._work()
        finally:
            self.running.pop(thread, None)


@contextlib.contextmanager
def threads_of_processes(find: Find) -> Iterator[None]:
    """Let these threads be simulated ones for a block, and each process have a flusher of its own."""
    modules: tuple[Any, ...] = (cluster, reader, writer, threads)
    port: Any = threads
    before = port.threading, port.SimpleQueue, port.flusher
    flusher = ProcessObject(find, threads.Flusher)
    port.threading, port.SimpleQueue = ProcessThreading(find), lambda: current().threads.queue()
    for module in modules:
        module.flusher = flusher
    try:
        yield
    finally:
        port.threading, port.SimpleQueue, old = before
        for module in modules:
            module.flusher = old
        StartedThread.running.clear()
