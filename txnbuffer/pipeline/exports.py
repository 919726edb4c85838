"""An export as a directory of Parquet files, with the position reached in each topic.

An export of all versions is a table that grows by one directory per run, readable by any reader of Parquet:

    DIR/run=1/part-….parquet, _run.json
    DIR/run=2/…

An export of the latest values is replaced as a whole; readers open DIR/latest:

    DIR/latest              symbolic link to the last run
    DIR/runs/7/part-….parquet, _run.json
    DIR/runs/6/…            the previous run, for readers that still use it

A reader with several steps (list the files, then open them) resolves the link once, as a run may end between two steps.
A replaced run is removed when the run after the next begins, unless a process holds a shared lock (flock) of its
`_run.json`.

DIR/_export contains `lock`, held by the exporting process, and `writing-HOST-9f3c…`, the files of an unfinished run.
Each run has a directory of its own, as tasks may continue to write for a moment after their driver was killed. A run is
written there, synced, and published by one rename: of its directory to `run=N`, or of the link. So records and
positions are published together.

`_run.json` is a JSON object whose keys are sorted:

    {"columns": ["topic", "position", …], "kind": "versions", "offset": {…}, "records": 4711, "run": 2, "version": 1}

`kind` is versions or latest; `offset` is the position reached in each topic, in the form of `pipeline.offsets`;
`records` is the number of records in the run; `run` counts from 1. Runs of a Delta table also have `rows`, the number
of rows in the table after the run.
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

from broker_io.environment import current
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
"""Attempts to lock the last run before another process replaces it."""
STALE_SECONDS = 7 * 24 * 3600.0
"""An unfinished run of another host is removed after this time without changes: locks may not work across hosts."""

_RUN = re.compile(r"run=([1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_LITERAL = str.maketrans({sign: "\\" + sign for sign in "\\*?[]{}"})


class UnreadableExport(StorageError):
    """A directory does not contain an export that this release can read."""


class ExportFailed(EnvironmentFault):
    """The directory of an export can't be written; published runs are unchanged."""


class ExportLocked(EnvironmentFault):
    """Another process exports to the same directory."""


@dataclass(frozen=True, slots=True)
class ExportRun:
    """One run of an export: its description in `_run.json`."""

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
        """The run described by `data`; `path` is for the error. Raises UnreadableExport."""
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise ValueError(f"its version is {found['version']!r}")
            if found["kind"] not in (VERSIONS, LATEST):
                raise ValueError(f"its kind is {found['kind']!r}")
            offset, rows = Offset.of_json(found["offset"]), found.get("rows")
            numbers = int(found["run"]), int(found["records"]), None if rows is None else int(rows)
            return cls(numbers[0], found["kind"], tuple(found["columns"]), offset, *numbers[1:])
        except (InvalidRequest, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise UnreadableExport(
                f"can't read {path} ({error}): use the release that wrote it, or export to another directory"
            ) from None


class ExportDirectory:
    """An export of one kind at a path; `locked` creates the directory."""

    def __init__(self, path: str, kind: str) -> None:
        self.path = local_path(path)
        self.kind = kind
        self._own = os.path.join(self.path, "_export", f"writing-{platform.node()}-")
        self.writing = self._unwritten()

    def last(self) -> ExportRun | None:
        """The last published run; None if there is none. Raises UnreadableExport, InvalidRequest for another kind."""
        if os.path.isdir(os.path.join(self.path, DELTA_LOG)):
            raise InvalidRequest(f"{self.path} is a Delta table: export in that format, or to another directory")
        if self.kind == VERSIONS and os.path.lexists(os.path.join(self.path, LATEST)):
            raise InvalidRequest(f"{self.path} contains latest values: export all versions to another directory")
        numbers = self._numbers()
        if self.kind == LATEST and numbers:
            raise InvalidRequest(f"{self.path} contains all versions: export latest values to another directory")
        where = self.table if self.kind == LATEST else self._run_path(max(numbers, default=1))
        if self.kind == LATEST and os.path.lexists(where) and not os.path.isdir(where):
            raise UnreadableExport(f"{where} links to a run that does not exist: restore the run, or export elsewhere")
        run = read_run(where) if os.path.isdir(where) else None
        if run is not None and run.kind != self.kind:
            raise UnreadableExport(f"{where} must contain a run of {self.kind}, found {run.kind}: export elsewhere")
        return run

    @property
    def table(self) -> str:
        """The path for readers of Parquet."""
        return self.path if self.kind == VERSIONS else os.path.join(self.path, LATEST)

    def frame(self, spark: SparkSession, run: ExportRun) -> DataFrame:
        """The records up to a run. A run of the latest values must still exist: see `reading`."""
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
        """The last run, which is not removed during the block; None if there is none. Raises as `last`."""
        with ExitStack() as held:
            for _ in range(ATTEMPTS):
                run = self.last()
                if run is None or self.kind == VERSIONS or self._hold(self._replacing(run), held):
                    yield run
                    return
            raise UnreadableExport(f"{self.table} was replaced {ATTEMPTS} times while it was opened: try again")

    def _hold(self, path: str, held: ExitStack) -> bool:
        """Lock a run against removal; False if it has been removed already."""
        name = os.path.join(path, RUN_FILE)
        try:
            file = held.enter_context(open(name, "rb"))  # noqa: SIM115  # the stack closes it
        except FileNotFoundError:
            return False
        fcntl.flock(file, fcntl.LOCK_SH)
        return os.path.exists(name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory and exclude other exporters. Raises ExportLocked, ExportFailed."""
        with self.writable():
            os.makedirs(os.path.join(self.path, "_export"), exist_ok=True)
            lock = current().disk.lock(os.path.join(self.path, "_export", "lock"))
        if lock is None:
            raise ExportLocked(f"another process exports to {self.path}: wait until it ends, or stop it")
        with closing(lock):
            yield

    def clear(self) -> None:
        """Remove replaced and unfinished runs, and choose a new directory for the next run.

        Raises InvalidRequest, UnreadableExport, and removes nothing, if the directory contains anything else.
        """
        last = self.last()
        if self.kind == LATEST and last is not None and not os.path.islink(self.table):
            raise InvalidRequest(
                f"{self.table} must be a symbolic link to a run: copy exports without following links, or export to "
                f"another directory"
            )
        if self.kind == VERSIONS and last is None and (strange := foreign(self.path)):
            raise InvalidRequest(
                f"{strange} does not belong to an export, but readers of {self.path} would read it: export to an empty "
                f"directory"
            )
        replaced = self._replaced(last)
        self._remove_written()
        with self.writable():
            for path in replaced:
                remove_unread(path, self.writing)

    def _remove_written(self) -> None:
        parent = os.path.dirname(self.writing)
        for found in os.scandir(parent) if os.path.isdir(parent) else ():
            if found.name.startswith("writing-") and (found.path.startswith(self._own) or _is_stale(found)):
                shutil.rmtree(found.path, ignore_errors=True)
        self.writing = self._unwritten()

    def _unwritten(self) -> str:
        return f"{self._own}{uuid.uuid4().hex}"

    def publish(self, run: ExportRun) -> ExportRun:
        """Publish the files in `writing` as a run. Raises ExportFailed."""
        with self.writable():
            with open(os.path.join(self.writing, RUN_FILE), "wb") as file:
                file.write(run.encode())
            for directory, _, files in os.walk(self.writing, topdown=False):
                for name in files:
                    sync(os.path.join(directory, name))
                sync(directory)
            if self.kind == VERSIONS:
                os.rename(self.writing, self._run_path(run.number))
            else:
                self._replace_latest(run.number)
            sync(self.path)
        return run

    def _replace_latest(self, number: int) -> None:
        """Make the files in `writing` the run that the link points to."""
        runs = os.path.join(self.path, "runs")
        os.makedirs(runs, exist_ok=True)
        os.rename(self.writing, os.path.join(runs, str(number)))
        sync(runs)
        link = os.path.join(self.path, "_export", "link")
        with suppress(FileNotFoundError):
            os.remove(link)
        os.symlink(os.path.join("runs", str(number)), link)
        os.replace(link, self.table)

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Raise errors of the file system as ExportFailed."""
        try:
            yield
        except OSError as error:
            raise ExportFailed(
                f"can't write {error.filename or self.path}: {error.strerror or error}; fix this and export again, "
                f"which continues after the last published run"
            ) from error

    def _numbers(self) -> list[int]:
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        return [int(found[1]) for found in map(_RUN.fullmatch, names) if found]

    def _replaced(self, last: ExportRun | None) -> list[str]:
        """Directories of replaced runs of the latest values. Raises UnreadableExport."""
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
        """The directory that the link points to while this run is the last."""
        return os.path.join(self.path, "runs", str(run.number)) if os.path.islink(self.table) else self.table


def read_run(directory: str) -> ExportRun:
    """The run in a directory. Raises UnreadableExport."""
    path = os.path.join(directory, RUN_FILE)
    try:
        with open(path, "rb") as file:
            return ExportRun.decode(path, file.read())
    except FileNotFoundError:
        raise UnreadableExport(f"{path} is missing: {directory} is not a complete run of an export") from None


def _is_stale(written: os.DirEntry[str]) -> bool:
    """Whether the unfinished run of another process has not changed for STALE_SECONDS."""
    with suppress(FileNotFoundError):
        return time.time() - written.stat().st_mtime > STALE_SECONDS
    return False


def remove_unread(path: str, aside: str) -> None:
    """Remove a run unless a process is `reading` it. It is first renamed to `aside`, so readers never see a part."""
    with open(os.path.join(path, RUN_FILE), "r+b") as file:  # NFS requires write access for an exclusive lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.rename(path, aside)
        shutil.rmtree(aside)


def foreign(directory: str) -> str | None:
    """A file that readers of a directory would read, if any; they skip names that begin with `_` or `.`."""
    for place, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name[0] not in "._")
        if seen := sorted(name for name in files if name[0] not in "._"):
            return os.path.join(place, seen[0])
    return None


def local_path(path: str) -> str:
    """The absolute local path of a path or `file:` address. Raises InvalidAddress for anything else."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme == "file":
        path = "/" + rest.lstrip("/") if rest.startswith("//") else rest
    elif colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme):
        raise InvalidAddress(
            f"{path} is not a directory, and exports require atomic renames, which {scheme}: does not have: export to "
            f"a directory that all tasks have under the same path"
        )
    if not path:
        raise InvalidAddress("the path of an export must not be empty")
    return os.path.abspath(path)


def literal(path: str) -> str:
    """A path escaped for Spark's readers, which treat it as a pattern."""
    return path.translate(_LITERAL)


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
