"""Retention trims while change streams with durable cursors follow, and processes are killed.

    make stress ONLY=retention_kills         (the part on Pulsar: what `make pulsar` finds)

Retention keeps as little as it may. Each round writes transactions over three topics and kills, with SIGKILL, a reader
or the service, and on Pulsar also the broker. `moving` has a steady and a slow reader, whose cursors move; `kept` has
a cursor whose reader comes only in the end; `heavy` grows beyond `streams.cursor_bytes`, and its readers, one with and
one without a cursor, have read a little and then stay away. Promises: the readers of `moving` and `kept` get every
record once, although `moving` is trimmed behind them; both readers of `heavy` get StreamTrimmed, and moving the
cursor that was dropped is UnknownCursor.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pulsar_cluster import Cluster, choose
from service_process import ServiceProcess, kept_port
from stress.cursor_reader import END
from stress.processes import Children, Report, settings, wait_until

from broker_io import open_broker
from broker_io.standalone import NoPulsar, Standalone
from txnbuffer import SyncClient, connect
from txnbuffer.errors import UnknownCursor

MOVING, KEPT, HEAVY = "moving", "kept", "heavy"
CURSOR_BYTES = 2_000_000
SETTINGS = settings(
    "retention.bytes=1", "retention.check_seconds=0.5", f"streams.cursor_bytes={CURSOR_BYTES}", "snapshots.changes=50"
)
SMALL_LEDGERS = ("managedLedgerMaxEntriesPerLedger=100", "managedLedgerMinLedgerRolloverTimeMinutes=0")
WAITING = 600.0
"""Seconds for which clients and service wait for a restarting broker."""
READERS = {  # topic, cursor, pause
    "steady": (MOVING, "steady", 0.0),
    "slow": (MOVING, "slow", 0.05),
    "absent": (KEPT, "absent", 0.0),
    "abandoned": (HEAVY, "abandoned", 0.0),
    "careless": (HEAVY, "", 0.0),
}
FOLLOWING, LATE, LOST = ("steady", "slow"), ("absent",), ("abandoned", "careless")

Rows = list[tuple[bytes, bytes]]


class Embedded:
    """A service of an embedded log."""

    kinds: Sequence[str] = (*FOLLOWING, "service")

    def __init__(self, directory: Path) -> None:
        self._log, self._port = directory / "log", kept_port()
        self.options: dict[str, Any] = {}
        self.address = f"txnbuf://127.0.0.1:{self._port}"

    def serve(self) -> ServiceProcess:
        flags = settings("log.segment_bytes=65536", "log.watermark_bytes=1000000")
        return ServiceProcess(self._log, *SETTINGS, *flags, port=self._port).wait_serving()

    def kill_broker(self) -> None:
        raise AssertionError("an embedded log has no broker")


class OnPulsar:
    """A service of a private broker."""

    kinds = (*Embedded.kinds, "broker")

    def __init__(self, broker: Standalone) -> None:
        self._broker = broker
        self.options = {"admin_url": broker.admin, "max_unavailable": WAITING}
        self.address = f"{broker.url}/{broker.namespace()}"

    def serve(self) -> ServiceProcess:
        flags = ("--admin-url", self._broker.admin, *settings(f"pulsar.max_unavailable={WAITING:.0f}"))
        return ServiceProcess(self.address, *SETTINGS, *flags).wait_serving()

    def kill_broker(self) -> None:
        self._broker.kill()
        self._broker.start()


class Check:
    def __init__(self, place: Embedded | OnPulsar, directory: Path, seed: int) -> None:
        self.report = Report(figures={"seed": seed, "killed": {}})
        self._place, self._directory, self._chance = place, directory, random.Random(seed)
        self._children = Children()
        self._written: dict[str, Rows] = {MOVING: [], KEPT: [], HEAVY: []}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._service = place.serve()

    def run(self, rounds: int) -> Report:
        with connect(self._place.address, max_unavailable=WAITING, broker_options=self._place.options) as client:
            self._write(client, 5)
            client.cursors.add(KEPT, "absent", "beginning")
            for name in (*FOLLOWING, *LOST):
                self._start(name)
                wait_until(lambda: self._read(name), f"reader {name} gets nothing")  # noqa: B023 - it ends before
            for name in LOST:
                self._stop(name)
            for _ in range(rounds):
                self._write(client, 60)
                self._kill(self._chance.choice(self._place.kinds))
            wait_until(lambda: self._dropped(client), "no cursor is dropped because it keeps too much")
            self._write(client, 1, end=True)
            self._finish()
            self._trimmed()
        self._service.terminate()
        self.report.expect(self._service.finish() == 0, "a clean end")
        return self.report

    def close(self) -> None:
        self._children.close()
        if self._service.process.poll() is None:
            self._service.kill()

    def _write(self, client: SyncClient, transactions: int, *, end: bool = False) -> None:
        for _ in range(transactions):
            rows: dict[str, tuple[bytes, bytes]] = {}
            with client.transaction() as txn:
                for topic, size in ((MOVING, 400), (KEPT, 400), (HEAVY, 10_000)):
                    key = END if end else b"k%d" % len(self._written[topic])
                    rows[topic] = key, self._chance.randbytes(size)
                    txn.send(topic, rows[topic][1], key=key)
            for topic, row in rows.items():
                self._written[topic].append(row)

    def _start(self, name: str) -> None:
        topic, cursor, pause = READERS[name]
        arguments = (self._place.address, json.dumps(self._place.options), topic, self._database(name), cursor, pause)
        self._running[name] = self._children.start("stress/cursor_reader.py", *arguments)

    def _stop(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait()

    def _kill(self, what: str) -> None:
        killed = self.report.figures["killed"]
        killed[what] = killed.get(what, 0) + 1
        for name in FOLLOWING:
            self.report.expect(self._running[name].poll() is None, f"reader {name} ended")
        if what == "service":
            self._service.kill()
            self._service = self._place.serve()
        elif what == "broker":
            self._place.kill_broker()
            if self._service.process.poll() is not None:  # as a supervisor does
                self._service = self._place.serve()
        else:
            self._stop(what)
            time.sleep(self._chance.uniform(0.0, 1.5))  # retention trims meanwhile
            self._start(what)

    def _dropped(self, client: SyncClient) -> bool:
        try:
            client.cursors.advance(HEAVY, "abandoned", 0)
        except UnknownCursor:
            return True
        self._write(client, 20)
        return False

    def _finish(self) -> None:
        """Start the readers that were away, and compare what each has."""
        for name in (*LATE, *LOST):
            self._start(name)
        for name, process in self._running.items():
            printed, _ = process.communicate(timeout=WAITING)
            if name in LOST:
                self.report.figures[name] = printed.strip()
                right = process.returncode == 3 and printed.startswith("StreamTrimmed: ")
                self.report.expect(right, f"reader {name} learns by name that data was trimmed: {printed}")
            else:
                self.report.expect(process.returncode == 0, f"reader {name} ends without an error: {printed}")
                complete = self._read(name) == self._written[READERS[name][0]]
                self.report.expect(complete, f"reader {name} has every record once, in order")

    def _trimmed(self) -> None:
        """Check that retention dropped what no cursor needed."""

        def left(topic: str) -> int:
            with open_broker(self._place.address, **self._place.options) as broker:
                return sum(ledger.bytes for ledger in broker.ledgers(topic))

        sizes = {topic: sum(len(value) for _, value in rows) for topic, rows in self._written.items()}
        wait_until(lambda: left(MOVING) < sizes[MOVING], "what no cursor needs is not trimmed")
        self.report.figures["bytes written and left"] = {topic: (size, left(topic)) for topic, size in sizes.items()}

    def _database(self, name: str) -> Path:
        return self._directory / f"{name}.db"

    def _read(self, name: str) -> Rows:
        if not self._database(name).exists():
            return []
        with closing(sqlite3.connect(self._database(name), timeout=60.0)) as database:
            if not database.execute("SELECT name FROM sqlite_master WHERE name = 'found'").fetchall():
                return []
            return database.execute("SELECT key, value FROM found ORDER BY seqno").fetchall()


def check(place: Embedded | OnPulsar, directory: Path, *, rounds: int, seed: int) -> Report:
    with closing(Check(place, directory, seed)) as running:
        return running.run(rounds)


def full(directory: Path) -> Report:
    seed = random.SystemRandom().randrange(2**32)
    report = check(Embedded(directory), directory, rounds=20, seed=seed)
    report.figures = {"embedded": report.figures}
    try:
        way = choose()
    except NoPulsar as missing:
        report.missing.append(str(missing))
        return report
    with Cluster(way, "", "").private_standalone(SMALL_LEDGERS) as broker:
        other = directory / "pulsar"
        other.mkdir()
        found = check(OnPulsar(broker), other, rounds=8, seed=seed)
    report.figures["pulsar"] = found.figures
    report.wrong += found.wrong
    return report
