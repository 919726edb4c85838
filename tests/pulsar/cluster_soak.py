"""Kill broker, services and clients at random times, and compare the log with the reported outcomes.

    python tests/pulsar/cluster_soak.py --brokers 20 --services 50 --seed 7 --shards 2

Each shard of a private broker has an active service and a standby; writers send transactions over two topics and keep
diaries; a reader process follows live. Brokers and services are killed with SIGKILL; services and writers are paused
and continue as zombies. At the end the service is queried for the outcome of each transaction, and writers, service
and readers have to agree. Prints one JSON object; exit code 1 if they don't.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from pulsar_cluster import Cluster, choose  # noqa: E402
from service_process import ServiceProcess  # noqa: E402
from several_brokers import Brokers  # noqa: E402
from soak_check import TOPICS, Comparison, DiaryEntry, compare, read_diaries  # noqa: E402

from broker_io import open_broker  # noqa: E402
from broker_io.port import Broker  # noqa: E402
from broker_io.standalone import Standalone  # noqa: E402
from txnbuffer import CommittedReader, connect  # noqa: E402

SETTINGS = (
    "transactions.session_timeout=3",
    "snapshots.changes=200",
    "service.drain_seconds=20",
)
E = TypeVar("E", bound=Iterable[str])

LOST_OWNERSHIP = 3
"""The exit code of a service that was fenced or whose log failed: it is restarted."""
SECONDS = 240.0
"""Timeout of every recovery, on a machine that is busy with other tests."""
ASLEEP = 4.0
"""Seconds for which a writer is paused: longer than its session and some of its transactions last."""


@dataclass
class Report(Comparison):
    broker_kills: int = 0
    service_kills: int = 0
    writer_kills: int = 0
    zombies: int = 0
    ended_by_themselves: list[str] = field(default_factory=list)
    disagree: int = 0
    slowest_takeover: float = 0.0
    surprises: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return super().good and not (self.disagree or self.surprises or self.unknown)


class Soak:
    services = 2
    """The services of each shard: an active one and standbys."""

    def __init__(
        self, broker: Standalone | Cluster | Brokers, directory: Path, seed: int, writers: int, shards: int = 1
    ) -> None:
        self.report = Report()
        self._shards = shards
        self._shard_of: dict[ServiceProcess, int] = {}
        self._broker = broker
        self._directory = directory
        self.namespace = broker.namespace()
        self._address = f"{broker.url}/{self.namespace}"
        self._options = {"admin_url": broker.admin, "max_unavailable": SECONDS}
        self._random = random.Random(seed)
        self._names = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._services = [self._start_service(shard) for shard in range(shards) for _ in range(self.services)]
        self._old_services: list[ServiceProcess] = []
        self._all_active()
        self._diary_of: dict[subprocess.Popen[bytes], Path] = {}
        self._live = self._start("soak_reader.py", self._address, str(self._seen), json.dumps(self._options))
        self._writers = [self._start_writer() for _ in range(writers)]

    def run(self, events: Iterable[str]) -> Report:
        for event in events:
            self._wait_for_progress()
            time.sleep(self._random.uniform(0.0, 0.5))
            print(time.strftime("%H:%M:%S"), event, file=sys.stderr)
            getattr(self, f"_{event}")()
            self._supervise()
        self._wait_for_progress()
        self._end()
        return self.report

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for service in (*self._services, *self._old_services):
            if service.process.poll() is None:
                service.kill()

    # Events

    def _kill_active(self) -> None:
        self._kill_service(self._active(self._any_shard()))

    def _kill_standby(self) -> None:
        active = self._active(self._any_shard())
        self._kill_service(next(service for service in self._of(self._shard_of[active]) if service is not active))

    def _kill_both(self) -> None:
        for service in self._of(self._any_shard()):
            self._kill_service(service)

    def _kill_actives(self) -> None:
        """Kill the active services of all shards."""
        for service in [self._active(shard) for shard in range(self._shards)]:
            self._kill_service(service)

    def _kill_broker(self) -> None:
        assert isinstance(self._broker, Standalone)
        self.report.broker_kills += 1
        self._broker.kill()
        time.sleep(self._random.uniform(0.0, 1.0))
        self._broker.start()

    def _kill_broker_and_active(self) -> None:
        assert isinstance(self._broker, Standalone)
        active = self._active(self._any_shard())
        self.report.broker_kills += 1
        self._broker.kill()
        self._kill_service(active)
        self._broker.start()

    def _kill_writer(self) -> None:
        self.report.writer_kills += 1
        at = self._random.randrange(len(self._writers))
        self._writers[at].kill()
        self._writers[at].wait()
        self._writers[at] = self._start_writer()

    def _make_zombie(self) -> None:
        """Pause the owner until another service has fenced it, then continue it."""
        shard = self._any_shard()
        zombie = self._active(shard)
        zombie.process.send_signal(signal.SIGSTOP)
        successor = self._start_service(shard, how="--fence")
        self._services[self._services.index(zombie)] = successor
        self._old_services.append(zombie)
        wait_until(lambda: successor.event("recovering") is not None, "no service starts")
        started = time.monotonic()
        wait_until(lambda: successor.event("serving") is not None, "no service fences the paused one")
        self._took_over(started)
        zombie.process.send_signal(signal.SIGCONT)
        self.report.zombies += 1
        wait_until(lambda: not zombie.serves, "the paused service does not see that it was fenced")
        zombie.terminate()  # a standby by now
        if code := zombie.finish(SECONDS):
            self._ended(zombie, code)

    def _stop_writer(self) -> None:
        writer = self._random.choice(self._writers)
        writer.send_signal(signal.SIGSTOP)
        time.sleep(ASLEEP)
        writer.send_signal(signal.SIGCONT)
        self.report.zombies += 1

    # Services

    def _kill_service(self, service: ServiceProcess) -> None:
        self.report.service_kills += 1
        service.process.kill()
        service.finish()
        self._replace(service)

    def _replace(self, service: ServiceProcess) -> None:
        """Replace an ended service, as a supervisor does."""
        self._old_services.append(service)
        self._services[self._services.index(service)] = self._start_service(self._shard_of[service])

    def _any_shard(self) -> int:
        return self._random.randrange(self._shards) if self._shards > 1 else 0

    def _of(self, shard: int) -> list[ServiceProcess]:
        return [service for service in self._services if self._shard_of[service] == shard]

    def _all_active(self) -> None:
        for shard in range(self._shards):
            self._active(shard)

    def _active(self, shard: int) -> ServiceProcess:
        """Wait for the active service of a shard.

        A takeover counts from the time when a service of the shard stands by; the broker is up by then.
        """
        started = time.monotonic()

        def serving() -> ServiceProcess | None:
            nonlocal started
            self._supervise()
            services = self._of(shard)
            if not any(service.event("standing by") for service in services):
                started = time.monotonic()
            return next((service for service in services if service.serves), None)

        found = wait_until(serving, "no service serves")
        self._took_over(started)
        return found

    def _took_over(self, started: float) -> None:
        self.report.slowest_takeover = max(self.report.slowest_takeover, round(time.monotonic() - started, 1))

    def _supervise(self) -> None:
        """Restart services that ended because they lost ownership."""
        for service in [*self._services]:
            if service.process.poll() is not None:
                self._ended(service, service.finish())
                self._replace(service)

    def _ended(self, service: ServiceProcess, code: int) -> None:
        self.report.ended_by_themselves.append(service.lines[-1].strip())
        if code != LOST_OWNERSHIP:
            self.report.surprises.append(f"a service ended with {code}: {''.join(service.lines[-20:])}")

    # Processes

    def _start_service(self, shard: int, *, how: str = "--standby") -> ServiceProcess:
        flags = [word for setting in SETTINGS for word in ("--set", setting)]
        flags += ["--admin-url", self._broker.admin, "--shards", str(self._shards), "--shard", str(shard)]
        service = ServiceProcess(self._address, how, *flags)
        self._shard_of[service] = shard
        return service

    def _start_writer(self) -> subprocess.Popen[bytes]:
        self._names += 1
        name = f"w{self._names}"
        diary, seed = self._directory / f"{name}.diary", str(self._random.randrange(2**32))
        writer = self._start("soak_writer.py", self._address, name, str(diary), seed, json.dumps(self._options))
        self._diary_of[writer] = diary
        return writer

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        self._processes.append(subprocess.Popen([sys.executable, str(TESTS / program), *arguments]))
        return self._processes[-1]

    @property
    def _seen(self) -> Path:
        return self._directory / "live"

    @property
    def _diaries(self) -> list[Path]:
        return sorted(self._directory.glob("*.diary"))

    def _wait_for_progress(self) -> None:
        """Wait until a transaction commits."""

        def commits() -> int:
            assert all(writer.poll() is None for writer in self._writers), "a writer ended unexpectedly"
            return sum(diary.read_text().count(" COMMIT\n") for diary in self._diaries)

        before = commits()
        wait_until(lambda: commits() > before, "nothing commits any more")

    # The end

    def _end(self) -> None:
        begun = [
            self._diary_of[writer] for writer in self._writers
        ]  # before its handler is installed the signal would kill it
        wait_until(lambda: all(diary.exists() and diary.read_text() for diary in begun), "a writer does not begin")
        for writer in self._writers:
            writer.terminate()
        for writer in self._writers:
            code = writer.wait(SECONDS)
            if code:
                self.report.surprises.append(f"a writer ended with {code}")
        self._all_active()
        transactions = list(read_diaries(self._diaries))
        print(time.strftime("%H:%M:%S"), f"querying {len(transactions)} transactions", file=sys.stderr)
        outcomes = ask_outcomes(self._address, self._options, transactions)
        self.report.unknown = 0
        agreed = []
        for one, outcome in zip(transactions, outcomes, strict=True):
            self.report.disagree += one.outcome not in ("?", outcome)
            agreed.append(one._replace(outcome=outcome))
        with open_broker(self._address, **self._options) as broker:
            final = {topic: read_decided(broker, topic) for topic in TOPICS}
        compare(self.report, agreed, {topic: Counter(found) for topic, found in final.items()})
        self._compare_live(final)
        self._stop_services()

    def _compare_live(self, final: dict[str, list[bytes]]) -> None:
        """Check that the live reader has seen the records of a new one, in the same order."""
        count = sum(len(found) for found in final.values())
        wait_until(
            lambda: self._live.poll() is not None or self._seen.read_text().count("\n") >= count,
            "the live reader does not see everything",
        )
        self._live.terminate()
        if self._live.wait(SECONDS):
            self.report.surprises.append(f"the live reader ended with {self._live.returncode}")
        lines = [line.split() for line in self._seen.read_text().splitlines()]
        for topic in TOPICS:
            self.report.live_differs += [value.encode() for name, value in lines if name == topic] != final[topic]

    def _stop_services(self) -> None:
        for service in self._services:  # before its handler is installed a signal would kill it
            wait_until(partial(has_begun, service), "a service does not begin")
            service.terminate()
        for service in self._services:
            if code := service.finish(SECONDS):
                self._ended(service, code)
        for service in (*self._old_services, *self._services):
            told_of = [event for event in service.events if event["event"] in ("damage", "topic stopped")]
            self.report.surprises += [str(event) for event in told_of]


def has_begun(service: ServiceProcess) -> bool:
    return bool(service.events) or service.process.poll() is not None


def wait_until(found: Callable[[], object], failure: str) -> object:
    """Wait until the result of `found` is true; the result."""
    deadline = time.monotonic() + SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline, f"{failure} for {SECONDS:g} s"
        time.sleep(0.05)
    return result


def ask_outcomes(address: str, options: dict[str, object], transactions: Sequence[DiaryEntry]) -> list[str]:
    """The outcomes by the service; all transactions end by the timeout of their session or their own."""

    async def call_all() -> list[str]:
        async with connect(address, max_unavailable=SECONDS, broker_options=options) as client:

            async def ask(one: DiaryEntry) -> str:
                async with asyncio.timeout(SECONDS):
                    while (outcome := await client.outcome(one.txn)) is None:
                        await asyncio.sleep(0.1)
                return outcome.name

            return await asyncio.gather(*map(ask, transactions))

    return asyncio.run(call_all())


def read_decided(broker: Broker, topic: str) -> list[bytes]:
    """The visible values once all records are decided."""
    found: list[bytes] = []
    with CommittedReader(broker, topic) as reader:

        def at_the_end() -> bool:
            while (batch := reader.read()) is not None:
                found.extend(record.value or b"" for record in batch)
            return not reader.lag()[topic].behind

        wait_until(at_the_end, f"topic {topic} has undecided records")
    return found


def plan(brokers: int, services: int, chance: random.Random) -> list[str]:
    """Events with these kills, in random order, and some kills and zombies of writers."""
    events = ["kill_broker", "kill_broker_and_active"] * (brokers // 2) + ["kill_broker"] * (brokers % 2)
    left = max(services - brokers // 2, 0)  # some are killed together with the broker
    events += ["kill_both"] * (left // 10) + ["kill_standby"] * (left // 5)
    events += ["kill_active"] * (left - 2 * (left // 10) - left // 5)
    events += ["make_zombie", "stop_writer", "kill_writer", "kill_writer"] * (services // 10)
    chance.shuffle(events)
    return events


def play(make: Callable[[Path], Soak], broker: Standalone | Cluster | Brokers, events: Iterable[str]) -> Any:
    """Run the soak that `make` builds in a directory; its report."""
    with tempfile.TemporaryDirectory(prefix="txnbuffer-soak-") as directory:
        run = make(Path(directory))
        try:
            return run.run(events)
        finally:
            run.close()
            if isinstance(broker, Cluster):  # which continues to run
                broker.drop(run.namespace)


def soak(broker: Standalone | Cluster, events: Sequence[str], seed: int, writers: int, shards: int = 1) -> Report:
    return play(lambda directory: Soak(broker, directory, seed, writers, shards), broker, events)


def private_broker(**arguments: Any) -> AbstractContextManager[Standalone]:
    return Cluster(choose(), "", "").private_standalone(**arguments)


def run_script(
    parser: argparse.ArgumentParser,
    events_of: Callable[[argparse.Namespace, random.Random], E],
    soak_of: Callable[[Standalone, E, argparse.Namespace], Report],
    broker_of: Callable[[argparse.Namespace], AbstractContextManager[Any]] = lambda _: private_broker(),
) -> int:
    """Soak the broker of `broker_of`; prints the report, returns the exit code."""
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended
    print(f"seed {options.seed}", file=sys.stderr)
    events = events_of(options, random.Random(options.seed))
    with broker_of(options) as broker:
        report = soak_of(broker, events, options)
    print(json.dumps(asdict(report) | {"good": report.good}))
    return 0 if report.good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--brokers", type=int, default=20, help="kills of the broker")
    parser.add_argument("--services", type=int, default=50, help="minimum kills of services")
    parser.add_argument("--shards", type=int, default=1, help="number of shards, each with two services")
    return run_script(
        parser,
        lambda options, chance: plan(options.brokers, options.services, chance),
        lambda broker, events, options: soak(broker, events, options.seed, options.writers, options.shards),
    )


if __name__ == "__main__":
    sys.exit(main())
