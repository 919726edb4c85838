"""Two service processes of a pair with a real etcd: kills, a pause beyond the lease, a switch, a lost directory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import txnbuf
from pair_processes import pair_on_etcd
from reading import read_values
from service_process import STARTING

from txnbuffer import Record, Rollback, SyncTransaction, connect

KILLS = ("kill", "directory", "pause", "switch", "stop")


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


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_whatever_happens_to_the_live(tmp_path: Path) -> None:
    with pair_on_etcd(tmp_path) as pair:
        pair.live()
        applications = Applications(pair.address)
        applications.progress()
        for how in KILLS:
            pair.disturb(how)
            applications.progress()
        applications.finish()
        numbers = [b"0", *(b"%d" % number for number in range(1, applications.written + 1) for _ in range(2))]
        expected = Counter(numbers)
        with connect(pair.address) as client:
            for topic in ("a", "b"):
                assert Counter(read_values(client, topic, expected.total())) == expected
        assert applications.streamed == numbers
        done = txnbuf("replication", "status", pair.address)
        assert done.returncode == 0, done.stdout + done.stderr
