"""The broker that figures run on: one for all figures, a new one if it is lost, and its log if a figure fails."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from bench.harness import if_it_fails
from broker_io.standalone import StandaloneProcess, is_up

ERRORS, LINE_LENGTH = 8, 300
ERROR = re.compile(r"\bERROR\b|\bFATAL\b|\b[A-Z]\w*(Error|Exception)\b")
USUAL = re.compile(r"\s+at |\s+\.\.\. \d+ more|.*\] (INFO|DEBUG) ")
"""Stack frames, and lines of lower levels: a broker logs exceptions of clients that request missing things."""
VARYING = re.compile(r"^\S+ \[[^]]*\]|\b[0-9a-f]{8,}\b|\d+")
"""The parts in which log lines of one kind differ: time, thread, and all numbers."""


def last_errors(log: str) -> list[str]:
    """The last kinds of errors and exceptions in a broker's log, in the order of their first lines.

    A broker that lost its storage logs thousands of errors of few kinds, so each kind is listed once.
    """
    kinds: dict[str, list[Any]] = {}
    for line in log.splitlines():
        if ERROR.search(line) and not USUAL.match(line):
            kinds.setdefault(VARYING.sub("", line), [0, line])[0] += 1
    last = list(kinds.values())[-ERRORS:]
    return [f"{line[:LINE_LENGTH]}{f'  ({times} times)' if times > 1 else ''}" for times, line in last]


class Brokers:
    """One broker at a time, created by `make` in a directory that is removed with it; a failure keeps its log."""

    def __init__(self, make: Callable[[Path], StandaloneProcess], err: TextIO | None = None) -> None:
        self._make, self._err = make, err
        self._broker: StandaloneProcess | None = None
        self._failed = False
        self._while_starting = 0  # characters of the log of the start, whose errors are ignored

    def current(self) -> StandaloneProcess:
        """The broker for the current figure; a new one if there is none."""
        broker = self._broker or self._started()
        if_it_fails(self.explain)
        return broker

    def explain(self, err: TextIO) -> None:
        """Print the last errors of the broker after a figure failed; drop the broker if it can't store messages."""
        if self._broker is None:
            return
        self._failed = True
        errors = last_errors(self._broker.log()[self._while_starting :]) or ["no errors"]
        print("  errors in the broker's log, each kind once:", *errors, sep="\n    ", file=err, flush=True)
        if not (self._broker.alive and is_up(self._broker.admin)):
            print("  the broker is lost: the remaining figures get a new one", file=err, flush=True)
            self.end()

    def end(self) -> None:
        """End the broker, if there is one, and remove its files, except the console log if a figure failed on it."""
        if self._broker is None:
            return
        broker, self._broker = self._broker, None
        broker.remove()
        directory = broker.output.parent
        if self._failed:
            for path in directory.iterdir():
                if path != broker.output:
                    shutil.rmtree(path, ignore_errors=True)
            self._print(f"  the broker's console log is kept: {broker.output}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        self._failed = False

    def _started(self) -> StandaloneProcess:
        directory = Path(tempfile.mkdtemp(prefix="txnbuffer-bench-"))
        broker = self._make(directory)
        self._print(f"  starting a broker; its console log is {broker.output}")
        self._broker, self._failed = broker, True
        try:
            broker.start()
        except BaseException:
            self.end()
            raise
        self._failed = False
        self._while_starting = len(broker.log())
        return broker

    def _print(self, line: str) -> None:
        print(line, file=self._err or sys.stderr, flush=True)
