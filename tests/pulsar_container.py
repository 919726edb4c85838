"""A Pulsar broker in a container, with the interface of `StandaloneProcess`; and the directory of the distribution."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker_io.standalone import FLAGS, SHORT_LIVED, NoPulsar, Standalone, end_process, environment_with

ROOT = Path(__file__).resolve().parents[1]
FILES = "/tmp/files"  # as in the script
IN_CONTAINER = """
mkdir -p /tmp/files
for name in $FILES; do variable=FILE_${name%%.*}; printf '%s' "${!variable}" >"/tmp/files/$name"; done
{ cat conf/standalone.conf; echo; printf '%s\\n' "$SETTINGS"; } >/tmp/standalone.conf
exec bin/pulsar standalone --config /tmp/standalone.conf "$@"
"""


class StandaloneContainer(Standalone):
    """A container of a Pulsar image, official or built by docker/engine.sh, with the data inside."""

    def __init__(
        self,
        image: str,
        extra_settings: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        jar: Path | None = None,
    ) -> None:
        super().__init__(extra_settings, files)
        self.image, self.jar = image, jar
        self.handle = {"container": None}

    def launch(self) -> None:
        if self.handle["container"] is not None:
            return with_container(self.handle, lambda container: container.start())
        os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # it would need another image
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(self.image, docker_client_kw={"timeout": 60})
        container.with_envs(**environment_with(SHORT_LIVED), SETTINGS="\n".join(self.settings()))
        container.with_command(["bash", "-c", IN_CONTAINER, "bash", *FLAGS])
        container.with_envs(FILES=" ".join(self.files), **self._file_variables())
        if self.jar is not None:
            container.with_volume_mapping(str(self.jar), str(self.jar))
            container.with_envs(PULSAR_EXTRA_CLASSPATH=str(self.jar))
        for port in (self.broker_port, self.web_port, self.tls_port, self.web_tls_port):
            container.ports[f"{port}/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]  # engines accept an address too
        try:
            container.start()
        except BaseException:
            container.stop()
            raise
        self.handle["container"] = container.get_container_id()
        container.get_docker_client().client.close()
        return None

    def settings(self) -> list[str]:
        # Else the bookie registers under the container's address, which another container may have after a restart.
        return [*super().settings(), "useHostNameAsBookieID=true"]

    @property
    def files_directory(self) -> str:
        return FILES

    def _file_variables(self) -> dict[str, str]:
        return {f"FILE_{name.partition('.')[0]}": text for name, text in self.files.items()}

    @property
    def alive(self) -> bool:
        if self.handle["container"] is None:
            return False
        return bool(with_container(self.handle, lambda container: container.status == "running"))

    def log(self) -> str:
        return str(with_container(self.handle, logged_since_its_start))

    def kill(self) -> None:
        def kill(container: Any) -> None:
            if container.status == "running":
                container.kill()
                container.wait()

        with_container(self.handle, kill)

    def pause(self) -> None:
        with_container(self.handle, lambda container: container.pause())

    def resume(self) -> None:
        with_container(self.handle, lambda container: container.unpause())

    def remove(self) -> None:
        end_container(self.handle)
        self.handle["container"] = None
        super().remove()


def with_container(handle: dict[str, Any], do: Any) -> Any:
    """Call `do` with a container that this or another process started."""
    import docker

    client = docker.from_env()
    try:
        return do(client.containers.get(handle["container"]))
    finally:
        client.close()


def logged_since_its_start(container: Any) -> str:
    started = datetime.datetime.fromisoformat(container.attrs["State"]["StartedAt"])
    return str(container.logs(since=started.timestamp()).decode(errors="replace"))


def end_container(handle: dict[str, Any]) -> None:
    if handle["container"] is not None:
        with_container(handle, lambda container: container.remove(force=True, v=True))


def end(handle: dict[str, Any]) -> None:
    """End a broker that any process started, and delete its data."""
    if "container" in handle:
        end_container(handle)
    else:
        end_process(handle)


def distribution() -> Path:
    """The directory of the server distribution, downloaded if necessary. Raises NoPulsar if that fails."""
    if shutil.which("java") is None:
        raise NoPulsar("no Java on the path")
    done = subprocess.run([ROOT / "docker" / "distribution.sh"], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise NoPulsar((done.stderr.splitlines() or ["the server distribution can't be downloaded"])[-1])
    return Path(done.stdout.strip())
