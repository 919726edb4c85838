"""Writers, a client that measures, and what a process uses: the parts that all stress checks share."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from soak_check import TOPICS, Comparison, compare, read_diaries, values

from broker_io.port import Broker
from txnbuffer import SyncClient

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 240.0
"""Timeout of every wait, on a machine that is busy with other work."""
PROBE_TOPIC = "probe"

T = TypeVar("T")


@dataclass
class Report:
    """`figures`: what was measured; `wrong`: each promise that was broken; `missing`: what this machine lacks."""

    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def expect(self, holds: object, promise: str) -> None:
        if not holds:
            self.wrong.append(promise)


def wait_until(found: Callable[[], T], failure: str, seconds: float = SECONDS) -> T:
    """Wait until the result of `found` is true; the result."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, f"{failure} for {seconds:g} s"
        time.sleep(0.05)
    return result


class Children:
    """Processes that end with the check."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, program: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a program of the directory of tests, with pipes as its input and output."""
        command = [sys.executable, str(TESTS / program), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
        pipe = subprocess.PIPE
        self.all.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
        return self.all[-1]

    def close(self) -> None:
        for process in self.all:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Writers:
    """Processes of `soak_writer`, or a `program` like it, whose diaries say in the end whether anything was lost."""

    def __init__(
        self, children: Children, directory: Path, address: str, count: int, program: str = "soak_writer.py"
    ) -> None:
        self._directory = directory
        self._address = address
        self._children = children
        self._program = program
        self._started = itertools.count()
        self._processes = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[str]:
        number = next(self._started)
        diary = self._directory / f"w{number}.diary"
        return self._children.start(self._program, self._address, f"w{number}", diary, number)

    def kill(self) -> None:
        """Kill the writer that was started first, and start another one."""
        writer = self._processes.pop(0)
        writer.kill()
        writer.wait()
        self._processes.append(self._start())

    def wait_for_commits(self, count: int = 20) -> None:
        """Wait until so many more transactions commit."""
        before = self._lines(" COMMIT")

        def enough() -> bool:
            assert all(process.poll() is None for process in self._processes), "a writer ended"
            return self._lines(" COMMIT") >= before + count

        wait_until(enough, "nothing commits")

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            assert process.wait(SECONDS) == 0, "a writer failed"

    def aborted_early(self, seconds: float) -> list[str]:
        """Transactions that others aborted within so many seconds after their begin."""
        lines = [line.split(maxsplit=4) for line in self._all() if line[:2] == "O " and " ABORT " in line]
        return [" ".join(line) for line in lines if float(line[3]) < seconds]

    def acknowledged(self) -> int:
        return self._lines(" COMMIT")

    def judge(self, broker: Broker, isolation: str = "read_committed") -> Comparison:
        """Compare the records that a reader finds with all diaries."""
        found = {topic: Counter(values(broker, topic, isolation)) for topic in TOPICS}
        report = Comparison()
        compare(report, read_diaries(self._diaries()), found)
        return report

    def _diaries(self) -> list[Path]:
        return sorted(self._directory.glob("*.diary"))

    def _all(self) -> list[str]:
        return [line for diary in self._diaries() for line in diary.read_text().splitlines()]

    def _lines(self, ending: str) -> int:
        return sum(line.endswith(ending) for line in self._all())


def counted(comparison: Comparison) -> dict[str, int]:
    return {name: count for name, count in asdict(comparison).items() if name != "live_differs"}


def latencies(client: SyncClient, count: int) -> dict[str, float]:
    """Milliseconds that so many small transactions took, one after another, from begin to the answer of the commit."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        with client.transaction() as txn:
            txn.send(PROBE_TOPIC, b"%d" % number)
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {
        "count": count,
        "p50_ms": round(took[count // 2], 1),
        "p99_ms": round(took[count * 99 // 100], 1),
        "max_ms": round(took[-1], 1),
    }


def used(pid: int) -> dict[str, int]:
    """What a process uses: memory in MiB now and at its peak, file descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())

    def mib(name: str) -> int:
        return int(status[name].split()[0]) // 1024

    return {
        "rss_mib": mib("VmRSS"),
        "peak_mib": mib("VmHWM"),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def metrics(port: int) -> dict[str, float]:
    """The metrics of a service."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def allow_descriptors(wanted: int) -> str:
    """Raise the limit on file descriptors of this process and its children; what is missing, if anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return f"{wanted} file descriptors: this process may have {hard} (ulimit -Hn)"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    return ""


def settings(*chosen: str) -> Sequence[str]:
    return [word for one in chosen for word in ("--set", one)]
