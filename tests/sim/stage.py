"""Runs functions in a thread of a simulated process, and what they use of `time` and `threading`, simulated."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any, TypeVar

from sim.world import Process, World

from broker_io.environment import current

T = TypeVar("T")


class Stage:
    """A simulated process that runs one function after the other."""

    def __init__(self, world: World, host: str = "alpha") -> None:
        self.world = world
        self._work: list[Any] = []
        self.process: Process = world.host(host).spawn("test", self._serve)

    def call(self, work: Callable[[], T]) -> T:
        """The result of a function; time passes until it returns."""
        done: list[tuple[Any, BaseException | None]] = []
        self._work.append((work, done))
        assert self.world.run(10_000.0, lambda: bool(done)), "it does not return"
        result, error = done[0]
        if error is not None:
            raise error
        found: T = result
        return found

    def _serve(self) -> None:
        while True:
            if not self._work:
                self.process.clock.sleep(0.001)
                continue
            work, done = self._work.pop(0)
            try:
                done.append((work(), None))
            except BaseException as error:
                done.append((None, error))


class SimulatedTime:
    """The names of `time`."""

    @staticmethod
    def time_ns() -> int:
        return current().clock.now_ms() * 1_000_000

    @staticmethod
    def monotonic() -> float:
        return current().clock.monotonic()

    @staticmethod
    def sleep(seconds: float) -> None:
        current().clock.sleep(seconds)


class SimulatedThreading:
    """The names of `threading`."""

    @staticmethod
    def Event() -> Any:  # noqa: N802  as in threading
        return current().threads.event()


class Semaphore:
    """A semaphore that parks its thread."""

    def __init__(self, count: int) -> None:
        self._queue = current().threads.queue()
        for _ in range(count):
            self.release()

    def release(self) -> None:
        self._queue.put(None)

    def acquire(self, timeout: float | None = None) -> bool:
        try:
            self._queue.get(timeout=timeout)
        except Empty:
            return False
        return True
