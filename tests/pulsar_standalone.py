"""Standalone Pulsar brokers for tests, as a process or as a container, which can be killed and started again.

Both listen on 127.0.0.1 only, under the port that they advertise, and keep their data over a kill. What stands in
`handle` suffices to end one from another process.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from pulsar_admin import NoPulsar, Port, make_namespace, wait_until_up

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--no-functions-worker", "--no-stream-storage", "--advertised-address", "127.0.0.1"]
ENVIRONMENT = {
    "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g",
    "PULSAR_GC": "-XX:+UseSerialGC",
    "PULSAR_GC_LOG": "-Xlog:disable",
}
IN_CONTAINER = """
{ cat conf/standalone.conf; echo; printf '%s\\n' "$SETTINGS"; } >/tmp/standalone.conf
exec bin/pulsar standalone --config /tmp/standalone.conf "$@"
"""
LOG_LINES = 30


class Standalone:
    """A broker that this process started: `url` and `admin` are its addresses."""

    handle: dict[str, Any]

    def __init__(self) -> None:
        self.ports = [Port(), Port(), Port()]
        self.broker_port, self.web_port, self.bookie_port = (port.number for port in self.ports)
        self.url = f"pulsar://127.0.0.1:{self.broker_port}"
        self.admin = f"http://127.0.0.1:{self.web_port}"

    def settings(self) -> list[str]:
        """Lines for the end of standalone.conf, where they win over earlier ones."""
        return [
            f"brokerServicePort={self.broker_port}",
            f"webServicePort={self.web_port}",
            "forceDeleteNamespaceAllowed=true",  # so that a test can drop its namespace with what is in it
        ]

    def namespace(self) -> str:
        """A namespace, `public/…`; it goes with the broker."""
        return make_namespace(self.admin)

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    def log(self) -> str:
        """The last lines that the broker wrote."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL; back when it's dead."""
        raise NotImplementedError

    def launch(self) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        """Kill it, and delete its data."""
        for port in self.ports:
            port.free()

    def start(self) -> None:
        """Start it, on the data of the last time; back when it serves."""
        if not self.alive:
            self.launch()
        wait_until_up(self.admin, lambda: self.alive, self.log)

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
    """`bin/pulsar standalone` of a distribution; data and log stand in `directory`."""

    def __init__(self, home: Path, directory: Path) -> None:
        super().__init__()
        self.home, self.directory = home, directory
        self.handle = {"data": str(directory / "data"), "pid": None, "born": None}

    def launch(self) -> None:
        data = Path(self.handle["data"])
        data.mkdir(parents=True, exist_ok=True)
        conf = (self.home / "conf" / "standalone.conf").read_text()
        (data / "standalone.conf").write_text("\n".join([conf, *self.settings(), "bindAddress=127.0.0.1", ""]))
        command = [str(self.home / "bin" / "pulsar"), "standalone", "--config", str(data / "standalone.conf"), *FLAGS]
        command += ["--metadata-dir", str(data / "metadata"), "--bookkeeper-dir", str(data / "bookkeeper")]
        command += ["--bookkeeper-port", str(self.bookie_port)]
        environment = {**os.environ, **ENVIRONMENT, "PULSAR_LOG_DIR": str(self.directory / "logs")}
        # Whoever ends it may be another process than this one, so it is nobody's child, and a pid is all that's kept.
        detach = ["setsid", "--fork", "sh", "-c", 'echo $$ >"$0.new" && mv "$0.new" "$0" && exec "$@"']
        pid = data / "pid"
        pid.unlink(missing_ok=True)
        with (self.directory / "output").open("ab") as output:
            subprocess.run(
                [*detach, str(pid), *command], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, check=True,
            )  # fmt: skip
        while not pid.exists():
            time.sleep(0.01)
        self.handle["pid"] = int(pid.read_text())
        self.handle["born"] = born(self.handle["pid"])

    @property
    def alive(self) -> bool:
        return process_is_alive(self.handle)

    def log(self) -> str:
        lines = (self.directory / "output").read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def kill(self) -> None:
        kill_process(self.handle)

    def remove(self) -> None:
        end_process(self.handle)
        super().remove()


def born(pid: int) -> int | None:
    """When the process of that number started, in ticks since boot; None if it ended. Number and birth name one."""
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
        process = os.pidfd_open(handle["pid"])  # stays this very process, whoever gets its number next
        try:
            if process_is_alive(handle):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])  # its ports are free only then
        finally:
            os.close(process)


def end_process(handle: dict[str, Any]) -> None:
    kill_process(handle)
    shutil.rmtree(handle["data"], ignore_errors=True)


class StandaloneContainer(Standalone):
    """A container of a Pulsar image, official or our own; data stands in it."""

    def __init__(self, image: str) -> None:
        super().__init__()
        self.image = image
        self.handle = {"container": None}

    def launch(self) -> None:
        if self.handle["container"] is not None:
            return with_container(self.handle, lambda container: container.start())
        os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # an image more to pull; what is started here is ended here
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(self.image, docker_client_kw={"timeout": 60})
        container.with_envs(**ENVIRONMENT, SETTINGS="\n".join(self.settings()))
        container.with_command(["bash", "-c", IN_CONTAINER, "bash", *FLAGS])
        for port in (self.broker_port, self.web_port):
            container.ports[f"{port}/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]  # engines take an address too
        try:
            container.start()
        except BaseException:
            container.stop()
            raise
        self.handle["container"] = container.get_container_id()
        container.get_docker_client().client.close()
        return None

    @property
    def alive(self) -> bool:
        if self.handle["container"] is None:
            return False
        return bool(with_container(self.handle, lambda container: container.status == "running"))

    def log(self) -> str:
        return str(with_container(self.handle, lambda container: container.logs(tail=LOG_LINES).decode()))

    def kill(self) -> None:
        def kill(container: Any) -> None:
            if container.status == "running":
                container.kill()
                container.wait()

        with_container(self.handle, kill)

    def remove(self) -> None:
        end_container(self.handle)
        self.handle["container"] = None
        super().remove()


def with_container(handle: dict[str, Any], do: Any) -> Any:
    """Do something with a container that was started here or elsewhere."""
    import docker

    client = docker.from_env()
    try:
        return do(client.containers.get(handle["container"]))
    finally:
        client.close()


def end_container(handle: dict[str, Any]) -> None:
    if handle["container"] is not None:
        with_container(handle, lambda container: container.remove(force=True, v=True))


def end(handle: dict[str, Any]) -> None:
    """End a broker that some process started, and delete its data."""
    if "container" in handle:
        end_container(handle)
    else:
        end_process(handle)


def distribution() -> Path:
    """The directory of the server distribution, fetched if need be; NoPulsar if it can't be had."""
    if shutil.which("java") is None:
        raise NoPulsar("no Java on the path")
    done = subprocess.run([ROOT / "docker" / "distribution.sh"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPulsar(" ".join(done.stderr.split()) or "the server distribution can't be fetched")
    return Path(done.stdout.strip())
