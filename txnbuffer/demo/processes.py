"""The processes of the demo: the service, and children forked from the conductor."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from broker_io.errors import Error

PATIENCE = 60.0
"""Seconds without a word from a process after which the demo gives up."""

SESSION_TIMEOUT = 5.0
"""Seconds after which the service aborts what a killed producer left open; readers wait so long."""

POLL = 0.002

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

    def hear(self, timeout: float = PATIENCE) -> Word:
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


class Service:
    """`txnbuf serve` on a directory, as a user runs it; on one port over all its lives."""

    def __init__(self, directory: str, log_file: str) -> None:
        self._directory = directory
        self._log_file = log_file
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0

    @property
    def address(self) -> str:
        return f"txnbuf://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Begin a life; `wait_for` tells how far it has come."""
        self._told = Path(self._log_file).stat().st_size if Path(self._log_file).exists() else 0
        command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{self._directory}"]
        command += ["--listen", f"127.0.0.1:{self._port}", "--http", ""]
        command += ["--set", f"transactions.session_timeout={SESSION_TIMEOUT}"]
        with open(self._log_file, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command

    def wait_for(self, event: str) -> None:
        """Wait until this life has logged an event. Raises DemoFailed with its log if it ends before."""
        deadline = time.monotonic() + PATIENCE
        while not self.said(event):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the service did not come to {event!r}:\n{self._log().decode(errors='replace')}")
            time.sleep(POLL)

    def said(self, event: str) -> bool:
        """Whether this life has logged an event."""
        for line in self._log().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == event:
                    self._port = entry.get("port", self._port)
                    return True
        return False

    def kill(self) -> None:
        """End this life with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End this life, if there is one, as an operator would."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)
            self._process.wait(PATIENCE)
        self._process = None

    def _log(self) -> bytes:
        with open(self._log_file, "rb") as log:
            log.seek(self._told)
            return log.read()
