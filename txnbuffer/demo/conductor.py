"""Runs the demo: starts a writer and a reader, kills the writer again and again, judges the end."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from broker_io.errors import Error
from txnbuffer.demo.flights import Hour, load_hours
from txnbuffer.demo.reader import follow
from txnbuffer.demo.writer import GROUP, write

PATIENCE = 120.0
"""Seconds without a word from a child after which the demo gives up."""

Narrate = Callable[[str], None]


class DemoFailed(Error):
    """A process of the demo died on its own, or fell silent."""


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
    recovery_seconds_max: float = 0.0
    transactions_per_second: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.lost or self.duplicated or self.uncommitted_seen)


class Child:
    """A forked process that talks to us over a pipe; forking spares loading the year again."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(target, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self, timeout: float = PATIENCE) -> tuple[str, Any]:
        """The next word of the child. Raises DemoFailed if it died or is silent."""
        try:
            if not self._pipe.poll(timeout):
                raise DemoFailed(f"a process of the demo said nothing for {timeout:.0f} s")
            event, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise DemoFailed(f"a process of the demo died with code {self._process.exitcode}") from None
        if event == "failed":
            raise DemoFailed(f"a process of the demo failed: {value}")
        return event, value

    def tell(self, word: str) -> None:
        self._pipe.send(word)

    def kill(self) -> list[tuple[str, Any]]:
        """End the child with SIGKILL and return what it still had said."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        words = []
        try:
            while self._pipe.poll():
                words.append(self._pipe.recv())
        except EOFError:
            pass
        return words

    def stop(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _run(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    try:
        target(pipe, *arguments)
    except Error as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


@dataclass(slots=True)
class Conductor:
    """One run of the demo on an embedded log. `kills` SIGKILLs fall at random points, one of them in recovery.

    `transactions`: only the first so many hours of the year; None for all.
    """

    address: str
    kills: int
    chance: random.Random
    narrate: Narrate
    transactions: int | None = None
    report: Report = field(default_factory=Report)
    reader: Child | None = None
    writing_seconds: float = 0.0
    finished: int = 0

    def run(self) -> Report:
        self.narrate("loading the flights of 2013 …")
        hours = load_hours()[: self.transactions]
        self.narrate(f"{len(hours):,} transactions, one in ten aborted on purpose; {self.kills} kills to come")
        try:
            self._write_all(hours)
            self.narrate("writer done; the reader compares every record with the source …")
            self._take_verdict()
        finally:
            if self.reader is not None:
                self.reader.stop()
        self.report.transactions_per_second = round(self.finished / max(self.writing_seconds, 1e-9), 1)
        return self.report

    def _write_all(self, hours: list[Hour]) -> None:
        """Lives of the writer, each ended by a kill but for the last; the first kill is followed by one in recovery."""
        marks = sorted(self.chance.sample(range(1, len(hours) - GROUP), self.kills - 1))
        self._live(hours, marks.pop(0))
        while not self.report.kills_in_recovery:
            self._live_until_recovery(hours)
        for mark in marks:
            self._live(hours, mark)
        self._live(hours, len(hours) + 1)

    def _live(self, hours: list[Hour], mark: int) -> None:
        """One life of the writer: to a kill once `mark` transactions are finished, or to the end of its work."""
        writer = Child(write, self.address, hours)
        ready_at = time.monotonic()
        try:
            while (word := writer.hear())[0] != "done":
                event, value = word
                if event == "ready":
                    ready_at = time.monotonic()
                    self._recovered(value, hours)
                elif event == "progress":
                    self.finished = value
                    if value >= mark:
                        # The kill falls anywhere in the next group, not at its border.
                        time.sleep(self.chance.uniform(0, 0.02))
                        self._kill(writer)
                        return
        finally:
            self.writing_seconds += time.monotonic() - ready_at
            writer.stop()

    def _live_until_recovery(self, hours: list[Hour]) -> None:
        """A life that ends while the writer recovers, if the kill comes in time."""
        writer = Child(write, self.address, hours)
        try:
            writer.hear()
            time.sleep(self.chance.uniform(0, 0.01))
            self._kill(writer, in_recovery=True)
        finally:
            writer.stop()

    def _kill(self, writer: Child, *, in_recovery: bool = False) -> None:
        words = writer.kill()
        self.report.kills += 1
        # Only a writer that had not come to "ready" died in its recovery.
        caught = in_recovery and all(event != "ready" for event, _ in words)
        self.report.kills_in_recovery += caught
        self.finished = max([self.finished, *(value for event, value in words if event == "progress")])
        where = "in its recovery" if caught else f"after {self.finished:,} transactions"
        self.narrate(f"SIGKILL {self.report.kills}: writer killed {where}")

    def _recovered(self, seconds: float, hours: list[Hour]) -> None:
        if self.reader is None:
            self.reader = Child(follow, self.address, hours)
        self.report.recovery_seconds_max = max(self.report.recovery_seconds_max, round(seconds, 4))
        self.narrate(f"writer recovered in {seconds * 1000:.0f} ms")

    def _take_verdict(self) -> None:
        if self.reader is None:
            raise DemoFailed("no writer came to work")
        self.reader.tell("finish")
        _, verdict = self.reader.hear()
        for name, number in verdict.items():
            setattr(self.report, name, number)
