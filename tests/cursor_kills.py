"""Minimal retention while relay and materialize are down: their cursors keep the records that they need.

    python tests/cursor_kills.py --rounds 10 --seed 7

Each round writes transactions and kills the relay, the materializer or the service. At the end the table must have the
last value of each key, and the relay's target all records, although the log is almost empty.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from relay_kills import CLEAN, RelayProcess, T, committed
from service_process import ServiceProcess, kept_port

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer import SyncClient, connect
from txnbuffer.cli.admin_client import ServiceAddress, call

FLAGS = ("--set", "retention.bytes=1", "--set", "retention.check_seconds=0.3", "--set", "log.segment_bytes=65536")
MAX_WAIT = 120.0

Row = tuple[bytes | None, bytes | None]


class Rig:
    """A service with its sinks, and the written records. `flags` are options of the sinks."""

    kinds = ("relay", "table", "relay", "table", "service")
    flags: tuple[str, ...] = ()

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory = directory
        self.chance = chance
        self.written: list[Row] = []
        self.wrong: list[str] = []
        self._port = kept_port()
        self._errors: IO[str] = (directory / "errors.log").open("a")
        self.service = self.serve()
        self.relay = self.relaying()
        self.table = self.materializing()

    @property
    def address(self) -> str:
        return f"txnbuf://127.0.0.1:{self._port}"

    @property
    def clean(self) -> str:
        return f"file:{self.directory / 'clean'}"

    def serve(self) -> ServiceProcess:
        return ServiceProcess(self.directory / "log", *FLAGS, port=self._port).wait_serving()

    def connect(self) -> Any:
        return connect(self.address, max_unavailable=MAX_WAIT)

    def open_clean(self) -> Broker:
        return open_broker(self.clean, read_only=True)

    def open_source(self) -> Broker:
        return open_broker(self.address)

    def relaying(self, *more: str) -> RelayProcess:
        arguments = (self.address, T, CLEAN, "--to", self.clean, "--cursor", "relay", *self.flags, *more)
        return RelayProcess(self.directory / "errors.log", *arguments)

    def materializing(self, *more: str) -> subprocess.Popen[bytes]:
        arguments = [self.address, T, f"sqlite:{self.directory / 'table.db'}", "--cursor", "table", *self.flags, *more]
        command = [sys.executable, "-m", "txnbuffer", "materialize", *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._errors)

    def held(self) -> int:
        """The number of cursors."""
        return len(call(ServiceAddress(f"127.0.0.1:{self.service.port}"), "Cursors"))

    def write(self, client: SyncClient, count: int) -> None:
        for _ in range(count):
            with client.transaction() as txn:
                for _ in range(5):
                    key, value = f"k{self.chance.randrange(40)}", self.chance.randbytes(500).hex()
                    txn.send(T, value, key=key)
                    self.written.append((key.encode(), value.encode()))

    def kill_one(self) -> str:
        what = self.chance.choice(self.kinds)
        self.wrong += [f"{name} ended" for name, process in self.sinks().items() if process.poll() is not None]
        self.kill(what)
        return what

    def kill(self, what: str) -> None:
        """Kill a process, and start it again later; retention trims meanwhile."""
        if what == "service":
            self.service.kill()
            self.service = self.serve()
            return
        if what == "relay":
            self.relay.kill()
        else:
            self._kill(self.table)
        time.sleep(self.chance.uniform(0.0, 2.0))
        if what == "relay":
            self.relay = self.relaying()
        else:
            self.table = self.materializing()

    def sinks(self) -> dict[str, subprocess.Popen[bytes]]:
        return {"relay": self.relay.process, "table": self.table}

    def finish(self) -> list[str]:
        """Wait until both sinks have reached the end; the differences found."""
        wrong = self.wrong
        self.relay.kill()
        self._kill(self.table)
        self.relay, self.table = self.relaying("--no-follow"), self.materializing("--to", "now")
        codes = self.relay.finish()[0], self.table.wait(MAX_WAIT)
        if codes != (0, 0):
            wrong.append(f"exit codes {codes}")
        with self.open_clean() as broker:
            if [row[:2] for row in committed(broker, CLEAN)] != self.written:
                wrong.append("the relay's target is not what was written")
        with closing(sqlite3.connect(self.directory / "table.db")) as database:
            found = database.execute(f"SELECT key, value FROM {T}").fetchall()
        if {key.encode(): value.encode() for key, value in found} != dict(self.written):
            wrong.append("the table is not what was written last")
        return [*wrong, (self.directory / "errors.log").read_text()] if wrong else []

    def close(self) -> None:
        self.service.kill()
        if self.relay.process.poll() is None:
            self.relay.kill()
        self._kill(self.table)
        self._errors.close()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        process.wait(MAX_WAIT)


def through_kills(rig: Rig, rounds: int) -> tuple[list[str], int]:
    """The differences found, and the bytes of the log at the end."""
    try:
        with rig.connect() as client:
            rig.write(client, 1)
            deadline = time.monotonic() + MAX_WAIT
            while rig.held() < 2:
                assert time.monotonic() < deadline, (rig.directory / "errors.log").read_text()
                time.sleep(0.1)
            for _ in range(rounds):
                rig.write(client, 30)
                print(time.strftime("%H:%M:%S"), "killed:", rig.kill_one(), file=sys.stderr)
        wrong = rig.finish()
        with rig.open_source() as broker:
            return wrong, sum(ledger.bytes for ledger in broker.ledgers(T))
    finally:
        rig.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(Path(directory), random.Random(chosen.seed))
        sys.exit(report(rig, chosen.seed, *through_kills(rig, chosen.rounds)))


def report(rig: Rig, seed: int, wrong: list[str], left: int) -> int:
    """Print the result; the exit code."""
    written = sum(len(value or b"") for _, value in rig.written)
    print(f"cursors: seed {seed}, {len(rig.written)} records of {written} bytes, {left} left, wrong: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    main()
