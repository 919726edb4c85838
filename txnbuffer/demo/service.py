"""A service process of the demo, `txnbuf serve` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txnbuffer.demo.processes import PATIENCE, DemoFailed

SESSION_TIMEOUT = 5.0
"""Seconds after which the service aborts what a killed producer left open; readers wait so long."""

POLL = 0.002


class Service:
    """The service of the log at an address; on one port over all its lives."""

    def __init__(self, address: str, log_file: str, *flags: str) -> None:
        self._address = address
        self._log_file = log_file
        self._flags = flags
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0

    def start(self) -> None:
        """Begin a life; `wait_for` tells how far it has come."""
        self._told = Path(self._log_file).stat().st_size if Path(self._log_file).exists() else 0
        command = [sys.executable, "-m", "txnbuffer", "serve", self._address]
        command += ["--listen", f"127.0.0.1:{self.port}", "--http", ""]
        command += ["--set", f"transactions.session_timeout={SESSION_TIMEOUT}", *self._flags]
        with open(self._log_file, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command

    def wait_for(self, event: str) -> None:
        """Wait until this life has logged an event. Raises DemoFailed with its log if it ends before."""
        deadline = time.monotonic() + PATIENCE
        while not self.said(event):
            if not self.runs or time.monotonic() > deadline:
                raise self.failed(f"did not come to {event!r}")
            time.sleep(POLL)

    def said(self, event: str, **facts: Any) -> bool:
        """Whether this life has logged an event, with these facts among others."""
        for entry in self._events():
            if entry.get("event") == event and facts.items() <= entry.items():
                self.port = entry.get("port", self.port)
                return True
        return False

    @property
    def runs(self) -> bool:
        """Whether this life has begun and has not ended."""
        return self._process is not None and self._process.poll() is None

    def failed(self, what: str) -> DemoFailed:
        """An error that says what the service did, and shows the log of this life."""
        return DemoFailed(f"the service {what}:\n{self._log().decode(errors='replace')}")

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

    def _events(self) -> Iterator[dict[str, Any]]:
        for line in self._log().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry

    def _log(self) -> bytes:
        with open(self._log_file, "rb") as log:
            log.seek(self._told)
            return log.read()
