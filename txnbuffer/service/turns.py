"""A few threads for what many things have to do now and then: each gets a turn when it is due."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 8
"""Turns of things that have something to do."""
ASIDE = 4
"""Turns that may take long, as a cluster is asked: others do not wait for them."""

Turn = Callable[[], None]


class Turns:
    """The threads; they end with `stop`, after which no turn begins."""

    def __init__(self, name: str) -> None:
        self._soon = ThreadPoolExecutor(AT_ONCE, name)
        self._aside = ThreadPoolExecutor(ASIDE, f"{name}-aside")
        self._later: list[tuple[float, int, Turn]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._clock: threading.Thread | None = None
        self._name = name

    def soon(self, turn: Turn) -> None:
        """Behind the turns that wait already."""
        self._submit(self._soon, turn)

    def aside(self, turn: Turn) -> None:
        """As `soon`, for what may take long."""
        self._submit(self._aside, turn)

    def later(self, seconds: float, turn: Turn) -> None:
        """In the one thread that knows the time: it must not wait for anything."""
        due = time.monotonic() + seconds
        with self._changed:
            if self._stopped:
                return
            heapq.heappush(self._later, (due, next(self._numbers), turn))
            if self._clock is None:
                self._clock = threading.Thread(target=self._run, name=f"{self._name}-later", daemon=True)
                self._clock.start()
            elif self._later[0][0] == due:
                self._changed.notify()

    def stop(self) -> None:
        """Wait for the turns that have begun; no other one begins."""
        with self._changed:
            self._stopped = True
            self._later.clear()
            self._changed.notify()
        if self._clock is not None:
            self._clock.join()
        for pool in (self._soon, self._aside):
            pool.shutdown(cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, turn: Turn) -> None:
        with self._changed:
            if not self._stopped:
                pool.submit(turn)

    def _run(self) -> None:
        while (turn := self._due()) is not None:
            turn()

    def _due(self) -> Turn | None:
        """The next turn, once it is due; None at the end."""
        with self._changed:
            while not self._stopped:
                if not self._later:
                    self._changed.wait()
                elif (missing := self._later[0][0] - time.monotonic()) > 0:
                    self._changed.wait(missing)
                else:
                    return heapq.heappop(self._later)[2]
        return None
