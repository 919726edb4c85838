"""Break the machines, disks, links and lock of a pair at random, and compare both logs with the answers clients got.

    PYTHONPATH=tests python tests/pair_soak.py --faults 300 --seed 7

Two services, a real etcd, and clients of both: writers of transactions and of ordinary sends, a reader, a change stream
and a consumer group. In each round one to three faults happen at once; once they are over, transactions must commit
again. Nothing that was acknowledged may be lost or be there twice, nothing uncommitted be seen, and no two machines be
live in one epoch; in the end both logs are equal. Prints one JSON object; exit code 1 if a rule is violated, 2 if this
machine lacks something that a fault requires (strace, the right to mount).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fault_proxy import FaultProxy
from pair_machines import LEASE, WATERMARK, Machine, PairOfMachines, Watcher, wait_exit
from soak_check import TOPICS, Comparison, compare, read_diaries, values
from soak_followers import COPIES, KINDS
from stress.processes import SECONDS, Children, Writers, wait_until

from broker_io import open_broker
from broker_io.errors import Error
from broker_io.port import Broker
from txnbuffer.cli.admin_client import call

DISK_FAILED = 4
EXIT_SECONDS = 30.0
"""Seconds within which a service ends after a failed sync."""
MEMBER_TIMEOUT = LEASE / 5
"""Seconds after which a primary continues without a silent backup."""


@dataclass
class Report(Comparison):
    """`happened`: faults by kind. `ended`: exit codes of services that ended by themselves, with their number.

    `seen_live`: how often a machine said that it is live.

    `slowest_commit` is the longest time from the end of the faults of a round to the next commit, in seconds.
    """

    faults: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    two_lives: int = 0
    stale_lives: list[str] = field(default_factory=list)
    seen_live: int = 0
    slowest_commit: float = 0.0
    ended: Counter[int] = field(default_factory=Counter)
    failed_reads: int = 0
    copies_differ: int = 0
    stream_differs: int = 0
    rollbacks: int = 0
    machines_differ: int = 0
    surprises: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        wrong = self.two_lives or self.stale_lives or self.copies_differ or self.stream_differs or self.rollbacks
        return super().good and not (wrong or self.machines_differ or self.surprises)


Fault = Callable[["Soak"], AbstractContextManager[None]]
FAULTS: dict[str, tuple[Fault, int]] = {}
"""By name, each with its weight. A fault ends with its context, after the pause of its round."""
ALONE: set[str] = set()
"""Faults that need both machines in sync, and happen alone."""


def fault(weight: int, *, alone: bool = False) -> Callable[[Callable[[Soak], Iterator[None]]], None]:
    def register(run: Callable[[Soak], Iterator[None]]) -> None:
        name = run.__name__
        FAULTS[name] = contextlib.contextmanager(run), weight
        if alone:
            ALONE.add(name)

    return register


class Soak:
    def __init__(self, directory: Path, seed: int, writers: int, *, mount: bool = True) -> None:
        self.report = Report()
        self.random = random.Random(seed)
        self.directory = directory
        self.pair = PairOfMachines(directory, mount=mount)
        self.children = Children()
        self.watcher = Watcher(self.pair)
        self._names = self._possible()
        try:
            self.pair.live()
            self.watcher.start()
            address = self.pair.address
            self.writers = Writers(self.children, directory, address, writers, "pair_soak_writer.py")
            self._followers = {
                kind: self.children.start("soak_followers.py", kind, address, directory / kind, "{}") for kind in KINDS
            }
            wait_until(self.pair.in_sync, "the backup does not join")
        except BaseException:
            self.explain()
            self.close()
            raise

    def _possible(self) -> list[str]:
        """The faults that can happen on this machine."""
        lacking = {
            "strace": shutil.which("strace") is None,
            "the right to mount a file system": not all(machine.disk.mounted for machine in self.pair.machines),
        }
        self.report.missing = [what for what, lacks in lacking.items() if lacks]
        needs = {"fail_sync": "strace", "fill_disk": "the right to mount a file system"}
        return [name for name in FAULTS if needs.get(name) not in self.report.missing]

    def run(self, faults: int) -> Report:
        while self.report.faults < faults:
            self._round()
        self._end()
        return self.report

    def close(self) -> None:
        self.watcher.stop()
        self.children.close()
        self.pair.close()

    def explain(self) -> None:
        """Print what both machines say, and the last lines of their services."""
        for machine in self.pair.machines:
            print(machine.name, machine.status(), *machine.service.lines[-20:], sep="\n", file=sys.stderr)

    def _round(self) -> None:
        weights = [FAULTS[name][1] for name in self._names]
        chosen = self.random.choices(self._names, weights, k=self.random.choice([1, 1, 2, 3]))
        if ALONE.intersection(chosen):
            chosen = [name for name in chosen if name in ALONE][:1]
            self._wait_for(self.pair.in_sync, "the machines are not in sync again")
        print(time.strftime("%H:%M:%S"), *dict.fromkeys(chosen), file=sys.stderr, flush=True)
        with contextlib.ExitStack() as faults:
            for name in dict.fromkeys(chosen):
                self.report.faults += 1
                self.report.happened[name] += 1
                faults.enter_context(FAULTS[name][0](self))
                time.sleep(self.random.choice([0.0, self.random.uniform(0.0, 1.0)]))
            time.sleep(self.random.choice([0.0, 0.5, 1.5, MEMBER_TIMEOUT + 0.5, LEASE + 1.0]))
        began = time.monotonic()
        self.supervise()
        self._wait_for_commit()
        self.report.slowest_commit = max(self.report.slowest_commit, round(time.monotonic() - began, 1))

    def _wait_for_commit(self) -> None:
        before = self.writers.acknowledged()
        self._wait_for(lambda: self.writers.acknowledged() > before, "nothing commits")

    def _wait_for(self, condition: Callable[[], bool], failure: str) -> None:
        """Wait; services that end meanwhile are started again."""

        def holds() -> bool:
            self.supervise()
            return condition()

        wait_until(holds, failure)

    def supervise(self) -> None:
        """Start services again that have ended, as a supervisor does, and check that no client has ended."""
        for machine in self.pair.machines:
            code = machine.service.process.poll()
            if code is not None:
                machine.service.finish()
                if code >= 0:
                    self.report.ended[code] += 1
                if code not in (DISK_FAILED, -signal.SIGKILL):
                    self.report.surprises.append(f"{machine.name} ended with {code}: {machine.service.lines[-20:]}")
                machine.start()
        for kind, process in self._followers.items():
            assert process.poll() is None, f"the {kind} ended with {process.returncode}"

    def any(self) -> Machine:
        return self.random.choice(self.pair.machines)

    def live(self) -> Machine:
        """The machine that serves, or any if none does now."""
        return next((machine for machine in self.pair.machines if machine.serves), None) or self.any()

    # The end

    def _end(self) -> None:
        self._wait_for(self.pair.in_sync, "the machines are not in sync in the end")
        self.writers.stop()
        live = self.pair.live()
        wait_until(lambda: not any(row["open"] for row in call(live.address, "List")), "transactions stay open")
        with open_broker(f"file:{live.log}", read_only=True) as broker:
            final = {topic: list(values(broker, topic)) for topic in TOPICS}
            self._check_followers(final, broker)
        counted = {topic: Counter(found) for topic, found in final.items()}
        compare(self.report, read_diaries(sorted(self.directory.glob("*.diary"))), counted)
        self.watcher.stop()
        report, lives = self.report, self.watcher.lives
        report.epochs, report.two_lives = len(lives.stores), lives.two_lives
        report.stale_lives, report.seen_live = lives.stale, lives.seen
        self._compare_machines(live, final)

    def _compare_machines(self, live: Machine, final: dict[str, list[bytes]]) -> None:
        """End both services, the backup first, and compare what their directories have."""
        for machine in (self.pair.other(live), live):
            machine.service.terminate()
            if code := machine.service.finish():
                self.report.surprises.append(f"{machine.name} ended with {code}: {machine.service.lines[-20:]}")
        for machine in self.pair.machines:
            with open_broker(f"file:{machine.log}", read_only=True) as broker:
                for topic in TOPICS:
                    self.report.machines_differ += list(values(broker, topic)) != final[topic]

    def _check_followers(self, final: dict[str, list[bytes]], broker: Broker) -> None:
        count, report = sum(map(len, final.values())), self.report
        wait_until(lambda: len(self._lines("reader")) >= count, "the reader does not see everything")
        for topic in TOPICS:
            seen = [value.encode() for name, value in self._lines("reader") if name == topic]
            report.live_differs += seen != final[topic]
        first = final[TOPICS[0]]
        table = {value.decode().partition("/")[0]: value.decode() for value in first}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._table() == table, "the stream does not see everything", 60.0)
        report.stream_differs += self._table() != table
        wait_until(lambda: COPIES in broker.topics(), "the group copies nothing")
        copies = partial(lambda: Counter(values(broker, COPIES)))
        wait_until(lambda: copies().total() >= len(first), "the group does not copy everything")
        report.copies_differ += ((copies() - Counter(first)) + (Counter(first) - copies())).total()
        failed = self.directory / "reader.failed"
        report.failed_reads = failed.read_text().count("\n") if failed.exists() else 0
        for kind, process in self._followers.items():
            assert process.poll() is None, f"the {kind} ended with {process.returncode}"
            process.terminate()
            if process.wait(SECONDS):
                report.surprises.append(f"the {kind} ended with {process.returncode}")

    def _table(self) -> dict[str, str]:
        """The table that the stream built of the first topic."""
        lines = self._lines("stream")
        begun = [index for index, line in enumerate(lines) if line == ["rollback"]]
        self.report.rollbacks = len(begun)
        return {line[0]: line[1] for line in lines[begun[-1] + 1 if begun else 0 :]}

    def _lines(self, kind: str) -> list[list[str]]:
        """The complete lines that a follower wrote, which may not have started yet."""
        path = self.directory / kind
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


@fault(6)
def kill_live(soak: Soak) -> Iterator[None]:
    yield from killed([soak.live()])


@fault(3)
def kill_backup(soak: Soak) -> Iterator[None]:
    yield from killed([soak.pair.other(soak.live())])


@fault(2)
def kill_both(soak: Soak) -> Iterator[None]:
    yield from killed(soak.pair.machines)


def killed(machines: Sequence[Machine]) -> Iterator[None]:
    """Kill services, which are started again after the pause of the round."""
    for machine in machines:
        machine.kill()
    yield


@fault(4)
def pause_live(soak: Soak) -> Iterator[None]:
    """Pause the primary until its lease has ended, and longer."""
    yield from paused(soak.live(), LEASE + soak.random.uniform(0.2, 2.0))


@fault(2)
def pause_backup(soak: Soak) -> Iterator[None]:
    yield from paused(soak.pair.other(soak.live()), MEMBER_TIMEOUT + soak.random.uniform(0.0, 1.0))


@fault(2)
def pause_briefly(soak: Soak) -> Iterator[None]:
    yield from paused(soak.any(), soak.random.uniform(0.1, 1.5))


def paused(machine: Machine, seconds: float) -> Iterator[None]:
    machine.signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
        yield
    finally:
        machine.signal(signal.SIGCONT)


@fault(3)
def cut_link(soak: Soak) -> Iterator[None]:
    yield from broken([machine.link for machine in soak.pair.machines], held=set())


@fault(4)
def half_open_link(soak: Soak) -> Iterator[None]:
    held = soak.random.choice([{"up"}, {"down"}, {"up", "down"}])
    yield from broken([machine.link for machine in soak.pair.machines], held)


@fault(2)
def cut_lock(soak: Soak) -> Iterator[None]:
    """One machine can't reach etcd, or does not hear its answers."""
    yield from broken([soak.any().lock], soak.random.choice([set(), {"up"}, {"down"}]))


@fault(3)
def isolate_live(soak: Soak) -> Iterator[None]:
    """The primary reaches neither the backup nor etcd; clients reach it."""
    live = soak.live()
    yield from broken([live.lock, *(machine.link for machine in soak.pair.machines)], {"up", "down"})


def broken(proxies: Sequence[FaultProxy], held: set[str]) -> Iterator[None]:
    """Hold these directions, or with none refuse connections; then heal and break what was held."""
    for proxy in proxies:
        if held:
            proxy.held |= held
        else:
            proxy.cut()
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.heal()


@fault(2)
def slow_link(soak: Soak) -> Iterator[None]:
    for machine in soak.pair.machines:
        machine.link.delay = soak.random.uniform(0.01, 0.3)
    yield
    for machine in soak.pair.machines:
        machine.link.delay = 0.0


@fault(2)
def pause_lock(soak: Soak) -> Iterator[None]:
    with soak.pair.etcd.paused():
        yield


@fault(2)
def kill_lock(soak: Soak) -> Iterator[None]:
    soak.pair.etcd.kill()
    try:
        yield
    finally:
        soak.pair.etcd.start()


@fault(3)
def fail_sync(soak: Soak) -> Iterator[None]:
    """EIO at each sync of one machine: its service ends once it has something to sync, so it acknowledges nothing."""
    machine = soak.live() if soak.random.random() < 0.7 else soak.any()
    with machine.failing_syncs():
        yield
        if not machine.paused and machine.service.process.poll() is None and machine.serves:
            before = soak.writers.acknowledged()
            code = wait_exit(machine, EXIT_SECONDS)
            if code is None and machine.serves and soak.writers.acknowledged() > before:
                soak.report.surprises.append(f"{machine.name} goes on after a failed sync")


@fault(3)
def fill_disk(soak: Soak) -> Iterator[None]:
    """Nothing is left on a disk, or less than the watermark."""
    disk = soak.any().disk
    disk.fill(soak.random.choice([0, WATERMARK // 2]))
    try:
        yield
    finally:
        disk.free()


@fault(4, alone=True)
def delete_live(soak: Soak) -> Iterator[None]:
    yield from deleted(soak, soak.live())


@fault(1, alone=True)
def delete_backup(soak: Soak) -> Iterator[None]:
    yield from deleted(soak, soak.pair.other(soak.live()))


def deleted(soak: Soak, machine: Machine) -> Iterator[None]:
    """Kill a machine and delete its directory, if the other one has everything, and start it again."""
    facts = soak.pair.other(machine).status()
    machine.kill()
    if facts is not None and bytes.fromhex(facts["store"]) in soak.pair.record().in_sync:
        machine.delete()
    else:
        soak.report.happened["spared"] += 1
    if soak.random.random() < 0.5:
        machine.start()
    yield


@fault(3, alone=True)
def switch(soak: Soak) -> Iterator[None]:
    """A planned switch; it may be refused while something else happens."""
    with contextlib.suppress(Error):
        call(soak.live().address, "SwitchOver", timeout=60.0)
        soak.report.happened["switched"] += 1
    yield


@fault(2)
def kill_writer(soak: Soak) -> Iterator[None]:
    soak.writers.kill()
    yield


def soak(directory: Path, faults: int, seed: int, writers: int = 2, *, mount: bool = True) -> Report:
    with contextlib.closing(Soak(directory, seed, writers, mount=mount)) as running:
        try:
            return running.run(faults)
        except BaseException:
            running.explain()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes are ended and disks unmounted
    print(f"seed {options.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="txnbuffer-pair-soak-") as directory:
        report = soak(Path(directory), options.faults, options.seed, options.writers)
    print(json.dumps(vars(report) | {"good": report.good}))
    return 2 if report.good and report.missing else 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
