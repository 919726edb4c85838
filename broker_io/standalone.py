"""A private standalone Pulsar broker from the server distribution, which demo, benchmarks and tests kill and restart.

It listens on 127.0.0.1 only, on the ports that it advertises, and its data survives a kill. Any process can end it with
its `handle`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from broker_io.errors import EnvironmentFault

FLAGS = ["--no-functions-worker", "--no-stream-storage", "--advertised-address", "127.0.0.1"]
ENVIRONMENT = {
    "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g",
    "PULSAR_GC": "-XX:+UseSerialGC",
    "PULSAR_GC_LOG": "-Xlog:disable",
    "PULSAR_STANDALONE_USE_ZOOKEEPER": "0",  # ZooKeeper would use a fixed port
}
SHORT_LIVED = {**ENVIRONMENT, "PULSAR_GC": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
"""For a broker that is started often: its start takes half the CPU time, its peak rate is lower."""
LOG_LINES = 30
STUCK_LINES = 20
"""Log lines about a lost registration after which a broker counts as stuck; a healthy one logs two."""
LOG_SECONDS = 2.0
"""Seconds between two looks at the log of a starting broker."""
STARTS = 8
LOOKS, LOOK_SECONDS = 10, 0.2
"""Checks of a restarted broker, whose first answers can be wrong."""
STARTING = 240.0
"""Seconds within which a new broker must be up, on a machine that is busy with other tests."""
RETURNING = 60.0
"""Seconds within which a restarted broker must be up at the first attempt; n times as many at the n-th."""


def environment_with(chosen: Mapping[str, str]) -> dict[str, str]:
    """The environment of a broker; `PULSAR_MEM` of this process, if set, overrides its memory."""
    own = os.environ.get("PULSAR_MEM")
    return {**chosen, "PULSAR_MEM": own} if own else dict(chosen)


def minor_versions(lib: Path) -> set[str]:
    """The minor versions, such as 4.0, of the Pulsar brokers whose jars a directory has."""
    names = [path.name for path in lib.glob("*pulsar-broker-*.jar")]
    return {found[1] for name in names if (found := re.search(r"pulsar-broker-(\d+\.\d+)\.\d", name))}


class NoPulsar(EnvironmentFault):
    """No Pulsar is available; the message says what to do."""


def ask(admin: str, path: str, method: str = "GET", body: Any = None, *, seconds: float = 30.0) -> Any:
    """The decoded answer of `/admin/v2/PATH`, or None if it is empty. Raises `urllib.error.HTTPError` if refused."""
    data = None if body is None else json.dumps(body).encode()
    place = f"{admin}/admin/v2/{path}"
    request = urllib.request.Request(place, data, method=method)  # noqa: S310 - a broker for tests
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
        text = answer.read()
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text.decode()


def is_up(admin: str) -> bool:
    """Whether the broker has created its tenant and passes its health check, which writes and reads a message."""
    try:
        ask(admin, "namespaces/public", seconds=10.0)  # refused until the tenant exists
        return bool(ask(admin, "brokers/health", seconds=10.0) == "ok")
    except (OSError, ValueError):
        return False


def wait_until_up(admin: str, alive: Callable[[], bool], log: Callable[[], str], seconds: float) -> bool:
    """Whether a starting broker is up within `seconds` and not stuck. Raises NoPulsar if it ends."""
    started = log_read = time.monotonic()
    while not is_up(admin):
        if not alive():
            raise NoPulsar(f"the Pulsar broker at {admin} ended during its start; the end of its log:\n{end_of(log())}")
        now = time.monotonic()
        if now > log_read + LOG_SECONDS:  # which is long, so reading it often would slow down the start
            log_read = now
            if is_stuck(log()):
                return False
        if now > started + seconds:
            return False
        time.sleep(0.2)
    return True


def failed(admin: str, what: str, log: str) -> NoPulsar:
    return NoPulsar(f"the Pulsar broker at {admin} {what}; the end of its log:\n{end_of(log)}")


def is_stuck(log: str) -> bool:
    """Whether a restarted broker registers its bookie again and again.

    Pulsar sometimes does that after a kill, without end, because the old registration still exists. Writes then fail,
    topics move, and one CPU is busy.
    """
    return log.count("was invalidated") >= STUCK_LINES


def end_of(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_LINES:])


def make_namespace(admin: str) -> str:
    """Create a namespace, `public/…`, with a unique name."""
    name = f"public/tb-{uuid.uuid4().hex[:16]}"
    ask(admin, f"namespaces/{name}", "PUT", {})
    return name


class Port:
    """A TCP port of 127.0.0.1, reserved while this object exists.

    Its socket is bound and never listens: a server that sets SO_REUSEADDR, as brokers do, can bind the port, also again
    after a kill, and the system gives it to no process that requests any free port.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]
        weakref.finalize(self, self._socket.close)

    def free(self) -> None:
        self._socket.close()


class Standalone:
    """A broker started by this process; `url` and `admin` are its addresses.

    `files` maps names to texts of files for the broker. In `extra_settings`, `{files}` is their directory, and
    `{tls_port}` and `{web_tls_port}` are reserved ports, whose addresses are `tls_url` and `tls_admin`.
    """

    handle: dict[str, Any]

    def __init__(self, extra_settings: Sequence[str] = (), files: Mapping[str, str] | None = None) -> None:
        self._extra_settings = extra_settings
        self.files = dict(files or {})
        self._launches = 0
        self.ports = [Port() for _ in range(5)]
        self.broker_port, self.web_port, self.bookie_port, self.tls_port, self.web_tls_port = (
            port.number for port in self.ports
        )
        self.url = f"pulsar://127.0.0.1:{self.broker_port}"
        self.admin = f"http://127.0.0.1:{self.web_port}"
        self.tls_url = f"pulsar+ssl://127.0.0.1:{self.tls_port}"
        self.tls_admin = f"https://127.0.0.1:{self.web_tls_port}"

    @property
    def files_directory(self) -> str:
        raise NotImplementedError

    def settings(self) -> list[str]:
        """Lines for the end of standalone.conf, where they override earlier ones."""
        return [
            f"brokerServicePort={self.broker_port}",
            f"webServicePort={self.web_port}",
            "forceDeleteNamespaceAllowed=true",  # so that a test can delete its namespace with all topics
            *(self._filled(setting) for setting in self._extra_settings),
        ]

    def _filled(self, setting: str) -> str:
        places = {"{files}": self.files_directory, "{tls_port}": self.tls_port, "{web_tls_port}": self.web_tls_port}
        for word, place in places.items():
            setting = setting.replace(word, str(place))
        return setting

    def namespace(self) -> str:
        """Create a namespace, `public/…`, which ends with the broker."""
        return make_namespace(self.admin)

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    def log(self) -> str:
        """The console output since the last launch."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the broker with SIGKILL and wait until it has ended."""
        raise NotImplementedError

    def pause(self) -> None:
        """Stop the process until `resume`: connections stay open, and no request is answered."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def launch(self) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        """Kill the broker and delete its data."""
        for port in self.ports:
            port.free()

    def start(self) -> None:
        """Start the broker on its existing data and wait until it serves. Raises NoPulsar.

        After a kill a broker may fail to come up once, so it is restarted up to `STARTS` times.
        """
        for attempt in range(1, STARTS + 1):
            if not self.alive:
                self.launch()
                self._launches += 1
            first = self._launches == 1
            up = wait_until_up(self.admin, lambda: self.alive, self.log, STARTING if first else RETURNING * attempt)
            if up and (first or self._comes_to_rest()):
                return
            log = self.log()
            self.kill()
        raise failed(self.admin, f"is not up after {STARTS} starts", log)

    def _comes_to_rest(self) -> bool:
        for _ in range(LOOKS):
            time.sleep(LOOK_SECONDS)
            if is_stuck(self.log()):
                return False
        return True

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class StandaloneProcess(Standalone):
    """`bin/pulsar standalone` of a distribution, with data and log in `directory`."""

    def __init__(
        self,
        home: Path,
        directory: Path,
        extra_settings: Sequence[str] = (),
        environment: Mapping[str, str] = ENVIRONMENT,
        files: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(extra_settings, files)
        self.home, self.directory, self._environment = home, directory, environment
        self.handle = {"data": str(directory / "data"), "pid": None, "born": None}
        self.output = directory / "output"
        """The console output of all launches."""
        self._earlier = 0  # bytes of the output of earlier launches

    program = "standalone"

    def arguments(self, data: Path) -> list[str]:
        found = ["--config", str(data / "standalone.conf"), *FLAGS, "--bookkeeper-port", str(self.bookie_port)]
        found += ["--metadata-dir", str(data / "metadata"), "--bookkeeper-dir", str(data / "bookkeeper")]
        return [*found, "--zookeeper-dir", str(data / "zookeeper")]  # else it would use an existing one elsewhere

    def launch(self) -> None:
        data = Path(self.handle["data"])
        data.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (data / name).write_text(text)
        conf = (self.home / "conf" / "standalone.conf").read_text()
        (data / "standalone.conf").write_text("\n".join([conf, *self.settings(), "bindAddress=127.0.0.1", ""]))
        command = [str(self.home / "bin" / "pulsar"), self.program, *self.arguments(data)]
        environment = {**os.environ, **environment_with(self._environment)}
        environment["PULSAR_LOG_DIR"] = str(self.directory / "logs")
        environment["ROCKSDB_SHAREDLIB_DIR"] = str(data)  # a copy that a killed broker leaves behind
        # Another process may end the broker, so it is detached, and only its pid is stored.
        detach = ["setsid", "--fork", "sh", "-c", 'echo $$ >"$0.new" && mv "$0.new" "$0" && exec "$@"']
        pid = data / "pid"
        pid.unlink(missing_ok=True)
        with self.output.open("ab") as output:
            self._earlier = output.tell()
            subprocess.run(  # noqa: S603 - a fixed command
                [*detach, str(pid), *command], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, check=True,
            )  # fmt: skip
        while not pid.exists():
            time.sleep(0.01)
        self.handle["pid"] = int(pid.read_text())
        self.handle["born"] = born(self.handle["pid"])

    @property
    def files_directory(self) -> str:
        return str(self.handle["data"])

    @property
    def alive(self) -> bool:
        return process_is_alive(self.handle)

    def log(self) -> str:
        with self.output.open("rb") as output:
            output.seek(self._earlier)
            return output.read().decode(errors="replace")

    def kill(self) -> None:
        kill_process(self.handle)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.handle["pid"], number)

    def remove(self) -> None:
        end_process(self.handle)
        super().remove()


def born(pid: int) -> int | None:
    """The start time of a process in ticks since boot; None if it has ended. Pid and start time identify a process."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])


def process_is_alive(handle: dict[str, Any]) -> bool:
    return handle["born"] is not None and born(handle["pid"]) == handle["born"]


def kill_process(handle: dict[str, Any]) -> None:
    if not process_is_alive(handle):
        return
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(handle["pid"])  # refers to this process even if its pid is reused
        try:
            if process_is_alive(handle):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])  # its ports are free only after its end
        finally:
            os.close(process)


def end_process(handle: dict[str, Any]) -> None:
    kill_process(handle)
    shutil.rmtree(handle["data"], ignore_errors=True)
