"""Hundreds of change streams whose readers are slow.

    make stress ONLY=slow_streams

Five processes open 500 streams on four topics and pause after each batch: four for a moment, one for longer than
`streams.slow_after`, so that the service ends its streams as too slow and they open again. Meanwhile transactions
write twice as much as `streams.memory_bytes`, and a fast reader follows one topic. Promises: the mutations in memory
stay below `streams.memory_bytes`, without those that were freed while they are sent; the fast reader is never
interrupted; when the slow readers hurry in the end, each has exactly the state of its topic. The figures have the
memory of the service and the latency of another client, without streams and with them.

The writer makes pauses, in which the service sends. Streams that fall behind what memory holds read the log: they are
too many to share half of `streams.memory_bytes`, so they take turns.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from service_process import ServiceProcess
from stress.processes import Children, Report, latencies, metrics, settings, used, wait_until
from stress.slow_reader import END, digest, small

from broker_io import open_broker
from txnbuffer import CommittedReader, SyncClient, connect
from txnbuffer.cli.admin_client import ServiceAddress, call

MIB = 2**20
MEMORY = 4 * MIB
PAUSE = 0.15
"""Seconds between two transactions: with 500 streams the service then sends 30 MB a second."""
RSS_MIB = 512
"""Maximum growth of the service's memory, in MiB: that of the streams, and what connections and reads take."""


class Memory(threading.Thread):
    """Looks at the memory of the streams until it is stopped; `leaving` is what a reader still refers to."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.held = self.leaving = 0
        self.stopping = threading.Event()
        self._address = ServiceAddress(f"127.0.0.1:{port}")

    def run(self) -> None:
        while not self.stopping.wait(0.5):
            managers = call(self._address, "Streams")["managers"]
            leaving = sum(manager["leaving_bytes"] for manager in managers)
            self.leaving = max(self.leaving, leaving)
            self.held = max(self.held, sum(manager["memory_bytes"] for manager in managers) - leaving)


class Check:
    def __init__(self, directory: Path, streams: int, processes: int, written: int) -> None:
        self.report = Report()
        self._directory = directory
        self._topics = [f"t{number}" for number in range(4)]
        self._streams, self._processes, self._written = streams, processes, written
        self._children = Children()
        limits = settings(f"streams.memory_bytes={MEMORY}", "streams.slow_after=3", "log.watermark_bytes=1000000")
        self._service = ServiceProcess(directory / "log", *limits).wait_serving()
        self._address = f"txnbuf://127.0.0.1:{self._service.port}"
        self._chance = random.Random(1)

    def run(self, samples: int) -> Report:
        figures = self.report.figures
        with connect(self._address) as client:
            self._write(client, [f"alone{number}" for number in range(4)], 10)
            figures["without streams"] = latencies(client, samples)
            self._write(client, self._topics, 1)
            before = used(self._service.process.pid)
            slow = [self._start(number) for number in range(self._processes)]
            fast = self._children.start("stress/slow_reader.py", self._address, 1, 0.0, self._topics[0])
            for process in (*slow, fast):
                assert process.stdout is not None
                assert process.stdout.readline().strip() == "open"
            self._wait_streams()
            memory = Memory(self._service.port)
            memory.start()
            began = time.monotonic()
            self._write(client, self._topics, self._written)
            figures["seconds of writing"] = round(time.monotonic() - began, 1)
            figures["with streams"] = latencies(client, samples)
            with client.transaction() as txn:
                for topic in self._topics:
                    txn.send(topic, b"", key=END)
            fast_report = self._finish(fast)
            figures["streams too slow"] = self._ends()
            began = time.monotonic()
            reports = [one for process in slow for one in self._finish(process)]
            figures["slow readers at the end after"] = round(time.monotonic() - began, 1)
            figures["of the service"] = {"before": before, "after": used(self._service.process.pid)}
            memory.stopping.set()
            memory.join()
        self._judge(memory, reports, fast_report)
        return self.report

    def close(self) -> None:
        self._children.close()
        if self._service.process.poll() is None:
            self._service.kill()

    def _start(self, number: int) -> subprocess.Popen[str]:
        pause = 5.0 if number == 0 else 0.1 * number  # the first process is slower than `streams.slow_after`
        streams = self._streams // self._processes
        return self._children.start("stress/slow_reader.py", self._address, streams, pause, *self._topics)

    def _wait_streams(self) -> None:
        http, count = self._service.http, self._streams + 1
        wait_until(lambda: metrics(http)["txnbuffer_streams"] == count, f"there are not {count} streams")

    def _ends(self) -> dict[str, int]:
        found = call(ServiceAddress(f"127.0.0.1:{self._service.port}"), "Streams")
        ends: dict[str, int] = {}
        for connection in found["connections"]:
            for reason, count in connection["stream_ends"].items():
                ends[reason] = ends.get(reason, 0) + count
        return ends

    def _write(self, client: SyncClient, topics: list[str], transactions: int) -> None:
        """Write transactions over topics, 40 KB each, with a pause after each of them."""
        for _ in range(transactions):
            with client.transaction() as txn:
                for topic in topics:
                    for _ in range(10):
                        txn.send(topic, self._chance.randbytes(1000), key=f"k{self._chance.randrange(1000)}")
            time.sleep(PAUSE)

    def _finish(self, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
        printed, _ = process.communicate("\n", timeout=600)
        self.report.expect(process.returncode == 0, "a process of readers ends without an error")
        return [json.loads(line) for line in printed.splitlines()]

    def _judge(self, memory: Memory, slow: list[dict[str, Any]], fast: list[dict[str, Any]]) -> None:
        report = self.report
        report.figures |= {
            "most bytes of mutations": memory.held,
            "most bytes that were freed while in use": memory.leaving,
            "mutations of slow readers": sum(one["mutations"] for one in slow),
            "interruptions of slow readers": sum(one["interruptions"] for one in slow),
            "mutations of the fast reader": sum(one["mutations"] for one in fast),
        }
        self._service.terminate()
        report.expect(self._service.finish() == 0, "a clean end")
        with open_broker(f"file:{self._directory / 'log'}", read_only=True) as broker:
            wanted = {topic: self._state(broker, topic) for topic in self._topics}
        report.expect(len(slow) == self._streams, "each slow reader reaches the end")
        for one in (*slow, *fast):
            report.expect(wanted[one["topic"]] == one["digest"], f"a reader has the state of {one['topic']}: {one}")
        report.expect(not any(one["interruptions"] for one in fast), "the fast reader is not interrupted")
        report.expect(memory.held <= MEMORY, f"mutations in memory stay below {MEMORY} bytes, not {memory.held}")
        service = report.figures["of the service"]
        grown = service["after"]["peak_mib"] - service["before"]["rss_mib"]
        report.expect(grown < RSS_MIB, f"the memory of the service grows by less than {RSS_MIB} MiB, not {grown}")

    def _state(self, broker: Any, topic: str) -> str:
        state: dict[bytes, bytes] = {}
        with CommittedReader(broker, topic) as reader:
            while (batch := reader.read()) is not None:
                for record in batch:
                    state[record.key or b""] = small(record.value or b"")
        return digest(state)


def check(directory: Path, *, streams: int, processes: int, written: int, samples: int) -> Report:
    with closing(Check(directory, streams, processes, written)) as running:
        return running.run(samples)


def full(directory: Path) -> Report:
    return check(directory, streams=500, processes=5, written=200, samples=300)
