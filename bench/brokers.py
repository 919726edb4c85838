"""The broker that figures run on: one for all of them, a fresh one once it is lost, and its log if one failed."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from bench.harness import if_it_fails
from broker_io.testing.standalone import StandaloneProcess, is_up

ERRORS, LINE_LENGTH = 8, 300
ERROR = re.compile(r"\bERROR\b|\bFATAL\b|\b[A-Z]\w*(Error|Exception)\b")
USUAL = re.compile(r"\s+at |\s+\.\.\. \d+ more|.*\] (INFO|DEBUG) ")
"""Frames of a stack, and what is told as no error: a broker names exceptions of those who ask for what is not there."""
VARYING = re.compile(r"^\S+ \[[^]]*\]|\b[0-9a-f]{8,}\b|\d+")
"""What tells one line of a log from another of its kind: time, thread, and all numbers."""


def last_errors(log: str) -> list[str]:
    """Errors and exceptions of a broker's log, the last kinds of them in the order in which they first came.

    A broker without its storage repeats what follows from that, by the thousand, so each kind is told once.
    """
    kinds: dict[str, list[Any]] = {}
    for line in log.splitlines():
        if ERROR.search(line) and not USUAL.match(line):
            kinds.setdefault(VARYING.sub("", line), [0, line])[0] += 1
    told = list(kinds.values())[-ERRORS:]
    return [f"{line[:LINE_LENGTH]}{f'  ({times} times)' if times > 1 else ''}" for times, line in told]


class Brokers:
    """One broker at a time. `make` makes one in a directory, which goes with it; its console log stays if it failed."""

    def __init__(self, make: Callable[[Path], StandaloneProcess], err: TextIO | None = None) -> None:
        self._make, self._err = make, err
        self._broker: StandaloneProcess | None = None
        self._failed = False
        self._while_starting = 0  # characters of the log, whose errors are usual

    def current(self) -> StandaloneProcess:
        """The broker for the figure that is being measured; a fresh one if there is none."""
        broker = self._broker or self._started()
        if_it_fails(self.explain)
        return broker

    def explain(self, err: TextIO) -> None:
        """Print the last errors of the broker after a figure failed; drop the broker if it can't store anything."""
        if self._broker is None:
            return
        self._failed = True
        errors = last_errors(self._broker.log()[self._while_starting :]) or ["no errors"]
        print("  the broker's log says, each kind of error once:", *errors, sep="\n    ", file=err, flush=True)
        if not (self._broker.alive and is_up(self._broker.admin)):
            print("  the broker is lost: the figures that remain get a fresh one", file=err, flush=True)
            self.end()

    def end(self) -> None:
        """End the broker, if there is one, and remove what it made; its console log stays if a figure failed on it."""
        if self._broker is None:
            return
        broker, self._broker = self._broker, None
        broker.remove()
        directory = broker.output.parent
        if self._failed:
            for path in directory.iterdir():
                if path != broker.output:
                    shutil.rmtree(path, ignore_errors=True)
            self._tell(f"  the broker's console log is kept: {broker.output}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        self._failed = False

    def _started(self) -> StandaloneProcess:
        directory = Path(tempfile.mkdtemp(prefix="txnbuffer-bench-"))
        broker = self._make(directory)
        self._tell(f"  a broker is started; what it writes to its console stands in {broker.output}")
        self._broker, self._failed = broker, True
        try:
            broker.start()
        except BaseException:
            self.end()
            raise
        self._failed = False
        self._while_starting = len(broker.log())
        return broker

    def _tell(self, what: str) -> None:
        print(what, file=self._err or sys.stderr, flush=True)
