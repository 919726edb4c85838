"""Child processes of the demo, forked from the conductor"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from broker_io.errors import Error

MAX_WAIT = 120.0
"""Seconds without a message from a process after which the demo fails."""

ChildMessage: TypeAlias = tuple[str, Any]


class DemoFailed(Error):
    """A process of the demo ended by itself, or sent no message."""


class Child:
    """A forked process that sends messages over a pipe; forking avoids loading the input again."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, timeout: float = MAX_WAIT) -> ChildMessage:
        """The next message of the child. Raises DemoFailed if it ended, failed or sends none."""
        try:
            if not self.pipe.poll(timeout):
                raise DemoFailed(f"a process of the demo sent no message for {timeout:.0f} s")
            event, value = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise DemoFailed(f"a process of the demo ended with exit code {self._process.exitcode}") from None
        if event == "failed":
            raise DemoFailed(f"a process of the demo failed: {value}")
        return event, value

    def send(self, message: Any) -> None:
        """Send a message to the child. Raises as `receive` if it has ended."""
        try:
            self.pipe.send(message)
        except BrokenPipeError:
            self.receive()
            raise DemoFailed("a process of the demo ended before it received a message") from None

    def kill(self) -> list[ChildMessage]:
        """End the child with SIGKILL; returns its remaining messages."""
        self._process.kill()
        self._process.join()
        messages: list[ChildMessage] = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                messages.append(self.pipe.recv())
        return messages

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _run(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    except Error as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
