"""A service process for tests that call, signal and kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from broker_io.standalone import Port

STARTING = 180.0
"""Seconds within which a service must serve, on a machine that is busy with other tests."""
_KEPT: list[Port] = []


def kept_port() -> int:
    """A port for a service and its restarts, reserved until this process ends."""
    _KEPT.append(Port())
    return _KEPT[-1].number


class ServiceProcess:
    """`txnbuf serve` on a directory or the address of a cluster; `events` are those that it logged.

    `python` are the arguments of the interpreter that start `txnbuf`; `environment` has additional variables.
    """

    def __init__(
        self,
        directory: Path | str,
        *flags: str,
        port: int = 0,
        python: Sequence[str] = ("-m", "txnbuffer"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        address = str(directory) if "://" in str(directory) else f"file:{directory}"
        command = [sys.executable, *python, "serve", address]
        command += ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0", *flags]
        variables = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=variables
        )
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._serving = threading.Event()
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("{"):
                # A line of gRPC may come before the end of this one.
                self.events.append(json.JSONDecoder().raw_decode(line)[0])
                if self.events[-1]["event"] == "serving":
                    self._serving.set()
                self._told.set()
        self._serving.set()
        self._told.set()

    def wait_serving(self) -> Self:
        self._serving.wait(STARTING)
        assert self.event("serving") is not None, "".join(self.lines)
        return self

    def wait_event(self, name: str) -> dict[str, Any]:
        """Wait for an event; its fields."""
        deadline = time.monotonic() + STARTING
        while (found := self.event(name)) is None:
            self._told.clear()
            assert time.monotonic() < deadline, "".join(self.lines)
            assert self.process.poll() is None, "".join(self.lines)
            self._told.wait(0.2)
        return found

    def event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == name), None)

    @property
    def serves(self) -> bool:
        """Whether it owns the log, as far as it has logged."""
        roles = [event["event"] for event in self.events if event["event"] in ("standing by", "serving", "failed")]
        return roles[-1:] == ["serving"]

    @property
    def port(self) -> int:
        event = self.event("serving")
        assert event is not None
        return int(event["port"])

    @property
    def http(self) -> int:
        event = self.event("serving")
        assert event is not None
        return int(event["http"])

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.finish()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def finish(self, seconds: float = STARTING) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(60)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code

    def __enter__(self) -> Self:
        return self.wait_serving()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.finish()
