"""Sites of the demo: an embedded log with its service, or a Pulsar broker with an active and a standby service.

The child processes of the demo are forked from the conductor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from broker_io.errors import Error
from broker_io.testing.standalone import SHORT_LIVED, StandaloneProcess

if TYPE_CHECKING:
    from txnbuffer import Client, SyncClient

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


SESSION_TIMEOUT = 5.0
"""Seconds after which the service aborts the open transactions of a killed producer."""

POLL = 0.002


class DemoService:
    """A `txnbuf serve` process for the log at an address; it keeps its port over restarts."""

    def __init__(self, address: str, log_file: str, *flags: str) -> None:
        self._address = address
        self._log_file = log_file
        self._flags = flags
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Start the process; `wait_for` waits for its events."""
        self._log_start = Path(self._log_file).stat().st_size if Path(self._log_file).exists() else 0
        command = [sys.executable, "-m", "txnbuffer", "serve", self._address]
        command += ["--listen", f"127.0.0.1:{self.port}", "--http", ""]
        command += ["--set", f"transactions.session_timeout={SESSION_TIMEOUT}", *self._flags]
        with open(self._log_file, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - a fixed command

    def wait_for(self, event: str) -> None:
        """Wait until the process has logged an event. Raises DemoFailed with its log if it ends before."""
        deadline = time.monotonic() + MAX_WAIT
        while not self.said(event):
            if not self.runs or time.monotonic() > deadline:
                raise self.failed(f"did not log {event!r}")
            time.sleep(POLL)

    def said(self, event: str, **fields: Any) -> bool:
        """Whether the process has logged an event with these fields."""
        for entry in self._events():
            if entry.get("event") == event and fields.items() <= entry.items():
                self.port = entry.get("port", self.port)
                return True
        return False

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def failed(self, what: str) -> DemoFailed:
        """An error that says what the service did and shows its log."""
        return DemoFailed(f"the service {what}:\n{self._log().decode(errors='replace')}")

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process, if it runs, with SIGTERM."""
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
            log.seek(self._log_start)
            return log.read()


PAUSE = 0.5
"""Seconds between two attempts to connect."""


class ConnectArguments(NamedTuple):
    """The arguments of `connect` for a site."""

    address: str
    options: dict[str, Any]

    async def open(self) -> Client:
        """Connect; retries while the broker is down."""
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
        """Connect without asyncio."""
        from txnbuffer.client.sync_client import SyncClient

        return SyncClient.open(self.open)


class Site(ABC):
    """One active service, perhaps a standby and a broker. `since` names the start of a recovery in messages."""

    since: str
    serving: DemoService
    """The active service."""
    broker: StandaloneProcess | None = None

    def start(self) -> None:  # noqa: B027  # a site may have nothing to start
        """Start what the services need."""

    @abstractmethod
    def succeed(self) -> None:
        """Make the standby, or a new service, the active one."""

    @abstractmethod
    def connect_arguments(self) -> ConnectArguments:
        """The arguments of `connect`; call it when a service serves."""

    def reinforce(self) -> None:  # noqa: B027
        """Start a standby, if the site has one."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes."""


class EmbeddedSite(Site):
    """A service that owns the log in a directory, restarted after each kill."""

    since = "its start"

    def __init__(self, directory: str, scratch: str) -> None:
        self.serving = DemoService(f"file:{directory}", os.path.join(scratch, "service.log"))

    def connect_arguments(self) -> ConnectArguments:
        return ConnectArguments(f"txnbuf://127.0.0.1:{self.serving.port}", {"timeout": MAX_WAIT})

    def succeed(self) -> None:
        self.serving.start()

    def stop(self) -> None:
        self.serving.stop()


class ClusterSite(Site):
    """A Pulsar broker with an active and a standby service.

    `home` is the directory of the Pulsar server distribution; data and logs are in the directory `scratch`.
    """

    since = "the other one's end"
    broker: StandaloneProcess

    def __init__(self, home: str, scratch: str) -> None:
        self._scratch = scratch
        self._services: list[DemoService] = []
        self._standby: DemoService | None = None
        self.broker = StandaloneProcess(Path(home), Path(scratch), environment=SHORT_LIVED)

    def start(self) -> None:
        """Raises NoPulsar if the broker does not start."""
        self.broker.start()
        self._address = f"{self.broker.url}/{self.broker.namespace()}"

    def connect_arguments(self) -> ConnectArguments:
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
                service.kill()  # draining would wait for the broker, which may be down
        finally:
            self.broker.remove()

    def _started(self) -> DemoService:
        """A new service, started as a standby."""
        log = os.path.join(self._scratch, f"service-{len(self._services)}.log")
        service = DemoService(self._address, log, "--standby", "--admin-url", self.broker.admin)
        self._services.append(service)
        service.start()
        return service
