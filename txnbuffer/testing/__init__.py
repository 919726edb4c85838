"""Fixtures for the tests of applications: `pytest_plugins = ["txnbuffer.testing"]` in a conftest.py.

`pip install 'txnbuffer[testing]'` installs what they need.
`txnbuf_service` is a service in a separate process, which tests connect to at its `address`, kill and restart.
`txnbuf_address` is the address of an embedded log for the process of the tests. Both store in `tmp_path`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from broker_io.standalone import Port
from txnbuffer.errors import ServiceUnavailable

__all__ = ["ServiceProcess", "txnbuf_address", "txnbuf_service"]

LAST_LINES = 50


class ServiceProcess:
    """`txnbuf serve` on the embedded log of a directory; it keeps its port when it restarts.

    `options` are further arguments of `txnbuf serve`; `lines` are the last 50 lines of its stderr.
    """

    def __init__(self, directory: str, *options: str) -> None:
        self.directory = directory
        self._kept = Port()  # so that no other process gets it during a restart
        self.port = self._kept.number
        self.lines: list[str] = []
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """The address for `connect`."""
        return f"txnbuf://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id; None if the service is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the service and wait until it serves. Raises ServiceUnavailable with its last lines of stderr."""
        command = [sys.executable, "-m", "txnbuffer", "serve", f"file:{self.directory}"]
        command += ["--listen", f"127.0.0.1:{self.port}", "--http", "", *self._options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
        error = self._process.stderr
        if error is None:
            raise AssertionError("stderr is not a pipe")
        for line in error:
            event = self._event(line)
            if event.get("event") == "serving":
                self.port = int(event["port"])
                threading.Thread(target=self._listen, args=(error,), daemon=True).start()
                return
        code = self._process.wait()
        error.close()
        self._process = None
        raise ServiceUnavailable(f"the service exited with code {code}: {''.join(self.lines[-LAST_LINES:])}")

    def stop(self) -> int:
        """Terminate the service (SIGTERM) and wait; the exit code. Raises ServiceUnavailable if it is not running."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the service (SIGKILL), as a crash would; does nothing if it is not running."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the service and start it again."""
        self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            raise ServiceUnavailable("the service is not running: start it")
        self._process = None
        process.send_signal(number)
        return process.wait()

    def _listen(self, error: IO[str]) -> None:
        with error:
            for line in error:
                self._event(line)

    def _event(self, line: str) -> dict[str, Any]:
        self.lines.append(line)
        del self.lines[:-LAST_LINES]
        try:
            event = json.loads(line)
        except ValueError:
            return {}
        return event if isinstance(event, dict) else {}


@pytest.fixture
def txnbuf_service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A running service on an empty directory in `tmp_path`; it is killed when the test ends."""
    service = ServiceProcess(str(tmp_path / "txnbuf"))
    service.start()
    yield service
    service.kill()


@pytest.fixture
def txnbuf_address(tmp_path: Path) -> str:
    """`file:DIR` of an empty directory: data persists between the connections of a test; one is open at a time."""
    return f"file:{tmp_path / 'txnbuf'}"
