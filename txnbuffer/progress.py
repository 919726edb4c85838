"""Progress of operations that may take seconds: a value for callbacks, and a bar for terminals and notebooks

Operations that may take more than two seconds report `Progress` values to a callback. A client reports the opening of
its log to the one that `connect` gets; `reporting` sets one for all that runs in a block:

    def show(progress: Progress) -> None:
        print(progress)

    with connect("file:data", progress=show) as client: ...

    with reporting(show):
        check_backup("log.backup")

The callback is called at the start of an operation, then at most every `INTERVAL` seconds, and at its end, when `done`
and `total` are equal. It may be called in another thread than that of its caller, and should return quickly. If it
raises an exception, the operation stops, and raises it.

`progress_bar()` returns a callback that shows a bar.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from broker_io.environment import current

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

INTERVAL = 0.1
"""Minimum seconds between two calls of a callback, except for the last one of an operation."""
SHOWN_AFTER = 0.5
"""Seconds after which a bar shows an operation; shorter ones are not shown."""
BYTES = "bytes"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is.

    `operation` says what is done and with what, such as "recovery of orders". `done` of `total` are counted in `unit`,
    such as "bytes" or "records"; `total` is None while it is unknown, and may change. `seconds` have passed since the
    start of the operation.
    """

    operation: str
    done: int
    total: int | None
    unit: str
    seconds: float

    @property
    def amount(self) -> str:
        """The numbers as text: `1,200 of 5,000 records`."""
        if self.unit == BYTES:
            return _size(self.done) if self.total is None else f"{_size(self.done)} of {_size(self.total)}"
        return f"{self.done:,} {self.unit}" if self.total is None else f"{self.done:,} of {self.total:,} {self.unit}"

    def __str__(self) -> str:
        return f"{self.operation}: {self.amount}, {self.seconds:.0f} s"


OnProgress: TypeAlias = Callable[[Progress], object]


_callback: ContextVar[OnProgress | None] = ContextVar("progress", default=None)


@contextmanager
def reporting(on_progress: OnProgress | None) -> Iterator[None]:
    """Report the progress of all operations in a block, and in the threads and tasks that it starts, to a callback.

    None leaves the callback as it is.
    """
    token = _callback.set(_callback.get() if on_progress is None else on_progress)
    try:
        yield
    finally:
        _callback.reset(token)


def is_reported() -> bool:
    """Whether the running code has a callback, so that the total of an operation is worth a request."""
    return _callback.get() is not None


def report(operation: str, unit: str, total: int | None = None) -> ProgressReporter:
    """A reporter of one operation to the callback of the running code."""
    return ProgressReporter(_callback.get(), operation, unit, total)


class ProgressReporter:
    """Calls a callback with the progress of one operation; a context manager whose end without an error is the end.

    Without a callback it does nothing.
    """

    def __init__(self, on_progress: OnProgress | None, operation: str, unit: str, total: int | None = None) -> None:
        self.done = 0
        self._on_progress = on_progress
        self._operation, self._unit, self._total = operation, unit, total
        self._clock = current().clock
        self._began = self._next = self._clock.monotonic()

    def update(self, done: int, total: int | None = None) -> None:
        """Report that `done` units are done; `total` replaces the known total."""
        self.done = done
        if total is not None:
            self._total = total
        now = self._clock.monotonic()
        if now >= self._next:
            self._next = now + INTERVAL
            self._call(self._total if self._total is None else max(self._total, done), now)

    def advance(self, units: int = 1) -> None:
        """Report that `units` more are done."""
        self.update(self.done + units)

    def __enter__(self) -> Self:
        self.update(self.done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done = max(self.done, self._total or 0)
            self._call(self.done, self._clock.monotonic())

    def _call(self, total: int | None, now: float) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self._operation, self.done, total, self._unit, now - self._began))


class ProgressBar:
    """A callback that shows one bar for each operation, in a notebook or on stderr, and removes it at the end.

    `close` removes the bars of operations that failed, which do not report their end; so does the end of a `with`
    block. Without a terminal and outside a notebook nothing is shown, and `shows` is False.
    """

    def __init__(self) -> None:
        self._display: _TerminalBars | _NotebookBars | None
        if _in_notebook():
            self._display = _NotebookBars()
        else:
            self._display = _TerminalBars() if sys.stderr is not None and sys.stderr.isatty() else None

    @property
    def shows(self) -> bool:
        return self._display is not None

    def __call__(self, progress: Progress) -> None:
        if self._display is None:
            return
        if progress.done == progress.total:
            self._display.remove(progress)
        elif progress.seconds >= SHOWN_AFTER:
            self._display.show(progress)

    def close(self) -> None:
        """Remove all bars."""
        if self._display is not None:
            self._display.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def progress_bar() -> ProgressBar:
    """A callback that shows progress as a bar, on stderr if it is a terminal, or in the notebook that runs the code."""
    return ProgressBar()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class _TerminalBars:
    """Bars on stderr; what is printed to stderr meanwhile appears above them."""

    def __init__(self) -> None:
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, progress: Progress) -> None:
        bars = self._bars
        if bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
            # Without a thread of its own, and without redirecting stdout, which may be a file.
            bars = self._bars = RichProgress(
                *columns,
                console=Console(stderr=True, color_system=None if os.environ.get("NO_COLOR") else "auto"),
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
            )
            bars.start()
        task = self._tasks.get(progress.operation)
        if task is None:
            task = self._tasks[progress.operation] = bars.add_task("", numbers="")
        numbers = f"{progress.amount}, {progress.seconds:.0f} s"
        bars.update(
            task, description=progress.operation, completed=progress.done, total=progress.total, numbers=numbers
        )
        bars.refresh()

    def remove(self, progress: Progress) -> None:
        task = self._tasks.pop(progress.operation, None)
        if self._bars is None or task is None:
            return
        self._bars.remove_task(task)
        if not self._tasks:
            self.close()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._tasks.clear()


class _NotebookBars:
    """Outputs of a notebook cell, which are updated; after the end they show the final numbers."""

    def __init__(self) -> None:
        self._outputs: dict[str, Any] = {}

    def show(self, progress: Progress) -> None:
        output = self._outputs.get(progress.operation)
        if output is not None:
            output.update(_NotebookBar(progress))
            return
        display = importlib.import_module("IPython.display").display
        self._outputs[progress.operation] = display(_NotebookBar(progress), display_id=True)

    def remove(self, progress: Progress) -> None:
        output = self._outputs.pop(progress.operation, None)
        if output is not None:
            output.update(_NotebookBar(progress))

    def close(self) -> None:
        self._outputs.clear()


@dataclass(frozen=True, slots=True)
class _NotebookBar:
    """What a notebook shows: a bar in the browser, and one line of text elsewhere."""

    progress: Progress

    def __repr__(self) -> str:
        return str(self.progress)

    def _repr_html_(self) -> str:
        from html import escape

        one = self.progress
        total = "" if one.total is None else f' value="{one.done}" max="{one.total or 1}"'
        return f"<div>{escape(one.operation)} <progress{total}></progress> {one.amount}, {one.seconds:.0f} s</div>"


def _size(count: int) -> str:
    """Bytes as a short text: `1.5 MB`."""
    size = float(count)
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
