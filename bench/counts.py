"""Counts of what a process does, without a clock: calls, syncs, iterations of the event loop, frames.

Counted from `install` on, in all threads of the process: calls of Python functions (a coroutine that continues counts
as a call of it, as the interpreter reports it) and of C functions, syncs of a file that was written to since its last
one, iterations of event loops, and frames that a client sends and awaits. What this module itself calls is left out.

The counts are in a file, so that another process can read them: `python -m bench.counts FILE ARGUMENTS` runs `txnbuf`
with ARGUMENTS and counts in FILE, and `python -m bench.counts --syncs FILE ARGUMENTS` counts syncs alone, which takes
no time: `SyncCounts` reads them. In counted rounds the timers of both processes take SLOWER times as long: otherwise a
slow machine would do more often what happens once a second.
"""

from __future__ import annotations

import asyncio
import atexit
import mmap
import os
import selectors
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from broker_io.system import SystemClock, SystemFile

NAMES = ("python", "c", "syncs", "iterations", "frames")
PATH_NAMES = ("modules", "functions")
PYTHON, C, SYNCS, ITERATIONS, FRAMES, SLOW = range(len(NAMES) + 1)
ROUNDS = 5
SLOWER = 1000
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
PRODUCT = tuple(ROOT + package + os.sep for package in ("txnbuffer", "snapshots", "broker_io"))
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
IN_FUNCTIONS = 1
"""The flag of code that runs as a function: neither a module nor the body of a class."""


def _cells(path: str) -> memoryview:
    with open(path, "r+b") as file:
        file.truncate(8 * (SLOW + 1))
        return memoryview(mmap.mmap(file.fileno(), 8 * (SLOW + 1))).cast("Q")


class SyncCounts:
    """The syncs of one process: of this one after `install`, or of a service that counts them in the file `path`."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._directory.name, "counts")
        with open(self.path, "xb"):
            pass
        self._cells = _cells(self.path)

    def install(self) -> None:
        _count_syncs(self._cells)

    @property
    def count(self) -> int:
        return self._cells[SYNCS]


class Counts:
    """The counts of this process, and of services that count in its files, in rounds of the same work.

    Work calls `round` with the number of the round that begins. Rounds from 1 to ROUNDS are counted; in the one after
    them the functions are collected that this process enters.
    """

    def __init__(self) -> None:
        self.entered: set[CodeType] | None = None
        self._directory = tempfile.TemporaryDirectory()
        self._all: list[memoryview] = []
        self._number = 0
        self._before: list[int] = []
        self._rounds: list[list[int]] = []
        self._path: set[CodeType] = set()
        _install(self.new_file(), self)

    def new_file(self) -> str:
        """A new file for the counts of a service, which are added to those of this process."""
        path = os.path.join(self._directory.name, f"{len(self._all)}")
        with open(path, "xb"):
            pass
        self._all.append(_cells(path))
        return path

    def round(self, number: int) -> None:
        """End the current round, if there is one, and begin another."""
        self.end()
        self._number = number
        self.slow_timers(slow=number > 0)
        if number > ROUNDS:
            self.entered = self._path
        self._before = self._sums()

    def end(self) -> None:
        """End the current round."""
        number, self._number = self._number, 0
        if 0 < number <= ROUNDS:
            self._rounds.append([after - before for after, before in zip(self._sums(), self._before, strict=True)])
        if number > ROUNDS:
            self.entered = None
            self.slow_timers(slow=False)

    def results(self, pieces: int) -> dict[str, float]:
        """The median of the rounds for each of `pieces` of work; how many modules and functions it enters."""
        columns = zip(NAMES, zip(*self._rounds, strict=True), strict=True)
        found = {
            (code.co_filename, code.co_qualname)
            for code in self._path
            if code.co_flags & IN_FUNCTIONS
            and code.co_name not in COMPREHENSIONS
            and code.co_filename.startswith(PRODUCT)
        }
        medians = {name: statistics.median(column) / pieces for name, column in columns}
        return {**medians, "modules": len({module for module, _ in found}), "functions": len(found)}

    def slow_timers(self, *, slow: bool = True) -> None:
        """Let timers take SLOWER times as long from now on, or their own time."""
        for cells in self._all:
            cells[SLOW] = slow

    def _sums(self) -> list[int]:
        return [sum(cells[number] for cells in self._all) for number in range(len(NAMES))]


def _install(path: str, counts: Counts | None = None) -> None:
    """Count in a file from now on; call it before the first event loop and the first thread."""
    cells = _cells(path)
    this = _install.__code__.co_filename

    def profile(frame: FrameType, event: str, _: object) -> None:
        # Python 3.11 switches threads at calls and jumps back only, so that no count is lost between read and write.
        code = frame.f_code
        if code.co_filename == this:
            return
        if event == "call":
            cells[PYTHON] += 1
            if counts is not None and counts.entered is not None:
                counts.entered.add(code)
        elif event == "c_call":
            cells[C] += 1

    _count_syncs(cells)
    _count_iterations(cells)
    _count_frames(cells)
    threading.setprofile(profile)
    sys.setprofile(profile)
    atexit.register(sys.setprofile, None)


def _count_syncs(cells: memoryview) -> None:
    write, sync, written = SystemFile.write, SystemFile.sync, set[int]()

    def counted_write(file: SystemFile, offset: int, chunks: Any) -> None:
        written.add(id(file))
        write(file, offset, chunks)

    def counted_sync(file: SystemFile) -> None:
        if id(file) in written:
            written.discard(id(file))
            cells[SYNCS] += 1
        sync(file)

    replaced: Any = SystemFile
    replaced.write, replaced.sync = counted_write, counted_sync


def _count_iterations(cells: memoryview) -> None:
    """Count iterations of asyncio's loops, each of which asks its selector once, and slow their timers down."""
    real = selectors.DefaultSelector
    last = now = time.monotonic()

    def slowed(_: object) -> float:
        nonlocal last, now
        before, last = last, time.monotonic()
        now += (last - before) / (SLOWER if cells[SLOW] else 1)
        return now

    class CountedSelector(real):  # type: ignore[misc, valid-type]  # the class of this machine
        def select(self, timeout: float | None = None) -> Any:
            cells[ITERATIONS] += 1
            return super().select(timeout * SLOWER if timeout and cells[SLOW] else timeout)

    replaced: Any = selectors
    replaced.DefaultSelector = CountedSelector
    for clock, name in ((asyncio.BaseEventLoop, "time"), (SystemClock, "monotonic")):
        setattr(clock, name, slowed)


def _count_frames(cells: memoryview) -> None:
    from broker_io.rpc.channel import MessageStream
    from txnbuffer.client.session.embedded import EngineStreamLink
    from txnbuffer.service.door.connection import SessionConnection

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            cells[FRAMES] += getattr(arguments[0], "local", True)  # others are counted where the client is
            return method(*arguments)

        return call

    streams = [(kind, name) for kind in (MessageStream, EngineStreamLink) for name in ("send", "receive")]
    for kind, name in [*streams, (SessionConnection, "receive"), (SessionConnection, "take")]:
        setattr(kind, name, counted(getattr(kind, name)))


if __name__ == "__main__":
    from txnbuffer.cli import main

    syncs_only = sys.argv[1] == "--syncs"
    file, *sys.argv[1:] = sys.argv[1 + syncs_only :]
    if syncs_only:
        _count_syncs(_cells(file))
    else:
        _install(file)
    main()
