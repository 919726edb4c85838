"""A directory of exported records as Parquet files: what it holds, and how far that goes (as a Delta table: `delta`).

An export of all versions is a table that grows by one directory a run, which any reader of Parquet understands:

    DIR/run=1/part-….parquet, _run.json
    DIR/run=2/…

An export of the latest values is replaced as a whole; who reads reads DIR/latest:

    DIR/latest              symbolic link to the run that counts
    DIR/runs/7/part-….parquet, _run.json
    DIR/runs/6/…            the one before, for those who read it still

Who reads in several steps (list the files, then open them) follows the link once, as a run may end between two steps.
A replaced run is removed when the next but one begins, unless a process holds a shared lock (flock) of its `_run.json`.

In DIR/_export stand `lock`, held by the process that exports, and `writing-HOST-9f3c…`, what a run has written that has
not ended; each has its own, for tasks may write on for a moment when their driver was killed. A run is written there,
synced, and counts by one rename: of its directory to `run=N`, or of the link. So the records and how far they go are
there together, or neither is.

`_run.json` is a JSON object whose keys are sorted:

    {"columns": ["topic", "position", …], "kind": "versions", "offset": {…}, "records": 4711, "run": 2, "version": 1}

`kind` is versions or latest; `offset` is how far each topic is exported, in the form of `pipeline.offsets`; `records`
is how many the run holds; `run` counts from 1. `rows`, which runs of a Delta table have, is how many rows the table
holds with the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker_io.environment import SystemDisk
from broker_io.errors import EnvironmentFault, InvalidAddress, StorageError
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = 1
VERSIONS, LATEST = "versions", "latest"
RUN_FILE = "_run.json"
DELTA_LOG = "_delta_log"
ATTEMPTS = 5
"""So often a run is looked for that is not removed before one can hold it."""
STALE_SECONDS = 7 * 24 * 3600.0
"""Seconds after which what another host has written without an end has none any more: a lock may not reach so far."""

_RUN = re.compile(r"run=([1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_LITERAL = str.maketrans({sign: "\\" + sign for sign in "\\*?[]{}"})


class UnreadableExport(StorageError):
    """What a directory holds is no export that this release understands."""


class ExportFailed(EnvironmentFault):
    """The directory of an export could not be written; what counted before counts on."""


class ExportLocked(EnvironmentFault):
    """Another process exports to the same directory."""


@dataclass(frozen=True, slots=True)
class ExportRun:
    """One run of an export: see the head of this module."""

    number: int
    kind: str
    columns: tuple[str, ...]
    offset: Offset
    records: int
    rows: int | None = None

    def encode(self) -> bytes:
        found: dict[str, Any] = {
            "columns": [*self.columns],
            "kind": self.kind,
            "offset": self.offset.to_json(),
            "records": self.records,
            "run": self.number,
            "version": VERSION,
        }
        if self.rows is not None:
            found["rows"] = self.rows
        return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def decode(cls, path: str, data: bytes) -> ExportRun:
        """Raises UnreadableExport that names the file."""
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise ValueError(f"it is of version {found['version']!r}")
            if found["kind"] not in (VERSIONS, LATEST):
                raise ValueError(f"it is of kind {found['kind']!r}")
            offset, rows = Offset.of_json(found["offset"]), found.get("rows")
            numbers = int(found["run"]), int(found["records"]), None if rows is None else int(rows)
            return cls(numbers[0], found["kind"], tuple(found["columns"]), offset, *numbers[1:])
        except (InvalidRequest, KeyError, TypeError, ValueError) as error:
            raise UnreadableExport(
                f"{path} can't be read ({error}): use the release that wrote it, or export to another directory"
            ) from None


class ExportDirectory:
    """An export of one kind at a path; nothing is made before `locked`."""

    def __init__(self, path: str, kind: str) -> None:
        self.path = local_path(path)
        self.kind = kind
        self._own = os.path.join(self.path, "_export", f"writing-{platform.node()}-")
        self.writing = self._unwritten()

    def last(self) -> ExportRun | None:
        """The last run that counts; None if there is none. Raises UnreadableExport, InvalidRequest for another kind."""
        if os.path.isdir(os.path.join(self.path, DELTA_LOG)):
            raise InvalidRequest(f"{self.path} is a Delta table: export in that format, or to another directory")
        if self.kind == VERSIONS and os.path.lexists(os.path.join(self.path, LATEST)):
            raise InvalidRequest(f"{self.path} holds latest values: export all versions to another directory")
        numbers = self._numbers()
        if self.kind == LATEST and numbers:
            raise InvalidRequest(f"{self.path} holds all versions: export latest values to another directory")
        where = self.table if self.kind == LATEST else self._run_path(max(numbers, default=1))
        if self.kind == LATEST and os.path.lexists(where) and not os.path.isdir(where):
            raise UnreadableExport(f"{where} leads to no run of an export: put that back, or export elsewhere")
        run = read_run(where) if os.path.isdir(where) else None
        if run is not None and run.kind != self.kind:
            raise UnreadableExport(f"{where} is no export of {self.kind}, which its place says")
        return run

    @property
    def table(self) -> str:
        """What a reader reads."""
        return self.path if self.kind == VERSIONS else os.path.join(self.path, LATEST)

    def frame(self, spark: SparkSession, run: ExportRun) -> DataFrame:
        """What the export holds up to a run, which of the latest values has to be there still: see `reading`."""
        if self.kind == VERSIONS:
            return spark.read.parquet(literal(self.table)).where(f"run <= {run.number}")
        return spark.read.parquet(literal(self._replacing(run)))

    def files(self, run: ExportRun) -> list[str]:
        """The Parquet files of `frame`, in the order in which they were exported."""
        if self.kind == VERSIONS:
            runs = [self._run_path(number) for number in sorted(self._numbers()) if number <= run.number]
        else:
            runs = [self._replacing(run)]
        return [os.path.join(path, name) for path in runs for name in sorted(os.listdir(path)) if name[0] not in "._"]

    @contextmanager
    def reading(self) -> Iterator[ExportRun | None]:
        """The last run, whose files stay until the end of the block; None if there is none. Raises as `last`."""
        with ExitStack() as held:
            for _ in range(ATTEMPTS):
                run = self.last()
                if run is None or self.kind == VERSIONS or self._hold(self._replacing(run), held):
                    yield run
                    return
            raise UnreadableExport(f"{self.table} leads to no run, or is replaced all the time: try again")

    def _hold(self, path: str, held: ExitStack) -> bool:
        """Keep a run from being removed; False if it was removed meanwhile."""
        name = os.path.join(path, RUN_FILE)
        try:
            file = held.enter_context(open(name, "rb"))  # noqa: SIM115  # the stack closes it
        except FileNotFoundError:
            return False
        fcntl.flock(file, fcntl.LOCK_SH)
        return os.path.exists(name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory and keep other exporters out. Raises ExportLocked, ExportFailed."""
        with self.writable():
            os.makedirs(os.path.join(self.path, "_export"), exist_ok=True)
            lock = SystemDisk().lock(os.path.join(self.path, "_export", "lock"))
        if lock is None:
            raise ExportLocked(f"another process exports to {self.path}: wait for it, or end it")
        with closing(lock):
            yield

    def clear(self) -> None:
        """Remove what runs left that never counted, and keep the next one apart from what they write still.

        Raises InvalidRequest, UnreadableExport where something else stands than an export, of which nothing is removed.
        """
        last = self.last()
        if self.kind == LATEST and last is not None and not os.path.islink(self.table):
            raise InvalidRequest(
                f"{self.table} is no link to one of the runs, as in a copy that followed it: copy links as such, or "
                f"export to another directory"
            )
        if self.kind == VERSIONS and last is None and (strange := foreign(self.path)):
            raise InvalidRequest(
                f"{strange} is no part of an export, and readers of {self.path} would take it for one: export to a "
                f"directory that holds nothing else"
            )
        replaced = self._replaced(last)
        self._remove_written()
        with self.writable():
            for path in replaced:
                remove_unread(path, self.writing)

    def _remove_written(self) -> None:
        there = os.path.dirname(self.writing)
        for one in os.scandir(there) if os.path.isdir(there) else ():
            if one.name.startswith("writing-") and (one.path.startswith(self._own) or _is_stale(one)):
                shutil.rmtree(one.path, ignore_errors=True)
        self.writing = self._unwritten()

    def _unwritten(self) -> str:
        return f"{self._own}{uuid.uuid4().hex}"

    def publish(self, run: ExportRun) -> ExportRun:
        """What is in `writing` counts from here on, as a run. Raises ExportFailed."""
        with self.writable():
            self._publish(run)
        return run

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Raise what the system says of files here as ExportFailed."""
        try:
            yield
        except OSError as error:
            raise ExportFailed(
                f"{error.filename or self.path} can't be written: {error.strerror or error}; mend that and export "
                f"again, which goes on with what counts"
            ) from error

    def _publish(self, run: ExportRun) -> None:
        with open(os.path.join(self.writing, RUN_FILE), "wb") as file:
            file.write(run.encode())
        for directory, _, files in os.walk(self.writing, topdown=False):
            for name in files:
                sync(os.path.join(directory, name))
            sync(directory)
        if self.kind == VERSIONS:
            os.rename(self.writing, self._run_path(run.number))
            sync(self.path)
            return
        runs = os.path.join(self.path, "runs")
        os.makedirs(runs, exist_ok=True)
        os.rename(self.writing, os.path.join(runs, str(run.number)))
        sync(runs)
        link = os.path.join(self.path, "_export", "link")
        if os.path.lexists(link):
            os.remove(link)
        os.symlink(os.path.join("runs", str(run.number)), link)
        os.replace(link, self.table)
        sync(self.path)

    def _numbers(self) -> list[int]:
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return [int(found[1]) for found in map(_RUN.fullmatch, names) if found]

    def _replaced(self, last: ExportRun | None) -> list[str]:
        """Directories of runs of the latest values that don't count any more. Raises UnreadableExport."""
        runs = os.path.join(self.path, "runs")
        if self.kind != LATEST or not os.path.isdir(runs):
            return []
        numbers = {int(name) for name in os.listdir(runs) if _NUMBER.fullmatch(name)}
        found = [os.path.join(runs, str(number)) for number in numbers - ({last.number} if last else set())]
        for path in found:  # all of them before one is removed
            read_run(path)
        return found

    def _run_path(self, number: int) -> str:
        return os.path.join(self.path, f"run={number}")

    def _replacing(self, run: ExportRun) -> str:
        """The directory that the link leads to as long as this run is the last."""
        return os.path.join(self.path, "runs", str(run.number)) if os.path.islink(self.table) else self.table


def read_run(directory: str) -> ExportRun:
    """The run that a directory holds. Raises UnreadableExport."""
    path = os.path.join(directory, RUN_FILE)
    try:
        with open(path, "rb") as file:
            return ExportRun.decode(path, file.read())
    except FileNotFoundError:
        raise UnreadableExport(f"{path} is missing: {directory} was not written by an export, or not whole") from None


def _is_stale(written: os.DirEntry[str]) -> bool:
    """Whether what another process writes has not grown for long."""
    with suppress(FileNotFoundError):
        return time.time() - written.stat().st_mtime > STALE_SECONDS
    return False


def remove_unread(path: str, aside: str) -> None:
    """Remove a run, unless somebody is `reading` it; it is whole, or `aside`, where nobody takes it for a run."""
    with open(os.path.join(path, RUN_FILE), "r+b") as file:  # NFS locks only what one may write
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.rename(path, aside)
        shutil.rmtree(aside)


def foreign(directory: str) -> str | None:
    """A file that readers of a directory see, if there is any; what begins with `_` or `.` they pass over."""
    for place, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name[0] not in "._")
        if seen := sorted(name for name in files if name[0] not in "._"):
            return os.path.join(place, seen[0])
    return None


def local_path(path: str) -> str:
    """A path of this machine. Raises InvalidAddress for anything else."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme == "file":
        path = "/" + rest.lstrip("/") if rest.startswith("//") else rest
    elif colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme):
        raise InvalidAddress(
            f"{path} is no directory: exports go to one that all tasks have under the same name, as they count by a "
            f"rename, which {scheme}: does not have"
        )
    if not path:
        raise InvalidAddress("an export needs the name of a directory")
    return os.path.abspath(path)


def literal(path: str) -> str:
    """A path as Spark's readers take it: to them a name is a pattern, which may match other directories next to it."""
    return path.translate(_LITERAL)


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
