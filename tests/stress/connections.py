"""Thousands of client connections at once, some of them idle, half dead or dead.

    make stress ONLY=connections             (4,500 file descriptors for the service and this process)

Eight processes connect 2,000 clients in all, each with its own TCP connection, and each commits some transactions and
stays idle. One process is then stopped, so that its connections are half dead, and one is killed. Promises: every
client gets its answers; a client beyond `service.max_clients` gets an error that names the limit; half-dead
connections are dropped, their clients continue when they wake up, and so do all others; memory and descriptors grow
with the connections and not without bound; in the end nothing is lost, doubled, partial or dirty. The figures have the
latency of one more client, which commits one record after another, and what the service uses, before, during and
after.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

from service_process import ServiceProcess
from stress.processes import (
    Children,
    Report,
    Writers,
    allow_descriptors,
    counted,
    latencies,
    metrics,
    settings,
    used,
    wait_until,
)

from broker_io import open_broker
from txnbuffer import SyncClient, connect
from txnbuffer.errors import Error

SPARE = 4
"""Connections for the client that measures, and for those that are to be refused."""
FILES = 50
"""Descriptors that the service opens meanwhile for its files."""
BYTES_EACH = 512 * 1024
"""Maximum memory of the service for one idle connection."""


class Check:
    def __init__(self, directory: Path, clients: int, processes: int, transactions: int) -> None:
        self.report = Report()
        self._directory = directory
        self._clients, self._each, self._transactions = clients, clients // processes, transactions
        self._children = Children()
        limits = settings(f"service.max_clients={clients + SPARE}", "log.watermark_bytes=1000000")
        self._service = ServiceProcess(directory / "log", *limits).wait_serving()
        self._address = f"txnbuf://127.0.0.1:{self._service.port}"
        self._crowds: list[subprocess.Popen[str]] = []
        self._processes = processes

    def run(self, samples: int, *, half_dead: bool) -> Report:
        with connect(self._address) as probe:
            self._measure("before", probe, samples)
            for number in range(self._processes):
                self._crowds.append(self._start(number))
            for crowd in self._crowds:
                self._wait_idle(crowd)
            self._wait_connections(self._clients + 1)
            idle = self._measure(f"{self._clients} idle", probe, samples)
            self._refuse()
            self._wake(self._crowds)
            self._measure(f"{self._clients} committing", probe, samples)
            for crowd in self._crowds:
                self._wait_idle(crowd)
            if half_dead:
                self._half_dead(probe, samples)
            for crowd in self._crowds:
                assert crowd.stdin is not None
                crowd.stdin.close()
            self._wait_connections(1)
            after = self._measure("after", probe, samples)
        before = self.report.figures["before"]
        kept = after["descriptors"] - before["descriptors"]
        self.report.expect(kept < FILES, f"connections that end free their descriptors, but for {kept}")
        grown = (idle["rss_mib"] - before["rss_mib"]) * 2**20
        self.report.expect(grown < self._clients * BYTES_EACH + 2**28, "memory in proportion to the connections")
        self._service.terminate()
        self.report.expect(self._service.finish() == 0, "a clean end")
        with open_broker(f"file:{self._directory / 'log'}") as broker:
            found = Writers(self._children, self._directory, self._address, 0).judge(broker)
        self.report.expect(found.good, "what was answered is in the log, once and whole")
        self.report.figures |= counted(found)
        return self.report

    def close(self) -> None:
        self._children.close()
        if self._service.process.poll() is None:
            self._service.kill()

    def _start(self, number: int) -> subprocess.Popen[str]:
        diary = self._directory / f"c{number}.diary"
        arguments = (self._address, f"c{number}", diary, self._each, self._transactions)
        return self._children.start("stress/crowd.py", *arguments)

    def _wait_idle(self, crowd: subprocess.Popen[str]) -> None:
        assert crowd.stdout is not None
        line = crowd.stdout.readline().strip()
        self.report.expect(line == "idle", f"each client connects and gets answers: {line!r}")

    def _wake(self, crowds: list[subprocess.Popen[str]]) -> None:
        for crowd in crowds:
            assert crowd.stdin is not None
            crowd.stdin.write("\n")
            crowd.stdin.flush()

    def _refuse(self) -> None:
        """Connect beyond the limit."""
        accepted: list[SyncClient] = []
        try:
            while len(accepted) < SPARE - 1:
                accepted.append(connect(self._address).__enter__())
            with connect(self._address, timeout=5.0, max_unavailable=3.0):
                error = "none"
        except Error as refused:
            error = str(refused)
        finally:
            for client in accepted:
                client.close()
        self.report.figures["beyond the limit"] = error
        self.report.expect(f"{self._clients + SPARE} clients are connected, the maximum" in error, f"an error: {error}")
        self._wait_connections(self._clients + 1)

    def _half_dead(self, probe: SyncClient, samples: int) -> None:
        """Stop one process and kill another until the service has dropped their connections, then continue the one."""
        stopped, dead, *others = self._crowds
        stopped.send_signal(signal.SIGSTOP)
        dead.kill()
        dead.wait()
        self._wake(others)
        self._measure("half dead and dead", probe, samples)
        for crowd in others:
            self._wait_idle(crowd)
        self._wait_connections(self._clients - 2 * self._each + 1)
        stopped.send_signal(signal.SIGCONT)
        self._wait_connections(self._clients - self._each + 1)
        self._crowds = [stopped, *others]
        self._wake(self._crowds)
        for crowd in self._crowds:
            self._wait_idle(crowd)

    def _wait_connections(self, count: int) -> None:
        http = self._service.http
        wait_until(
            lambda: metrics(http)["txnbuffer_connections"] == count,
            f"the service does not have {count} connections",
        )

    def _measure(self, when: str, probe: SyncClient, samples: int) -> dict[str, Any]:
        figures = {**latencies(probe, samples), **used(self._service.process.pid)}
        self.report.figures[when] = figures
        return figures


def check(
    directory: Path, *, clients: int, processes: int, transactions: int, samples: int, half_dead: bool = True
) -> Report:
    """The check; `half_dead` takes 20 seconds, until the service finds out that a peer is gone."""
    missing = allow_descriptors(2 * clients + 500)
    if missing:
        return Report(missing=[missing])
    with closing(Check(directory, clients, processes, transactions)) as running:
        return running.run(samples, half_dead=half_dead)


def full(directory: Path) -> Report:
    return check(directory, clients=2000, processes=8, transactions=3, samples=500)
