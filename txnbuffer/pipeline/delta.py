"""An export as a Delta table: each run is one commit to the table's log.

    DIR/_delta_log/                     the table's log
    DIR/run-2-9f3c…-part-….parquet      records of a run
    DIR/_export/runs/2-7a01b2c3.json    the run's description, as `_run.json` of `pipeline.exports`
    DIR/_export/writing-HOST-9f3c…      files of a run that is not committed

A commit adds the files of a run; for the latest values it also removes all others. It contains an application
transaction with the id `txnbuffer`, whose version is the run's number times 2^32 plus XXH32 of the run's description.
Both numbers are also in the name of the description, which is synced before the commit. So the commit publishes files
and positions together. Delta keeps an application transaction when it writes checkpoints, cleans up or optimizes. Files
of a run that was killed before its commit belong to no version of the table.

Each run first checks that nobody else changed the records since the previous run. Commits that only move records
between files are allowed. Where Delta has cleaned up its log, the numbers of rows are compared.

The log has statistics of each file: the number of records, and the minimum and maximum of topic, position, seqno and
times, by which readers skip files. Times are rounded outwards to milliseconds, the precision of Delta.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from broker_io.errors import InvalidAddress, MissingDependency, StorageError
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.exports import (
    DELTA_LOG,
    LATEST,
    RUN_FILE,
    VERSIONS,
    ExportDirectory,
    ExportFailed,
    ExportLocked,
    ExportRun,
    UnreadableExport,
    literal,
    local_path,
    sync,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession


BOUNDED = (
    "topic", "position.ledger", "position.entry", "seqno", "event_time", "publish_time",
)  # fmt: skip
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def add_action(root: str, path: str, footer: Any) -> AddAction:
    """The action that adds the Parquet file at a path relative to `root`; `footer` is pyarrow's metadata of it."""
    from deltalake.transaction import AddAction

    status = os.stat(os.path.join(root, path))
    stats = {"numRecords": footer.num_rows, **_bounds(footer)}
    return AddAction(path, status.st_size, {}, status.st_mtime_ns // 1_000_000, True, json.dumps(stats))


def files_of(table: DeltaTable) -> dict[str, int | None]:
    """The number of rows in each file of a table version, by path; None if the log does not have it."""
    import pyarrow as pa

    actions = pa.table(table.get_add_actions(flatten=True))
    return dict(zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True))


def is_mark(action: Mapping[str, Any], app: str, version: int) -> bool:
    """Whether an action of the log is the application transaction of this id and version."""
    found = action.get("txn") or {}
    return bool(found.get("appId") == app and found.get("version") == version)


def changes_data(action: Mapping[str, Any]) -> bool:
    """Whether an action of the log adds or removes records, rather than moving them between files."""
    files = [found for name in ("add", "remove") if (found := action.get(name)) is not None]
    return any(found.get("dataChange", True) for found in files)


def _bounds(footer: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}}
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    for index, path in enumerate(paths):
        if path not in BOUNDED:
            continue
        parts = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        if any(part is None or not part.has_min_max for part in parts):
            continue
        ends = [_ends(path, part) for part in parts]
        if any(end is None for pair in ends for end in pair):
            continue
        _put(found["minValues"], path, min(low for low, _ in ends))
        _put(found["maxValues"], path, max(high for _, high in ends))
    return found


def _ends(path: str, part: Any) -> tuple[Any, Any]:
    if path.endswith("_time"):
        return _moment(part.min_raw // 1000), _moment(-(-part.max_raw // 1000))
    return part.min, part.max


def _moment(milliseconds: int) -> str | None:
    """A time as Delta writes it, which sorts as text; None before the year 1 and after the year 9999."""
    try:
        return (EPOCH + milliseconds * MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return None


def _put(found: dict[str, Any], path: str, value: Any) -> None:
    *outer, name = path.split(".")
    for one in outer:
        found = found.setdefault(one, {})
    found[name] = value


APP = "txnbuffer"
ATTEMPTS = 10
"""Attempts to commit: another process may commit between reading the table and committing."""
KEPT = 10
"""Descriptions of this many runs are kept: a process that opens the table concurrently may see an older run."""

_UNFIT = re.compile(r"[\x00-\x1f\x7f%\[\\\]^|\ud800-\udfff]")  # deltalake fails on these or uses another path
_RUN_NAME = re.compile(r"([0-9]+)-[0-9a-f]{8}\.json")


class ExportChanged(StorageError):
    """Another process has added records to an exported table, or removed some."""


class TableVersion(NamedTuple):
    """A version of the table, and its last run; `mark` is the version of the application transaction."""

    table: DeltaTable
    mark: int
    run: ExportRun


class DeltaDirectory(ExportDirectory):
    """An export of one kind as a Delta table at a path; `locked` creates the directory.

    Raises MissingDependency without the package deltalake, InvalidAddress.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path, kind)
        if strange := sorted({*_UNFIT.findall(self.path)}):
            raise InvalidAddress(
                f"the path {self.path!r} contains {''.join(strange)!r}, which a Delta table does not allow: export to "
                f"another directory"
            )
        self._seen: TableVersion | None = None
        try:
            import deltalake  # noqa: F401  # a missing package is reported before anything starts
        except ImportError as error:
            raise MissingDependency(
                f"format delta needs the package deltalake ({error}): pip install 'txnbuffer[delta]'"
            ) from None

    def last(self) -> ExportRun | None:
        """The last committed run; None if there is none.

        Raises UnreadableExport, InvalidRequest for an export of another kind or format.
        """
        self._seen = seen = self.newest()
        if seen is None:
            return None
        if seen.run.kind != self.kind:
            raise InvalidRequest(
                f"{self.path} is an export of {seen.run.kind}: export {self.kind} to another directory"
            )
        return seen.run

    @property
    def table(self) -> str:
        """The path for readers of Delta tables."""
        return self.path

    def frame(self, spark: SparkSession, run: ExportRun) -> DataFrame:
        """The records up to the last run, as `last` found it."""
        from txnbuffer.pipeline.spark.tasks import frame_schema

        schema = frame_schema(run.columns)
        paths = [literal(path) for path in self.files(run)]
        return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)

    def files(self, run: ExportRun) -> list[str]:
        """The Parquet files of `frame`."""
        return [] if self._seen is None else [os.path.join(self.path, path) for path in files_of(self._seen.table)]

    @contextmanager
    def reading(self) -> Iterator[ExportRun | None]:
        """The last run; its files exist until VACUUM removes them. Raises as `last`."""
        yield self.last()

    def clear(self) -> None:
        """Remove unfinished runs of this host; VACUUM removes those of their files that already have their final names.

        Raises ExportChanged, and as `last`.
        """
        self._remove_written()
        self.last()
        if self._seen is not None:
            self._check(self._seen)

    def publish(self, run: ExportRun) -> ExportRun:
        """Commit the files in `writing` as the run after the one that `last` found.

        Raises ExportFailed, ExportLocked if another process exported meanwhile, ExportChanged.
        """
        with self.writable():
            adds = self._named(run)
            before = self._seen.run.rows or 0 if self._seen and self.kind == VERSIONS else 0
            counted = replace(run, rows=before + run.records)
            data = counted.encode()
            mark = mark_of(run.number, data)
            self._store(mark, data)
            shutil.rmtree(self.writing)
            self._commit(adds, counted, mark)
            self._forget(run.number - KEPT)
        return counted

    def newest(self) -> TableVersion | None:
        """The newest version of the table, without a check for changes by others; None if there is none."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if not os.path.isdir(os.path.join(self.path, DELTA_LOG)):
            self._refuse_parquet()
            return None
        try:
            if not DeltaTable.is_deltatable(self.path):
                return None
            table = DeltaTable(self.path)
            mark = table.transaction_version(APP)
        except (DeltaError, OSError) as error:
            raise UnreadableExport(f"can't read the Delta table {self.path}: {error}") from None
        protocol = table.protocol()
        if protocol.min_reader_version > 1:
            features = ", ".join(protocol.reader_features or ["column mapping"])
            raise UnreadableExport(
                f"the Delta table {self.path} uses features that this release can't read: {features}"
            )
        if mark is None:
            raise UnreadableExport(
                f"the Delta table {self.path} has no application transaction {APP!r}: another program made the table, "
                f"or delta.setTransactionRetentionDuration has expired; export to another directory"
            )
        return TableVersion(table, mark, self._run_of(mark))

    def _refuse_parquet(self) -> None:
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        if any(name in (LATEST, "runs") or name.startswith("run=") for name in names):
            raise InvalidRequest(
                f"{self.path} contains an export as Parquet files: export as a Delta table to another directory"
            )

    def _run_of(self, mark: int) -> ExportRun:
        path = self._run_file(mark)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise UnreadableExport(
                f"{path} is missing, which has the positions of the export {self.path}: restore it, or export to "
                f"another directory"
            ) from None
        run = ExportRun.decode(path, data)
        if mark_of(run.number, data) != mark:
            raise UnreadableExport(f"{path} has changed since it was written: restore it, or export elsewhere")
        return run

    def _check(self, seen: TableVersion) -> None:
        """Check that the table's records have not changed since its last run.

        Raises ExportChanged, UnreadableExport.
        """
        if [field.name for field in seen.table.schema().fields] != [*seen.run.columns]:
            raise self._changed(seen, "it has other columns")
        cleaned = self._changed_in_log(seen)
        counts = files_of(seen.table).values()
        rows = None if None in counts else sum(filter(None, counts))
        if rows != seen.run.rows and (cleaned or rows is not None):
            found = "an unknown number of" if rows is None else rows
            raise self._changed(seen, f"it has {found} rows instead of {seen.run.rows}")

    def _changed_in_log(self, seen: TableVersion) -> bool:
        """Whether Delta has cleaned up commits after the last run. Raises ExportChanged if one changed records."""
        for version in range(seen.table.version(), -1, -1):
            try:
                with open(self._commit_file(version), encoding="utf-8") as file:
                    actions = [json.loads(line) for line in file if line.strip()]
            except FileNotFoundError:
                return True
            except (ValueError, RecursionError) as error:
                raise UnreadableExport(f"can't read {self._commit_file(version)}: {error}") from None
            if any(is_mark(action, APP, seen.mark) for action in actions):
                return False
            if any(map(changes_data, actions)):
                raise self._changed(seen, f"version {version} added or removed records")
        return True

    def _changed(self, seen: TableVersion, what: str) -> ExportChanged:
        return ExportChanged(
            f"{self.path} has changed since run {seen.run.number} of its export ({what}): export to another directory"
        )

    def _named(self, run: ExportRun) -> list[AddAction]:
        """Move the files of `writing` to their final names; the actions that add them."""
        import pyarrow.parquet as pq

        prefix, footers = f"run-{run.number}-{uuid.uuid4().hex}", {}
        for name in sorted(os.listdir(self.writing)):
            path, final = os.path.join(self.writing, name), f"{prefix}-{name}"
            footer = None if name[0] in "._" else pq.read_metadata(path)
            if footer is not None and footer.num_rows:
                sync(path)
                os.rename(path, os.path.join(self.path, final))
                footers[final] = footer
        if sum(footer.num_rows for footer in footers.values()) != run.records:
            raise ExportLocked(f"another process changed files of {self.path} during the export: run one at a time")
        sync(self.path)
        return [add_action(self.path, path, footer) for path, footer in footers.items()]

    def _store(self, mark: int, data: bytes) -> None:
        path, written = self._run_file(mark), os.path.join(self.writing, RUN_FILE)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(written, "wb") as file:
            file.write(data)
        sync(written)
        os.rename(written, path)  # another process may have written and committed the same run
        for one in (os.path.dirname(path), os.path.join(self.path, "_export")):
            sync(one)

    def _commit(self, adds: list[AddAction], run: ExportRun, mark: int) -> None:
        """Commit as the version after one whose last run is still the one that `last` found."""
        from deltalake.exceptions import DeltaError

        before, now, failed = self._seen, self.newest(), ""
        for _ in range(ATTEMPTS):
            if (now and now.mark) != (before and before.mark):
                raise ExportLocked(
                    f"another process has committed run {run.number} to {self.path} meanwhile: run one export at a time"
                )
            if now is not None:
                self._check(now)
            try:
                self._try(now, adds, run, mark)
            except DeltaError as error:
                failed = str(error)
            version = 0 if now is None else now.table.version() + 1
            now = self.newest()
            if now is not None and now.mark == mark:
                break
        else:
            raise ExportFailed(f"can't commit run {run.number} to {self.path} ({failed}): export again")
        sync(self._commit_file(version))
        sync(os.path.join(self.path, DELTA_LOG))
        self._seen = now

    def _try(self, now: TableVersion | None, adds: list[AddAction], run: ExportRun, mark: int) -> None:
        """Commit as the version after `now`; fails if another commit has that version."""
        from deltalake import CommitProperties, Schema, Transaction
        from deltalake.transaction import create_table_with_add_actions

        from txnbuffer.pipeline.arrow import schema_of

        info = {APP: {"run": run.number, "kind": run.kind, "records": run.records}}
        properties = CommitProperties(info, max_commit_retries=0, app_transactions=[Transaction(APP, mark)])
        schema = Schema.from_arrow(schema_of(run.columns))
        if now is None:
            create_table_with_add_actions(
                self.path,
                schema,
                adds,
                configuration={"delta.appendOnly": "true"} if run.kind == VERSIONS else {},
                commit_properties=properties,
            )
        else:
            mode = "append" if run.kind == VERSIONS else "overwrite"
            now.table.create_write_transaction([*adds], mode, schema, commit_properties=properties)

    def _forget(self, oldest: int) -> None:
        """Remove the descriptions of runs before this one."""
        runs = os.path.join(self.path, "_export", "runs")
        for found in filter(None, map(_RUN_NAME.fullmatch, os.listdir(runs))):
            if int(found[1]) < oldest:
                with suppress(FileNotFoundError):  # another process removes them at the same time
                    os.remove(os.path.join(runs, found[0]))

    def _run_file(self, mark: int) -> str:
        return os.path.join(self.path, "_export", "runs", f"{mark >> 32}-{mark & 0xFFFFFFFF:08x}.json")

    def _commit_file(self, version: int) -> str:
        return os.path.join(self.path, DELTA_LOG, f"{version:020d}.json")


def mark_of(number: int, data: bytes) -> int:
    """The version of the application transaction of a run whose description is `data`."""
    return number << 32 | xxhash.xxh32_intdigest(data)


PARQUET, DELTA = "parquet", "delta"


def target(path: str, kind: str, form: str) -> ExportDirectory:
    """The export of a kind at a path in a format. Raises MissingDependency for Delta without the package deltalake."""
    return DeltaDirectory(path, kind) if form == DELTA else ExportDirectory(path, kind)


def check_outside_log(export: ExportDirectory, address: str) -> None:
    """Raises InvalidRequest for an export into the directory of the log that it reads."""
    if address.startswith("file:"):
        log, place = (os.path.realpath(path) for path in (local_path(address), export.path))
        if os.path.commonpath([log, place]) == log:
            raise InvalidRequest(f"{export.path} is inside the log {address}: export to another directory")


def find(path: str) -> ExportDirectory:
    """The export at a path, of any kind and format. Raises InvalidRequest if there is none."""
    path = local_path(path)
    if os.path.isdir(os.path.join(path, DELTA_LOG)):
        newest = DeltaDirectory(path, VERSIONS).newest()
        found: ExportDirectory = DeltaDirectory(path, VERSIONS if newest is None else newest.run.kind)
    else:
        found = ExportDirectory(path, LATEST if os.path.lexists(os.path.join(path, LATEST)) else VERSIONS)
    if found.last() is None:
        raise InvalidRequest(f"there is no export at {path}: create one with `txnbuf pipeline export`")
    return found
