"""Sites of the demo: an embedded log with its service, or with a pair of services, or a Pulsar broker with an active
and a standby service.

The child processes of the demo are forked from the conductor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from broker_io import open_broker
from broker_io.errors import Error, PeerError
from broker_io.port import PLUG_IN_SETTINGS
from broker_io.standalone import SHORT_LIVED, Port, StandaloneProcess
from txnbuffer.recovery.plain import PlainCheck, verify_plain

if TYPE_CHECKING:
    from txnbuffer import Client, SyncClient

MAX_WAIT = 120.0
"""Seconds without a message from a process after which the demo fails."""

ChildMessage: TypeAlias = tuple[str, Any]


class DemoFailed(PeerError):
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
ROLES = ("standing by", "serving", "failed")
"""Events of a service that say whether it owns the log."""


class DemoService:
    """A `txnbuf serve` process for the log at an address; it keeps its port over restarts."""

    def __init__(self, address: str, log_file: str, *flags: str) -> None:
        self._address = address
        self._log_file = log_file
        self._flags = flags
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, *flags: str) -> None:
        """Start the process, with more flags this time; `wait_for` waits for its events."""
        self._log_start = Path(self._log_file).stat().st_size if Path(self._log_file).exists() else 0
        command = [sys.executable, "-m", "txnbuffer", "serve", self._address]
        command += ["--listen", f"127.0.0.1:{self.port}", "--http", ""]
        command += ["--set", f"transactions.session_timeout={SESSION_TIMEOUT}", *self._flags, *flags]
        with open(self._log_file, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - a fixed command

    def wait_for(self, event: str, *, newest: bool = False, **fields: Any) -> None:
        """Wait until `said` is true. Raises DemoFailed with the log if the process ends before."""
        deadline = time.monotonic() + MAX_WAIT
        while not self.said(event, newest=newest, **fields):
            if not self.runs or time.monotonic() > deadline:
                raise self.failed(f"did not log {event!r}")
            time.sleep(POLL)

    def said(self, event: str, *, newest: bool = False, **fields: Any) -> bool:
        """Whether the process has logged an event with these fields; with `newest` only the last such event counts."""
        events = [entry for entry in self._events() if entry.get("event") == event]
        for entry in events[-1:] if newest else events:
            if fields.items() <= entry.items():
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

    @property
    def serves(self) -> bool:
        """Whether the process owns the log, as far as it has logged."""
        roles = [entry["event"] for entry in self._events() if entry.get("event") in ROLES]
        return self.runs and roles[-1:] == ["serving"]

    def forget(self) -> None:
        """Ignore what the process has logged until now."""
        self._log_start = Path(self._log_file).stat().st_size

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
        from txnbuffer.client.sync.sync_client import SyncClient

        return SyncClient.open(self.open)


class Site(ABC):
    """One active service, perhaps a standby and a broker. `since` names the start of a recovery in messages."""

    since: str
    serving: DemoService
    """The active service."""
    killed_in_recovery = True
    """Whether a service may be killed during its recovery."""
    broker: StandaloneProcess | None = None

    def start(self) -> None:  # noqa: B027  # a site may have nothing to start
        """Start what the services need."""

    @abstractmethod
    def succeed(self) -> None:
        """Make the standby, or a new service, the active one."""

    @abstractmethod
    def connect_arguments(self) -> ConnectArguments:
        """The arguments of `connect`; call it when a service serves."""

    def reinforce(self) -> str:
        """Start a standby, if the site has one; what else was done, for the person who watches."""
        return ""

    def check_plain(self, topics: Sequence[str]) -> list[PlainCheck]:
        """What plain consumers of each topic get, if they see only what committed."""
        return []

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


LEASE = 2.0
"""Seconds after which the backup of a pair takes over from a killed live."""


class PairSite(Site):
    """A pair of services with the same log in two directories, and a file as their lock.

    The directory of the service that is killed next half-way is deleted before it starts again.
    """

    since = "the kill of the other one"
    killed_in_recovery = False

    def __init__(self, directory: str, scratch: str, kills: int) -> None:
        os.makedirs(directory, exist_ok=True)
        self._directories = [os.path.join(directory, name) for name in ("a", "b")]
        self._ports, links = [Port(), Port()], [Port(), Port()]
        lock = ("--pair-lock", f"file:{os.path.join(directory, 'lock')}", "--set", f"pair.lease_seconds={LEASE}")
        self._services: list[DemoService] = []
        for number, place in enumerate(self._directories):
            own, peer = links[number].number, links[1 - number].number
            flags = (*lock, "--pair-listen", f"127.0.0.1:{own}", "--backup-of", f"127.0.0.1:{peer}")
            service = DemoService(f"file:{place}", os.path.join(scratch, f"service-{number}.log"), *flags)
            service.port = self._ports[number].number
            self._services.append(service)
        self._links = links
        self._deleted_at = (kills + 1) // 2
        self._takeovers = 0

    def connect_arguments(self) -> ConnectArguments:
        address = ",".join(f"127.0.0.1:{port.number}" for port in self._ports)
        return ConnectArguments(f"txnbuf://{address}", {"timeout": MAX_WAIT})

    def succeed(self) -> None:
        self.serving = self._services[self._takeovers % 2]
        if not self._takeovers:
            self.serving.start("--found")
        self._takeovers += 1

    def reinforce(self) -> str:
        number, done = self._takeovers % 2, ""
        backup = self._services[number]
        if not backup.runs:
            if self._takeovers == self._deleted_at + 1:
                shutil.rmtree(self._directories[number])
                done = f"the directory of the killed service is deleted: {self._directories[number]}"
            backup.start()
            self.serving.wait_for("pair", newest=True, role="live", in_sync=2)
        return done

    def stop(self) -> None:
        for service in self._services:
            service.kill()


class ClusterSite(Site):
    """A Pulsar broker with an active and a standby service.

    `home` is the directory of the Pulsar server distribution; data and logs are in the directory `scratch`. `jar` is
    that of the broker plug-in, if the broker has it.
    """

    since = "the other one's end"
    broker: StandaloneProcess

    def __init__(self, home: str, scratch: str, jar: Path | None = None) -> None:
        self._scratch = scratch
        self._services: list[DemoService] = []
        self._standby: DemoService | None = None
        self._jar = jar
        settings = [f"{name}={value}" for name, value in PLUG_IN_SETTINGS.items()] if jar else []
        environment = {**SHORT_LIVED, **({"PULSAR_EXTRA_CLASSPATH": str(jar)} if jar else {})}
        self.broker = StandaloneProcess(Path(home), Path(scratch), settings, environment)

    def start(self) -> None:
        """Raises NoPulsar if the broker does not start."""
        self.broker.start()
        self._address = f"{self.broker.url}/{self.broker.namespace()}"

    def connect_arguments(self) -> ConnectArguments:
        options = {"admin_url": self.broker.admin, "max_unavailable": MAX_WAIT}
        return ConnectArguments(self._address, {"max_unavailable": MAX_WAIT, "broker_options": options})

    def succeed(self) -> None:
        former = self.serving if self._services else None
        standby, self._standby = self._standby or self._started(), None
        if former and former.runs:  # it was fenced, and is a standby again, or serves again by now
            deadline = time.monotonic() + MAX_WAIT
            while not (standby.serves or former.serves):
                if time.monotonic() > deadline:
                    raise former.failed("was fenced, and none took over")
                time.sleep(POLL)
            if not former.serves:
                former.forget()
                standby, former = former, standby
            self.serving, self._standby = former, standby
        else:
            self.serving = standby

    def reinforce(self) -> str:
        if self._standby is None:
            self._standby = self._started()
            self._standby.wait_for("standing by")
        return ""

    def check_plain(self, topics: Sequence[str]) -> list[PlainCheck]:
        if self._jar is None:
            return []
        with open_broker(self._address, **self.connect_arguments().options["broker_options"]) as broker:
            return [verify_plain(broker, topic, MAX_WAIT) for topic in topics]

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
