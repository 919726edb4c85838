"""The children of the demo, forked from the conductor."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from broker_io.errors import Error

MAX_WAIT = 120.0
"""Seconds without a word from a process after which the demo gives up."""

Word: TypeAlias = tuple[str, Any]


class DemoFailed(Error):
    """A process of the demo died on its own, or fell silent."""


class Child:
    """A forked process that talks to us over a pipe; forking spares loading the year again."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self, timeout: float = MAX_WAIT) -> Word:
        """The next word of the child. Raises DemoFailed if it died, failed or is silent."""
        try:
            if not self.pipe.poll(timeout):
                raise DemoFailed(f"a process of the demo said nothing for {timeout:.0f} s")
            event, value = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise DemoFailed(f"a process of the demo died with code {self._process.exitcode}") from None
        if event == "failed":
            raise DemoFailed(f"a process of the demo failed: {value}")
        return event, value

    def tell(self, word: Any) -> None:
        """Raises as `hear` if the child is gone."""
        try:
            self.pipe.send(word)
        except BrokenPipeError:
            self.hear()
            raise DemoFailed("a process of the demo ended too early") from None

    def kill(self) -> list[Word]:
        """End the child with SIGKILL; what it had still said."""
        self._process.kill()
        self._process.join()
        words: list[Word] = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                words.append(self.pipe.recv())
        return words

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _run(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    except Error as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
