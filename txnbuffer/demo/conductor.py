"""Conductor of the demo: starts services, producers and the reader, kills processes, and compares the result"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from broker_io.standalone import end_of
from txnbuffer.demo.flights import TOPICS, Hour, load_hours
from txnbuffer.demo.lanes import follow, produce
from txnbuffer.demo.sites import MAX_WAIT, Child, DemoFailed, Site
from txnbuffer.errors import counted

PRODUCERS = 2

FIRST = 20
"""Ended transactions after which both topics exist and the reader starts."""

CHECK_INTERVAL = 0.5
"""Seconds without a message after which the services are checked."""

PROGRESS_TRANSACTIONS = 1000
"""Transactions between two lines of progress."""

FENCED = ("CoordinatorStopped", "Fenced", "OwnershipLost")
"""Errors after which a fenced service is a standby again."""

Narrate = Callable[[str], None]


@dataclass(slots=True)
class Report:
    """The result of the demo; the three counts after `records_read`, and `plain_different`, must be 0."""

    records_expected: int = 0
    records_read: int = 0
    lost: int = 0
    duplicated: int = 0
    uncommitted_seen: int = 0
    plain_records: int | None = None
    """Of them, those that a plain Pulsar reader got, too; None where it gets everything."""
    plain_different: int = 0
    """Places of the log in which it got something else."""
    kills: int = 0
    kills_in_recovery: int = 0
    producer_kills: int = 0
    broker_kills: int = 0
    takeovers: int = 0
    """From a service that nobody killed."""
    recovery_seconds_max: float = 0.0
    transactions_per_second: float = 0.0

    @property
    def good(self) -> bool:
        wrong = self.lost or self.duplicated or self.uncommitted_seen or self.plain_different
        return not wrong and self.plain_records in (None, self.records_expected)


@dataclass(slots=True)
class Conductor:
    """One run of the demo.

    Kills services `kills` times at random moments, once during recovery, the broker of the site, if any, `broker_kills`
    times, and one producer. `transactions`: number of hours of the year to write; None for all.
    """

    site: Site
    kills: int
    broker_kills: int
    chance: random.Random
    narrate: Narrate
    transactions: int | None = None
    report: Report = field(default_factory=Report)
    ended: dict[int, str | None] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)
    reader: Child | None = None

    def run(self) -> Report:
        self.narrate("loading the flights of 2013 …")
        hours = load_hours(self.transactions)
        of_broker = f", {self.broker_kills} of the broker" if self.broker_kills else ""
        self.narrate(
            f"{len(hours):,} transactions from {PRODUCERS} processes, one in ten aborted on purpose; "
            f"{self.kills} kills of the service{of_broker}, and one of a producer will follow"
        )
        try:
            self.site.start()
            started = time.monotonic()
            self.site.succeed()
            self._take_over(started)
            started = time.monotonic()
            self._write_all(hours)
            seconds = time.monotonic() - started
            self.report.transactions_per_second = round(len(self.ended) / seconds, 1)
            self.narrate("all transactions are written; the reader compares every record with the input …")
            self._compare()
        finally:
            for child in (*self.children.values(), *([self.reader] if self.reader else [])):
                child.stop()
            self.site.stop()
        return self.report

    def _write_all(self, hours: list[Hour]) -> None:
        after = self.kills - self.site.killed_in_recovery  # all but the one during a recovery
        marks = sorted(self.chance.sample(range(FIRST, len(hours) * 9 // 10), after))
        broker_marks = sorted(self.chance.sample(range(FIRST, len(hours) * 9 // 10), self.broker_kills))
        producer_mark = self.chance.randrange(FIRST, len(hours) // 2)
        self.children = {share: self._producer(hours, share) for share in range(PRODUCERS)}
        while self.children:
            self._receive()
            if self.reader is None and len(self.ended) >= FIRST:
                self.reader = Child(follow, self.site.connect_arguments(), hours)
            if broker_marks and len(self.ended) >= broker_marks[0]:
                broker_marks.pop(0)
                self._kill_broker()
            if marks and len(self.ended) >= marks[0]:
                marks.pop(0)
                # The delay lets the kill fall anywhere in the open transactions, not at the end of one.
                time.sleep(self.chance.uniform(0, 0.02))
                self._kill_service()
                self._recover()
            if not self.report.producer_kills and len(self.ended) >= producer_mark and self.children:
                self._kill_producer(hours)
            self._check_services()
        if self.report.kills < self.kills or broker_marks:
            raise DemoFailed(
                f"the input ended after {counted(self.report.kills, 'kill')}: choose fewer kills or more transactions"
            )

    def _producer(self, hours: list[Hour], share: int) -> Child:
        return Child(produce, self.site.connect_arguments(), hours, share, PRODUCERS)

    def _receive(self) -> None:
        """Receive the messages of the producers."""
        pipes = {child.pipe: share for share, child in self.children.items()}
        deadline = time.monotonic() + MAX_WAIT
        while not (heard := wait(list(pipes), timeout=CHECK_INTERVAL)):
            self._check_services()
            if time.monotonic() > deadline:
                raise self.site.serving.failed(f"ended no transaction for {MAX_WAIT:.0f} s")
        for pipe in heard:
            share = pipes[pipe]  # type: ignore[index]  # wait() returns the pipes that it got
            event, value = self.children[share].receive()
            if event == "done":
                self.children.pop(share).stop()
            else:
                self._take(*value)

    def _take(self, hour: int, txn: str | None) -> None:
        self.ended[hour] = txn or self.ended.get(hour)
        if len(self.ended) % PROGRESS_TRANSACTIONS == 0:
            self.narrate(f"{len(self.ended):,} transactions have ended")

    def _check_services(self) -> None:
        """Switch to the service that took over without a kill; the other one is the standby then."""
        if self.site.broker is not None and not self.site.broker.alive:
            raise DemoFailed(f"the broker ended on its own:\n{end_of(self.site.broker.log())}")
        if self.site.serving.serves:
            return
        if not any(self.site.serving.said("failed", kind=kind) for kind in FENCED):
            if self.site.serving.runs:
                return
            raise self.site.serving.failed("ended on its own")
        self.report.takeovers += 1
        self.site.succeed()
        self.narrate("the active service was fenced, and one of the two has taken over")
        self._take_over(None)

    def _take_over(self, since: float | None) -> None:
        """Wait until the active service serves; `since` is the start of its recovery."""
        self.site.serving.wait_for("serving")
        if since is not None:
            seconds = time.monotonic() - since
            self.report.recovery_seconds_max = max(self.report.recovery_seconds_max, round(seconds, 3))
            since_what = self.site.since if self.report.kills else "its start"
            self.narrate(f"service serves {seconds * 1000:.0f} ms after {since_what}")
        if done := self.site.reinforce():
            self.narrate(done)

    def _kill_service(self, where: str = "") -> None:
        self.site.serving.kill()
        self.report.kills += 1
        self.narrate(
            f"SIGKILL {self.report.kills}: service killed {where or f'after {len(self.ended):,} transactions'}"
        )

    def _recover(self) -> None:
        """Start the next service; kill one of them during its recovery."""
        since = time.monotonic()
        self.site.succeed()
        if self.site.killed_in_recovery and not self.report.kills_in_recovery:
            self.site.serving.wait_for("recovering")
            time.sleep(self.chance.uniform(0, 0.02))
            if not self.site.serving.said("serving"):  # else it recovered faster; the next kill tries again
                self._kill_service("in its recovery")
                self.report.kills_in_recovery += 1
                since = time.monotonic()
                self.site.succeed()
        self._take_over(since)

    def _kill_broker(self) -> None:
        if self.site.broker is None:
            return
        self.site.broker.kill()
        self.report.broker_kills += 1
        self.narrate(f"SIGKILL for the broker after {len(self.ended):,} transactions")
        started = time.monotonic()
        self.site.broker.start()
        self.narrate(f"the broker is running again after {time.monotonic() - started:.0f} s")

    def _kill_producer(self, hours: list[Hour]) -> None:
        share = self.chance.choice(sorted(self.children))
        for event, value in self.children.pop(share).kill():
            if event == "ended":
                self._take(*value)
        self.report.producer_kills += 1
        self.narrate(f"SIGKILL for a producer after {len(self.ended):,} transactions")
        self.children[share] = self._producer(hours, share)

    def _compare(self) -> None:
        if self.reader is None:
            raise DemoFailed("the input ended before the reader started: choose more transactions")
        self.reader.send(self.ended)
        _, counts = self.reader.receive(timeout=2 * MAX_WAIT)
        for name, number in counts.items():
            setattr(self.report, name, number)
        if plain := self.site.check_plain(TOPICS):
            self.report.plain_records = sum(one.records for one in plain)
            self.report.plain_different = sum(one.different for one in plain)
