"""Kill the service and `txnbuf materialize` by turns while flights are written, and compare the tables with the source.

    python tests/sinks/materialize_soak.py --kills 20 --seed 7

One transaction an hour of flights, one in ten aborted, some keys deleted. After each kill of the materializer, and in
the end, the tables must equal the source at their stored seqno. Prints one JSON object; exit
code 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from service_process import ServiceProcess, kept_port  # noqa: E402

from txnbuffer import AlreadyCommitted, Error, OutcomeUnknown, ServiceUnavailable, connect  # noqa: E402
from txnbuffer.demo.flights import TOPICS, Hour, load_hours  # noqa: E402

MAX_WAIT = 120.0
"""Seconds without progress after which the soak gives up."""

Contents = tuple[dict[str, tuple[str, int, int | None]], dict[int, tuple[str, int | None]]]
"""Key → value, seqno, event time; and the same for records without a key, by seqno."""


class Flight(NamedTuple):
    key: str | None
    value: str | None
    event_time: int | None


@dataclass
class Report:
    seed: int
    service_kills: int = 0
    materialize_kills: int = 0
    looks: int = 0
    looks_at_complete: int = 0
    mutations: int = 0
    wrong: list[str] = field(default_factory=list)


def deleted(hour: Hour, topic: str) -> list[bytes]:
    """The keys that an hour deletes after its records."""
    keys = [record.key for record in hour.records[topic] if record.key is not None]
    return keys[:1] if hour.number % 3 == 1 else []


def truth(hours: list[Hour], topic: str) -> list[Flight]:
    """The visible records of a topic in order: the n-th has seqno n."""
    found: list[Flight] = []
    for hour in hours:
        if hour.aborted_on_purpose:
            continue
        for key, value, _, event_time in hour.records[topic]:
            assert value is not None
            found.append(Flight(None if key is None else key.decode(), value.decode(), event_time))
        found += [Flight(key.decode(), None, None) for key in deleted(hour, topic)]
    return found


def contents(flights: list[Flight]) -> Contents:
    """The expected tables after `seqno` mutations."""
    keyed: dict[str, tuple[str, int, int | None]] = {}
    keyless: dict[int, tuple[str, int | None]] = {}
    for seqno, (key, value, event_time) in enumerate(flights, 1):
        if key is None:
            assert value is not None
            keyless[seqno] = value, event_time
        elif value is None:
            keyed.pop(key, None)
        else:
            keyed[key] = value, seqno, event_time
    return keyed, keyless


class Writer(threading.Thread):
    """Writes each hour once, despite kills of the service; `written` is the number of hours."""

    def __init__(self, address: str, hours: list[Hour]) -> None:
        super().__init__(daemon=True)
        self.written = 0
        self.error: BaseException | None = None
        self._address = address
        self._hours = hours

    def run(self) -> None:
        try:
            with connect(self._address) as client:
                for hour in self._hours:
                    self._write(client, hour)
                    self.written += 1
        except BaseException as error:
            self.error = error
            raise

    def _write(self, client: Any, hour: Hour) -> None:
        if hour.aborted_on_purpose:
            with suppress(Error), client.transaction() as txn:
                send(txn, hour)
                txn.abort()
            return
        while True:
            try:
                client.run(lambda txn: send(txn, hour), name="flights", number=hour.number + 1)
            except AlreadyCommitted:
                return
            except (OutcomeUnknown, ServiceUnavailable):
                continue  # the number shows whether it committed
            return


def send(txn: Any, hour: Hour) -> None:
    for topic, records in hour.records.items():
        values, keys = [record.value for record in records], [record.key for record in records]
        txn.send_many(topic, values, keys=keys, event_times=[record.event_time for record in records])
        for key in deleted(hour, topic):
            txn.delete(topic, key)


class Materializer:
    """`txnbuf materialize` in its own process."""

    def __init__(self, address: str, path: Path) -> None:
        self._command = [sys.executable, "-m", "txnbuffer", "materialize", address, *TOPICS, f"sqlite:{path}"]
        self._process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [*self._command, "--output", "json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=MAX_WAIT)
            self._process = None

    def ended(self) -> str | None:
        """The output of a process that has ended; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        out, errors = self._process.communicate(timeout=MAX_WAIT)
        return f"exit code {self._process.returncode}: {out}{errors}"

    def finish(self) -> list[dict[str, Any]]:
        """Wait for its end; its output."""
        assert self._process is not None
        out, errors = self._process.communicate(timeout=MAX_WAIT)
        assert self._process.returncode == 0, errors
        rows: list[dict[str, Any]] = json.loads(out)
        return rows


def look(path: Path, flights: dict[str, list[Flight]], report: Report) -> None:
    """Compare the tables with the source at their stored seqnos."""
    if not path.exists():
        return
    report.looks += 1
    with closing(sqlite3.connect(path, timeout=60.0, isolation_level=None)) as database:
        database.execute("BEGIN")
        if not database.execute("SELECT 1 FROM sqlite_schema").fetchone():
            return
        for topic, seqno, complete in database.execute(
            "SELECT topic, seqno, complete FROM txnbuffer_topics"
        ).fetchall():
            rows = database.execute(f"SELECT key, value, seqno, event_time FROM {topic}").fetchall()
            free = database.execute(f"SELECT seqno, value, event_time FROM {topic}_keyless").fetchall()
            found = {row[0]: row[1:] for row in rows}, {row[0]: row[1:] for row in free}
            if complete:
                report.looks_at_complete += 1
                if found != contents(flights[topic][:seqno]):
                    report.wrong.append(f"{topic} is not what it was at seqno {seqno}")
                continue
            known = {(key, value, at, time) for at, (key, value, time) in enumerate(flights[topic][:seqno], 1)}
            if not known.issuperset(rows):
                report.wrong.append(f"{topic} holds what nobody wrote up to seqno {seqno}")


def soak(kills: int, seed: int, hours: list[Hour], directory: Path) -> Report:
    """Kill each side half of the times, at times drawn from the seed."""
    chance, report = random.Random(seed), Report(seed)
    path, port = directory / "flights.db", kept_port()
    flights = {topic: truth(hours, topic) for topic in TOPICS}
    address = f"txnbuf://127.0.0.1:{port}"

    def serve() -> ServiceProcess:
        return ServiceProcess(directory / "log", port=port).wait_serving()

    service, materializer, writer = serve(), Materializer(address, path), Writer(address, hours)
    marks = sorted(chance.sample(range(10, len(hours) - 10), kills))
    try:
        writer.start()
        reach(writer, 10)
        materializer.start()
        for number, mark in enumerate(marks):
            reach(writer, mark)
            time.sleep(chance.uniform(0.0, 0.3))
            if number % 2:
                service.kill()
                report.service_kills += 1
                service = serve()
            else:
                if (said := materializer.ended()) is not None:
                    report.wrong.append(said)
                materializer.kill()
                report.materialize_kills += 1
                look(path, flights, report)
                materializer.start()
        reach(writer, len(hours))
        writer.join(MAX_WAIT)
        materializer.kill()
        look(path, flights, report)
        materializer.start("--to", "now")
        for row in materializer.finish():
            report.mutations += row["seqno"]
            if (row["seqno"], row["complete"], row["rollbacks"]) != (len(flights[row["topic"]]), True, 0):
                report.wrong.append(f"it ended with {row}")
        look(path, flights, report)
    finally:
        materializer.kill()
        service.kill()
    return report


def reach(writer: Writer, mark: int) -> None:
    """Wait until enough hours are written."""
    last, since = writer.written, time.monotonic()
    while writer.written < mark:
        if writer.error is not None:
            raise writer.error
        if writer.written > last:
            last, since = writer.written, time.monotonic()
        assert time.monotonic() - since < MAX_WAIT, f"the writer is at {last} of {mark}"
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hours", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as directory:
        report = soak(options.kills, seed, load_hours(options.hours), Path(directory))
    print(json.dumps(asdict(report)))
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
