"""Runs the programs of `examples/` as a newcomer does: as processes, by the address of their log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pulsar_cluster import Cluster
from service_process import ServiceProcess
from source_tree import ROOT

from txnbuffer import PulsarOptions, SyncClient, connect

EXAMPLES = ROOT / "examples"
SECONDS = 240.0
"""Within which a program must do what a test waits for, on a busy machine."""


@dataclass
class Shop:
    """A log on which examples run; `directory` is where they store files. `admin` is empty unless it is a cluster."""

    address: str
    admin: str
    directory: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TXNBUFFER_ADDRESS": self.address,
            **({"TXNBUFFER_PULSAR_ADMIN_URL": self.admin} if self.admin else {}),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def is_shared(self) -> bool:
        """Whether several processes can use the log at the same time."""
        return not self.address.startswith("file:")

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command of Python in the background; what it prints goes to `output` of the directory."""
        with (self.directory / "output").open("ab") as output:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=self.directory,
                    env={**self.environment, **variables},
                    stdout=output,
                    stderr=output,
                )
            )
        return self.started[-1]

    def example(self, name: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        return self.start(str(EXAMPLES / name), *arguments, **variables)

    @property
    def output(self) -> str:
        """What the programs have printed, on stdout and stderr."""
        return (self.directory / "output").read_text()

    def wait(self, condition: Callable[[], bool], *running: subprocess.Popen[bytes]) -> None:
        """Wait for a condition while the programs run."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output
            assert all(process.poll() is None for process in running), self.output
            time.sleep(0.05)

    def interrupt(self, *programs: subprocess.Popen[bytes]) -> None:
        """Press Ctrl-C; a program ends without a traceback."""
        for program in programs:
            program.send_signal(signal.SIGINT)
        assert [program.wait(SECONDS) for program in programs] == [0] * len(programs), self.output
        assert "Traceback" not in self.output, self.output

    @contextmanager
    def client(self, *, read_only: bool = False) -> Iterator[SyncClient]:
        options: PulsarOptions | None = {"admin_url": self.admin} if self.admin else None
        with connect(self.address, broker_options=options, read_only=read_only) as client:
            yield client

    def fill(self, topics: Mapping[str, Mapping[str, Any]]) -> None:
        """Send values, as text or JSON, by topic and key, in one transaction."""
        with self.client() as client, client.transaction() as txn:
            for topic, values in topics.items():
                for key, value in values.items():
                    txn.send(topic, value if isinstance(value, str) else json.dumps(value), key=key)

    def read(self, topic: str, count: int) -> list[tuple[str, str]]:
        """Read committed records until there are `count`, and those that follow within a second: keys and values."""
        found: list[tuple[str, str]] = []
        with self.client(read_only=not self.is_shared) as client, client.reader(topic, wait=True) as reader:
            while batch := reader.read(timeout=SECONDS if len(found) < count else 1.0):
                found += [((record.key or b"").decode(), (record.value or b"").decode()) for record in batch]
        return found


@contextmanager
def shop(address: str, directory: Path, admin: str = "") -> Iterator[Shop]:
    """A log and its programs; those that were started are killed in the end."""
    opened = Shop(address, admin, directory)
    try:
        yield opened
    finally:
        for process in opened.started:
            process.kill()
            process.wait()


@contextmanager
def shop_on_a_cluster(cluster: Cluster, namespace: str, directory: Path) -> Iterator[Shop]:
    """The same in a namespace with a service."""
    address = f"{cluster.url}/{namespace}"
    with ServiceProcess(address, "--admin-url", cluster.admin), shop(address, directory, cluster.admin) as opened:
        yield opened
