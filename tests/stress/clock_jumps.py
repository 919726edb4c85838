"""The wall clock of a service is set while clients use it.

    make stress ONLY=clock_jumps             (libfaketime 0.9.11 or newer; LIBFAKETIME=PATH)

The clock of the service goes an hour ahead, an hour back, back again, drifts fast and slow by a tenth of a second at a
time, and jumps while the service is killed and starts again. Writers commit in two topics; a stream, a group that
copies records, and a reader follow. Promises: a timeout is counted by a monotonic clock, so no jump ends a transaction
before its timeout, and one that is left open ends when its timeout expires although the clock went back an hour; a
transaction that is open while the service restarts with another clock commits; the transactions of a killed client
abort after `transactions.session_timeout`; stream, group and reader get everything, once and in order; in the end
nothing is lost, doubled, partial or dirty.

`Libfaketime` sets the clock of all libraries of the service, but not the monotonic one. Versions before 0.9.11 break
`time.sleep` of Python 3.11, which is found out at the start. `Shifted` needs nothing and sets the clock that Python
code sees.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from service_process import ServiceProcess, kept_port
from soak_check import TOPICS
from soak_followers import COPIES
from soak_writer import TRANSACTION_SECONDS
from stress.processes import TESTS, Children, Report, Writers, counted, settings, wait_until

from broker_io import open_broker
from txnbuffer import CommittedReader, Outcome, SyncClient, connect

HOUR = 3600.0
SESSION_SECONDS = 5.0
SHORT_SECONDS = 2.0
SETTINGS = settings(f"transactions.session_timeout={SESSION_SECONDS}", "log.watermark_bytes=1000000")
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


class WallClock(Protocol):
    """Starts services whose wall clock can be set."""

    def set(self, seconds: float) -> None:
        """Set it so many seconds ahead of the real one."""

    def serve(self, log: Path, port: int) -> ServiceProcess: ...


class Shifted:
    def __init__(self, directory: Path) -> None:
        self._offset = directory / "offset"
        self.set(0.0)

    def set(self, seconds: float) -> None:
        replace(self._offset, f"{seconds}")

    def serve(self, log: Path, port: int) -> ServiceProcess:
        python = (str(TESTS / "stress" / "set_clock.py"), str(self._offset))
        return ServiceProcess(log, *SETTINGS, port=port, python=python)


class Libfaketime:
    def __init__(self, directory: Path, library: str) -> None:
        self._offset = directory / "faketime"
        self.environment = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.set(0.0)

    @staticmethod
    def library() -> str:
        """The path of the library; empty if there is none."""
        named = os.environ.get("LIBFAKETIME", "")
        places = [named] if named else [f"{place}/faketime/libfaketimeMT.so.1" for place in LIBRARIES]
        return next((place for place in places if Path(place).is_file()), "")

    @classmethod
    def missing(cls) -> list[str]:
        """What this machine lacks."""
        library = cls.library()
        if not library:
            return ["libfaketime: install the package faketime, or set LIBFAKETIME to the path of libfaketimeMT.so.1"]
        with tempfile.TemporaryDirectory() as directory:
            clock = cls(Path(directory), library)
            clock.set(HOUR)
            program = "import time; before = time.monotonic(); time.sleep(0.1); print(time.time())"
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, **clock.environment},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode or float(done.stdout) < time.time() + HOUR / 2:
            last = (done.stderr.splitlines() or ["it does not change the time"])[-1]
            return [f"a libfaketime that works with this Python: {library} fails ({last}); 0.9.11 and newer do"]
        return []

    def set(self, seconds: float) -> None:
        replace(self._offset, f"{seconds:+.3f}")

    def serve(self, log: Path, port: int) -> ServiceProcess:
        return ServiceProcess(log, *SETTINGS, port=port, environment=self.environment)


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


class Check:
    def __init__(self, clock: WallClock, directory: Path) -> None:
        self.report = Report()
        self._clock, self._directory = clock, directory
        self._log, self._port = directory / "log", kept_port()
        self._children = Children()
        self._service = clock.serve(self._log, self._port).wait_serving()
        self._address = f"txnbuf://127.0.0.1:{self._port}"
        self._writers = Writers(self._children, directory, self._address, 2)
        self._writers.wait_for_commits()
        self._followers = {kind: self._follow(kind) for kind in ("stream", "group", "reader")}

    def run(self, drifts: int, jumps: Sequence[float], restarts: Sequence[float]) -> Report:
        with connect(self._address, max_unavailable=120.0) as client:
            for offset in jumps:
                self._jump(client, offset)
            for step in (0.1, -0.1):
                for number in range(drifts):
                    self._clock.set(number * step)
                    time.sleep(0.05)
                self._writers.wait_for_commits()
            early = self._writers.aborted_early(TRANSACTION_SECONDS)
            self.report.expect(not early, f"no transaction aborts before its timeout: {early[:3]}")
            for offset in restarts:
                self._restart(client, offset)
            self._killed_client(client)
        self._end()
        return self.report

    def close(self) -> None:
        self._children.close()
        if self._service.process.poll() is None:
            self._service.kill()

    def _follow(self, kind: str) -> subprocess.Popen[str]:
        return self._children.start("soak_followers.py", kind, self._address, self._seen(kind), "{}")

    def _seen(self, kind: str) -> Path:
        return self._directory / f"{kind}.seen"

    def _jump(self, client: SyncClient, offset: float) -> None:
        """Set the clock while two transactions are open: one commits, one is left to its timeout."""
        kept, left = client.transaction(timeout=60.0).begin(), client.transaction(timeout=SHORT_SECONDS).begin()
        for txn in (kept, left):
            txn.send(TOPICS[0] + "-open", b"kept" if txn is kept else b"left")
        began = time.monotonic()
        self._clock.set(offset)
        self._writers.wait_for_commits()
        kept.commit()
        wait_until(lambda: client.outcome(left.id) is not None, f"a timeout does not expire with a clock {offset} off")
        took = time.monotonic() - began
        self.report.expect(client.outcome(left.id) is Outcome.ABORT, "a transaction that is left open aborts")
        self.report.figures.setdefault("seconds until a timeout of 2 s", []).append(round(took, 1))

    def _restart(self, client: SyncClient, offset: float) -> None:
        """Kill the service and start it with another clock while a transaction is open."""
        txn = client.transaction(timeout=60.0).begin()
        txn.send(TOPICS[0] + "-open", b"kept")
        self._service.kill()
        self._clock.set(offset)
        self._service = self._clock.serve(self._log, self._port).wait_serving()
        self._writers.wait_for_commits()
        txn.commit()

    def _killed_client(self, client: SyncClient) -> None:
        """The session of a killed client expires although the clock goes back."""
        program = self._children.start("stress/open_transaction.py", self._address, TOPICS[0] + "-open")
        assert program.stdout is not None
        txn = program.stdout.readline().strip()
        program.kill()
        began = time.monotonic()
        self._clock.set(-2 * HOUR)
        wait_until(lambda: client.outcome(txn) is not None, "the session of a killed client does not expire")
        self.report.figures["seconds until a session of 5 s expires"] = round(time.monotonic() - began, 1)
        self.report.expect(client.outcome(txn) is Outcome.ABORT, "the transactions of a killed client abort")

    def _end(self) -> None:
        self._writers.stop()
        with open_broker(self._address) as broker:
            wanted = self._values(broker, TOPICS[0])
            wait_until(lambda: len(self._values(broker, COPIES)) >= len(wanted), "the group does not get everything")
            copies = self._values(broker, COPIES)
            last = {value.partition(b"/")[0]: value for value in wanted}  # the key of a record is its transaction
            wait_until(lambda: {*last.values()} <= {*self._streamed()}, "the stream does not get everything")
            everything = len(wanted) + len(self._values(broker, TOPICS[1]))
            wait_until(lambda: self._lines("reader") >= everything, "the reader does not get everything")
        for follower in self._followers.values():
            follower.terminate()
            self.report.expect(follower.wait(60) == 0, "no follower fails")
        self._service.terminate()
        self.report.expect(self._service.finish() == 0, "a clean end")
        with open_broker(f"file:{self._log}", read_only=True) as broker:
            found = self._writers.judge(broker)
        self.report.expect(found.good, "what was answered is in the log, once and whole")
        self.report.expect(sorted(copies) == sorted(wanted), "the group copies each record once")
        places = {value: number for number, value in enumerate(wanted)}
        seen = [places.get(value, -1) for value in self._streamed()]
        ordered = all(before < after for before, after in itertools.pairwise([-1, *seen]))
        self.report.expect(ordered, "the stream gets each record at most once, in order, and no rollback")
        self.report.figures |= counted(found)

    def _streamed(self) -> list[bytes]:
        """The values of the stream; a snapshot leaves out older ones of a key."""
        path = self._seen("stream")
        return [line.split()[-1].encode() for line in path.read_text().splitlines()] if path.exists() else []

    def _lines(self, kind: str) -> int:
        path = self._seen(kind)
        return path.read_text().count("\n") if path.exists() else 0

    def _values(self, broker: Any, topic: str) -> list[bytes]:
        """The visible values of a topic, without those of transactions that are still open."""
        found: list[bytes] = []
        with CommittedReader(broker, topic) as reader:
            while (batch := reader.read()) is not None:
                found += [record.value or b"" for record in batch]
        return found


def check(
    clock: WallClock,
    directory: Path,
    *,
    drifts: int,
    jumps: Sequence[float] = (HOUR, 0.0, -HOUR, 0.0),
    restarts: Sequence[float] = (HOUR, -HOUR),
) -> Report:
    """The check; `jumps` and `restarts` say how many seconds the clock is off after each of them."""
    with closing(Check(clock, directory)) as running:
        return running.run(drifts, jumps, restarts)


def full(directory: Path) -> Report:
    """The check with both clocks; without libfaketime with the one that needs nothing."""
    shifted = directory / "shifted"
    shifted.mkdir()
    report = check(Shifted(shifted), shifted, drifts=100)
    report.figures = {"clock of Python": report.figures}
    report.missing = Libfaketime.missing()
    if not report.missing:
        whole = check(Libfaketime(directory, Libfaketime.library()), directory, drifts=100)
        report.figures["libfaketime"] = whole.figures
        report.wrong += whole.wrong
    return report
