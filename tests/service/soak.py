"""Kill service and clients at random moments, for a long time, and compare the log with the answers they got.

    python tests/service/soak.py --kills 200 --seed 7

Each service takes messages of another size, which may be small. Writers send transactions over two topics through
the public client and keep diaries; a reader follows the log live. In the end each transaction that was answered as
committed is there once and whole, none that was answered as aborted is there, and the others are there wholly or not at
all, the same on both topics; and the live reader saw exactly what a new one sees. Prints one JSON object; exit code 1
if anything is lost, doubled, incomplete or seen uncommitted.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from service_process import ServiceProcess, kept_port  # noqa: E402
from soak_check import TOPICS, Comparison, compare, read_diaries, values  # noqa: E402

from broker_io import open_broker  # noqa: E402
from txnbuffer.client.reading.reader import CommittedReader  # noqa: E402

MESSAGE_BYTES = (4096, 16 * 1024, 5 * 1024 * 1024)
"""Message limits in bytes: each service that is started has one of them."""
SETTINGS = (
    "transactions.session_timeout=3",
    "snapshots.changes=200",
    "log.segment_bytes=2000000",
    "service.drain_seconds=20",
)


@dataclass
class Report(Comparison):
    kills: int = 0
    service_kills: int = 0
    slowest_recovery: float = 0.0


class LiveReader(threading.Thread):
    """Follows both topics without the service."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._directory = directory

    def run(self) -> None:
        try:
            with open_broker(f"file:{self._directory}", read_only=True) as broker:
                while not set(TOPICS) <= set(broker.topics()):
                    time.sleep(0.05)
                with CommittedReader(broker, TOPICS) as reader:
                    while not self.stopping.is_set() or self._read(reader):
                        self._read(reader)
        except BaseException as error:
            self.error = error

    def _read(self, reader: CommittedReader) -> bool:
        batch = reader.read(timeout=0.1)
        if batch is not None:
            self.seen[batch.topic] += [record.value or b"" for record in batch]
        return batch is not None


class Soak:
    def __init__(self, directory: Path, seed: int, writers: int) -> None:
        self.report = Report()
        self._random = random.Random(seed)
        self._log, self._diaries = directory / "log", directory
        self._port = kept_port()
        self._count = 0
        self._service = self._start_service()
        self._service.wait_serving()
        self._live = LiveReader(self._log)
        self._live.start()
        self._writers = [self._start_writer() for _ in range(writers)]

    def run(self, kills: int) -> Report:
        for _ in range(kills):
            time.sleep(self._random.uniform(0.05, 0.8))
            self.report.kills += 1
            if self._random.random() < 0.6:
                self._kill_service()
            else:
                self._kill_writer()
        self._end()
        return self.report

    def _kill_service(self) -> None:
        self.report.service_kills += 1
        self._service.kill()
        self._service = self._start_service()
        if self._random.random() < 0.3:  # once more while it recovers
            time.sleep(self._random.uniform(0.0, 0.6))
            self.report.kills += 1
            self.report.service_kills += 1
            self._service.kill()
            self._service = self._start_service()
        started = time.monotonic()
        self._service.wait_serving()
        self.report.slowest_recovery = max(self.report.slowest_recovery, time.monotonic() - started)

    def _kill_writer(self) -> None:
        at = self._random.randrange(len(self._writers))
        self._writers[at].kill()
        self._writers[at].wait()
        self._writers[at] = self._start_writer()

    def _end(self) -> None:
        for writer in self._writers:
            writer.terminate()
        for writer in self._writers:
            writer.wait(120)
        self._settle()
        self._service.terminate()
        assert self._service.finish(60) == 0, "".join(self._service.lines)
        self._live.stopping.set()
        self._live.join(60)
        if self._live.error is not None:
            raise self._live.error
        self._compare()

    def _settle(self) -> None:
        """Wait until every transaction of killed writers was aborted."""
        from txnbuffer.cli.admin_client import ServiceAddress, call

        deadline = time.monotonic() + 60
        while any(row["open"] for row in call(ServiceAddress(f"127.0.0.1:{self._port}"), "List")):
            assert time.monotonic() < deadline, "transactions of dead clients stay open"
            time.sleep(0.1)

    def _start_service(self) -> ServiceProcess:
        limit = f"log.max_message_bytes={self._random.choice(MESSAGE_BYTES)}"
        flags = [word for setting in (*SETTINGS, limit) for word in ("--set", setting)]
        return ServiceProcess(self._log, *flags, port=self._port)

    def _start_writer(self) -> subprocess.Popen[bytes]:
        self._count += 1
        name = f"w{self._count}"
        diary = self._diaries / f"{name}.diary"
        command = [
            sys.executable,
            str(HERE.parent / "soak_writer.py"),
            f"txnbuf://127.0.0.1:{self._port}",
            name,
            str(diary),
        ]
        return subprocess.Popen([*command, str(self._random.randrange(2**32))])

    def _compare(self) -> None:
        with open_broker(f"file:{self._log}") as broker:
            final = {topic: list(values(broker, topic)) for topic in TOPICS}
        for topic in TOPICS:
            self.report.live_differs += self._live.seen[topic] != final[topic]
        transactions = read_diaries(self._diaries.glob("*.diary"))
        compare(self.report, transactions, {topic: Counter(found) for topic, found in final.items()})


def soak(kills: int, seed: int, writers: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="txnbuffer-soak-") as directory:
        return Soak(Path(directory), seed, writers).run(kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    report = soak(options.kills, options.seed, options.writers)
    print(json.dumps(asdict(report) | {"good": report.good}))
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
