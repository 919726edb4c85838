"""Where the demo takes place: on an embedded log with its service, or on a broker with two services beside it.

A service process of the demo, `txnbuf serve` as a user runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from broker_io.testing.standalone import SHORT_LIVED, StandaloneProcess
from txnbuffer.demo.processes import MAX_WAIT, DemoFailed

if TYPE_CHECKING:
    from txnbuffer import Client, SyncClient


SESSION_TIMEOUT = 5.0
"""Seconds after which the service aborts what a killed producer left open; readers wait so long."""

POLL = 0.002


class DemoService:
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
        deadline = time.monotonic() + MAX_WAIT
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
            self._process.wait(MAX_WAIT)
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


PAUSE = 0.5
"""Seconds between two attempts to connect."""


class ConnectArguments(NamedTuple):
    """What `connect` takes to reach the site."""

    address: str
    options: dict[str, Any]

    async def open(self) -> Client:
        """Connect, once the site answers: a broker may have been killed this very moment."""
        from txnbuffer import ServiceUnavailable, connect

        deadline = time.monotonic() + MAX_WAIT
        while True:
            try:
                return await connect(self.address, **self.options).open()
            except ServiceUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE)

    def open_sync(self) -> SyncClient:
        """The same without asyncio."""
        from txnbuffer.client.sync_client import SyncClient

        return SyncClient.open(self.open)


class Site(Protocol):
    """Services, one of which serves, and what they need. `since`: what a recovery begins with."""

    since: str

    @property
    def serving(self) -> DemoService:
        """The service that serves, as far as is known."""

    @property
    def broker(self) -> StandaloneProcess | None:
        """What may be killed besides services."""

    def start(self) -> None:
        """Start what services need."""

    def succeed(self) -> None:
        """Let the next service, or the first, be the serving one, which has begun its life then."""

    def way(self) -> ConnectArguments:
        """To be asked once a service serves."""

    def reinforce(self) -> None:
        """Have a service stand by, where one can."""

    def stop(self) -> None:
        """End what runs."""


class EmbeddedSite:
    """A service that owns the log in a directory, started again whenever it was killed."""

    since = "its start"
    broker = None

    def __init__(self, directory: str, scratch: str) -> None:
        self.serving = DemoService(f"file:{directory}", os.path.join(scratch, "service.log"))

    def start(self) -> None:
        pass

    def way(self) -> ConnectArguments:
        return ConnectArguments(f"txnbuf://127.0.0.1:{self.serving.port}", {"timeout": MAX_WAIT})

    def succeed(self) -> None:
        self.serving.start()

    def reinforce(self) -> None:
        pass

    def stop(self) -> None:
        self.serving.stop()


class ClusterSite:
    """A broker of our own with two services beside it, one of which stands by.

    `home` is that of Pulsar's server distribution; data and logs stand in the directory `scratch`.
    """

    since = "the other one's end"
    serving: DemoService

    def __init__(self, home: str, scratch: str) -> None:
        self._scratch = scratch
        self._services: list[DemoService] = []
        self._standby: DemoService | None = None
        self.broker = StandaloneProcess(Path(home), Path(scratch), environment=SHORT_LIVED)

    def start(self) -> None:
        """Raises NoPulsar if the broker does not start."""
        self.broker.start()
        self._address = f"{self.broker.url}/{self.broker.namespace()}"

    def way(self) -> ConnectArguments:
        options = {"admin_url": self.broker.admin, "max_unavailable": MAX_WAIT}
        return ConnectArguments(self._address, {"max_unavailable": MAX_WAIT, "broker_options": options})

    def succeed(self) -> None:
        self.serving, self._standby = self._standby or self._started(), None

    def reinforce(self) -> None:
        if self._standby is None:
            self._standby = self._started()
            self._standby.wait_for("standing by")

    def stop(self) -> None:
        try:
            for service in self._services:
                service.kill()  # to drain would mean to wait for the broker, which may be gone
        finally:
            self.broker.remove()

    def _started(self) -> DemoService:
        """A service that stands by until nobody serves."""
        log = os.path.join(self._scratch, f"service-{len(self._services)}.log")
        service = DemoService(self._address, log, "--standby", "--admin-url", self.broker.admin)
        self._services.append(service)
        service.start()
        return service
