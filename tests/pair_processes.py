"""Two service processes of a pair, for tests that kill, pause, stop and switch them."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commands import txnbuf
from etcd_server import EtcdServer
from service_process import STARTING, ServiceProcess, kept_port
from source_tree import ROOT

LEASE = 3.0


class PairOfProcesses:
    """The services of a pair by number; `pair` events say which of them is live. `options` are those of each.

    `trees` are the sources that each runs with when it starts, None for those of the tests.
    """

    def __init__(
        self,
        place: Path,
        lock: str,
        options: Sequence[Sequence[str]] = ((), ()),
        trees: Sequence[Path | None] = (None, None),
    ) -> None:
        self.directories = [place / "a", place / "b"]
        self.ports = [kept_port(), kept_port()]
        self.address = "txnbuf://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.services: list[ServiceProcess] = []
        self._links = [kept_port(), kept_port()]
        self._lock, self._options = lock, options
        self.trees = [*trees]
        self.services = [self._start(0, "--found"), self._start(1)]

    def _start(self, number: int, *flags: str) -> ServiceProcess:
        own, peer = (f"127.0.0.1:{self._links[each]}" for each in (number, 1 - number))
        pair = ["--pair-lock", self._lock, "--pair-listen", own, "--backup-of", peer]
        pair += ["--set", f"pair.lease_seconds={LEASE}"]
        return ServiceProcess(
            self.directories[number],
            *pair,
            *self._options[number],
            *flags,
            port=self.ports[number],
            python=("-P", "-m", "txnbuffer"),
            environment={"PYTHONPATH": str(self.trees[number] or ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def again(self, number: int) -> None:
        """Start a service again, which has ended."""
        self.services[number].finish()
        self.services[number] = self._start(number)

    def newest(self, number: int) -> dict[str, Any]:
        events = self.services[number].events
        return next((event for event in reversed(events) if event["event"] == "pair"), {})

    def live(self) -> int:
        """Wait until one is live and the other one is in sync; the number of the primary."""
        deadline = time.monotonic() + STARTING
        while time.monotonic() < deadline:
            for number in (0, 1):
                states = self.newest(number), self.newest(1 - number)
                if [state.get("role") for state in states] == ["live", "backup"] and states[0]["in_sync"] == 2:
                    return number
            time.sleep(0.05)
        raise AssertionError([service.lines[-10:] for service in self.services])

    def http(self, number: int) -> int:
        """The port of a service for metrics and health."""
        return next(event["http"] for event in reversed(self.services[number].events) if "http" in event)

    def kill(self) -> None:
        for service in self.services:
            service.process.kill()
            service.finish()

    def wait_for_role(self, number: int) -> None:
        deadline = time.monotonic() + STARTING
        while self.newest(number).get("role") != "live":
            assert time.monotonic() < deadline, self.services[number].lines[-10:]
            time.sleep(0.05)

    def disturb(self, how: str) -> None:
        """Take the live role from the live machine, and let it come back."""
        deadline = time.monotonic() + STARTING
        while txnbuf("replication", "status", self.address).returncode != 0:  # the backup is not in sync
            assert time.monotonic() < deadline
        number = self.live()
        service = self.services[number]
        if how == "switch":
            done = txnbuf("replication", "switch", self.address)
            assert done.returncode == 0, done.stderr
        elif how == "pause":
            service.process.send_signal(signal.SIGSTOP)
            time.sleep(3 * LEASE)
            service.process.send_signal(signal.SIGCONT)
        elif how == "stop":
            service.terminate()
            assert service.finish() == 0
            self.again(number)
        else:
            if how == "directory":
                shutil.rmtree(self.directories[number])
            service.process.kill()
            self.wait_for_role(1 - number)  # one that starts at once may be live again
            self.again(number)
        deadline = time.monotonic() + STARTING
        while self.live() == number:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextmanager
def pair_on_etcd(place: Path) -> Iterator[PairOfProcesses]:
    (place / "etcd").mkdir()
    with EtcdServer(place / "etcd") as etcd:
        pair = PairOfProcesses(place, f"etcd://{etcd.address}/orders")
        try:
            yield pair
        finally:
            pair.kill()
