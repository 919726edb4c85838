"""Two service processes of a pair with a real etcd: kills, a pause beyond the lease, a switch, a lost directory."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from etcd_server import EtcdServer
from service_process import STARTING, ServiceProcess, kept_port

from txnbuffer import Record, Rollback, SyncTransaction, connect

LEASE = 3.0
KILLS = ("kill", "directory", "pause", "switch", "stop")


class PairOfProcesses:
    """The services of a pair by number; `pair` events say which of them is live."""

    def __init__(self, place: Path, etcd: EtcdServer) -> None:
        self.directories = [place / "a", place / "b"]
        self.ports = [kept_port(), kept_port()]
        self.address = "txnbuf://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)
        self.services: list[ServiceProcess] = []
        self._links = [kept_port(), kept_port()]
        self._lock = f"etcd://{etcd.address}/orders"
        self.services = [self._start(0, "--found"), self._start(1)]

    def _start(self, number: int, *flags: str) -> ServiceProcess:
        own, peer = (f"127.0.0.1:{self._links[each]}" for each in (number, 1 - number))
        pair = ["--pair-lock", self._lock, "--pair-listen", own, "--backup-of", peer]
        pair += ["--set", f"pair.lease_seconds={LEASE}"]
        return ServiceProcess(self.directories[number], *pair, *flags, port=self.ports[number])

    def again(self, number: int) -> None:
        """Start a service again, which has ended."""
        self.services[number].finish()
        self.services[number] = self._start(number)

    def newest(self, number: int) -> dict[str, Any]:
        events = self.services[number].events
        return next((event for event in reversed(events) if event["event"] == "pair"), {})

    def live(self) -> int:
        """Wait until one is live and the other one is in sync; the number of the live."""
        deadline = time.monotonic() + STARTING
        while time.monotonic() < deadline:
            for number in (0, 1):
                states = self.newest(number), self.newest(1 - number)
                if [state.get("role") for state in states] == ["live", "backup"] and states[0]["in_sync"] == 2:
                    return number
            time.sleep(0.05)
        raise AssertionError([service.lines[-10:] for service in self.services])

    def _wait_for_role(self, number: int) -> None:
        deadline = time.monotonic() + STARTING
        while self.newest(number).get("role") != "live":
            assert time.monotonic() < deadline, self.services[number].lines[-10:]
            time.sleep(0.05)

    def disturb(self, how: str) -> None:
        """Take the live role from the live machine, and let it come back."""
        deadline = time.monotonic() + STARTING
        while txnbuf("replication", "status", "--service", self.address).returncode != 0:  # the backup is not in sync
            assert time.monotonic() < deadline
        number = self.live()
        service = self.services[number]
        if how == "switch":
            done = txnbuf("replication", "switch", "--service", self.address)
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
            self._wait_for_role(1 - number)  # one that starts at once may be live again
            self.again(number)
        deadline = time.monotonic() + STARTING
        while self.live() == number and how != "stop":  # one that starts again at once may be live again
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextmanager
def pair_of_processes(place: Path) -> Iterator[PairOfProcesses]:
    (place / "etcd").mkdir()
    with EtcdServer(place / "etcd") as etcd:
        pair = PairOfProcesses(place, etcd)
        try:
            yield pair
        finally:
            for service in pair.services:
                service.process.kill()
                service.finish()


class Applications:
    """A named producer, a consumer group and a change stream, each in a thread of its own."""

    def __init__(self, address: str) -> None:
        self.written = 0
        with connect(address) as client:
            client.send("a", b"0")
        self.streamed: list[bytes | None] = []
        self._address = address
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        works = self._write, self._copy, self._follow
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._failures.append(error)

    def _write(self) -> None:
        with connect(self._address, max_unavailable=STARTING) as client:
            while not self._stop.is_set():
                number = self.written + 1
                with client.transaction(name="writer", number=number) as txn:
                    txn.send_many("a", [b"%d" % number] * 2)
                self.written = number

    def _copy(self) -> None:
        def copy(txn: SyncTransaction, record: Record) -> None:
            txn.send("b", record.value, key=record.key)

        with connect(self._address, max_unavailable=STARTING) as client:
            while not self._stop.is_set():
                client.process("a", "copies", copy, batch=10, idle_timeout=1.0)
            client.process("a", "copies", copy, batch=10, idle_timeout=5.0)

    def _follow(self) -> None:
        with connect(self._address, max_unavailable=STARTING) as client, client.stream("a") as stream:
            while self._threads[0].is_alive() or len(self.streamed) < 2 * self.written + 1:
                with suppress(TimeoutError):
                    batch = stream.next(timeout=0.5)
                    assert not isinstance(batch, Rollback), "nothing is rolled back without a forced promotion"
                    self.streamed += [mutation.value for mutation in batch or ()]

    def progress(self) -> None:
        """Wait until something more was written."""
        before, deadline = self.written, time.monotonic() + STARTING
        while self.written < before + 5:
            assert not self._failures, self._failures
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(STARTING)
        assert not self._failures, self._failures


def values(address: str, topic: str) -> Counter[bytes | None]:
    with connect(address) as client, client.reader(topic) as reader:
        found: Counter[bytes | None] = Counter()
        while (batch := reader.read(timeout=3.0)) is not None:
            found.update(record.value for record in batch)
        return found


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_whatever_happens_to_the_live(tmp_path: Path) -> None:
    with pair_of_processes(tmp_path) as pair:
        pair.live()
        applications = Applications(pair.address)
        applications.progress()
        for how in KILLS:
            pair.disturb(how)
            applications.progress()
        applications.finish()
        numbers = [b"0", *(b"%d" % number for number in range(1, applications.written + 1) for _ in range(2))]
        expected = Counter(numbers)
        assert values(pair.address, "a") == expected
        assert values(pair.address, "b") == expected
        assert applications.streamed == numbers
        done = txnbuf("replication", "status", "--service", pair.address)
        assert done.returncode == 0, done.stdout + done.stderr
