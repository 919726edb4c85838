"""The end of a process that can't end by itself, as its threads wait for a cluster that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Leaving:
    """`leave` is called, in a thread, if the end has begun and is not there `seconds` later."""

    def __init__(self, seconds: float, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._timer = threading.Timer(seconds, leave)
        self._timer.daemon = True
        self._begun = False

    def begin(self) -> None:
        """The process is to end from now on; said again it changes nothing."""
        if not self._begun:
            self._begun = True
            self._timer.start()

    def hurry(self, seconds: float) -> None:
        """It is to end within so many seconds: nothing that it waits for can come."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._leave)
        self._timer.daemon = True
        self._begun = True
        self._timer.start()

    def done(self) -> None:
        """It has ended by itself."""
        self._timer.cancel()


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """What a function gives that may wait for long, in a thread that keeps no process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)
