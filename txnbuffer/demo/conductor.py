"""Runs the demo: service, producers and reader, kills without warning, and the verdict at the end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from txnbuffer.demo.flights import Hour, load_hours
from txnbuffer.demo.processes import PATIENCE, Child, DemoFailed, Service
from txnbuffer.demo.producer import produce
from txnbuffer.demo.reader import follow

PRODUCERS = 2

FIRST = 20
"""Ended transactions after which both topics exist and the reader begins."""

TELL_EVERY = 1000
"""Transactions between two lines about how far it is."""

Narrate = Callable[[str], None]


@dataclass(slots=True)
class Report:
    """What the demo ends with; the three counts that follow `records_read` must be 0."""

    records_expected: int = 0
    records_read: int = 0
    lost: int = 0
    duplicated: int = 0
    uncommitted_seen: int = 0
    kills: int = 0
    kills_in_recovery: int = 0
    producer_kills: int = 0
    recovery_seconds_max: float = 0.0
    transactions_per_second: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.lost or self.duplicated or self.uncommitted_seen)


@dataclass(slots=True)
class Conductor:
    """One run of the demo. `kills` SIGKILLs for the service fall at random points, one of them in recovery.

    One producer is killed as well. `transactions`: only the first so many hours of the year; None for all.
    """

    service: Service
    kills: int
    chance: random.Random
    narrate: Narrate
    transactions: int | None = None
    report: Report = field(default_factory=Report)
    ended: dict[int, str | None] = field(default_factory=dict)
    children: dict[int, Child] = field(default_factory=dict)
    reader: Child | None = None

    def run(self) -> Report:
        self.narrate("loading the flights of 2013 …")
        hours = load_hours()[: self.transactions]
        self.narrate(
            f"{len(hours):,} transactions from {PRODUCERS} processes, one in ten aborted on purpose; "
            f"{self.kills} kills of the service to come, and one of a producer"
        )
        self._start_service()
        try:
            started = time.monotonic()
            self._write_all(hours)
            seconds = time.monotonic() - started
            self.report.transactions_per_second = round(len(self.ended) / seconds, 1)
            self.narrate("all is written; the reader compares every record with the source …")
            self._take_verdict()
        finally:
            for child in (*self.children.values(), *([self.reader] if self.reader else [])):
                child.stop()
            self.service.stop()
        return self.report

    def _write_all(self, hours: list[Hour]) -> None:
        marks = sorted(self.chance.sample(range(FIRST, len(hours) * 9 // 10), self.kills - 1))
        producer_mark = self.chance.randrange(FIRST, len(hours) // 2)
        self.children = {share: self._producer(hours, share) for share in range(PRODUCERS)}
        while self.children:
            self._listen()
            if self.reader is None and len(self.ended) >= FIRST:
                self.reader = Child(follow, self.service.address, hours)
            if marks and len(self.ended) >= marks[0]:
                marks.pop(0)
                # The kill falls anywhere in what is under way, not at the end of a transaction.
                time.sleep(self.chance.uniform(0, 0.02))
                self._kill_service()
                if not self.report.kills_in_recovery:
                    self._kill_in_recovery()
                else:
                    self._start_service()
            if not self.report.producer_kills and len(self.ended) >= producer_mark and self.children:
                self._kill_producer(hours)
        if self.report.kills < self.kills:
            raise DemoFailed(f"the year was over after {self.report.kills} kills: choose fewer, or more transactions")

    def _producer(self, hours: list[Hour], share: int) -> Child:
        return Child(produce, self.service.address, hours, share, PRODUCERS)

    def _listen(self) -> None:
        """Take what the producers say."""
        pipes = {child.pipe: share for share, child in self.children.items()}
        heard = wait(list(pipes), timeout=PATIENCE)
        if not heard:
            raise DemoFailed(f"no producer said anything for {PATIENCE:.0f} s")
        for pipe in heard:
            share = pipes[pipe]  # type: ignore[index]  # wait() gives back what it got
            event, value = self.children[share].hear()
            if event == "done":
                self.children.pop(share).stop()
            else:
                self._take(*value)

    def _take(self, hour: int, txn: str | None) -> None:
        self.ended[hour] = txn or self.ended.get(hour)
        if len(self.ended) % TELL_EVERY == 0:
            self.narrate(f"{len(self.ended):,} transactions have ended")

    def _start_service(self) -> None:
        started = time.monotonic()
        self.service.start()
        self.service.wait_for("serving")
        seconds = time.monotonic() - started
        self.report.recovery_seconds_max = max(self.report.recovery_seconds_max, round(seconds, 3))
        self.narrate(f"service serves {seconds * 1000:.0f} ms after its start")

    def _kill_service(self, where: str = "") -> None:
        self.service.kill()
        self.report.kills += 1
        self.narrate(
            f"SIGKILL {self.report.kills}: service killed {where or f'after {len(self.ended):,} transactions'}"
        )

    def _kill_in_recovery(self) -> None:
        """Start the service, kill it while it recovers, and start it again."""
        self.service.start()
        self.service.wait_for("recovering")
        time.sleep(self.chance.uniform(0, 0.02))
        if self.service.said("serving"):
            return  # it was quicker; the next kill tries again
        self._kill_service("in its recovery")
        self.report.kills_in_recovery += 1
        self._start_service()

    def _kill_producer(self, hours: list[Hour]) -> None:
        share = self.chance.choice(sorted(self.children))
        for event, value in self.children.pop(share).kill():
            if event == "ended":
                self._take(*value)
        self.report.producer_kills += 1
        self.narrate(f"SIGKILL for a producer after {len(self.ended):,} transactions")
        self.children[share] = self._producer(hours, share)

    def _take_verdict(self) -> None:
        if self.reader is None:
            raise DemoFailed("the year was over before the reader began: choose more transactions")
        self.reader.tell(self.ended)
        _, verdict = self.reader.hear(timeout=2 * PATIENCE)
        for name, number in verdict.items():
            setattr(self.report, name, number)
