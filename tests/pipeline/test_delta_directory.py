"""Exports as Delta tables: a run is one commit, also if processes are killed or others change the table."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_tables import COLUMNS, ROWS, expected, export, run_of, values_in, write
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from golden_files import committed
from pipeline.killed_exports import attempts

from broker_io.errors import MissingDependency
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.arrow import schema_of
from txnbuffer.pipeline.delta import APP, DELTA, KEPT, DeltaDirectory, ExportChanged, find, mark_of, target
from txnbuffer.pipeline.exports import LATEST, VERSIONS, ExportDirectory, ExportFailed, ExportLocked, ExportRun
from txnbuffer.pipeline.exports import UnreadableExport as Unreadable


def vacuum(path: str) -> None:
    DeltaTable(path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_killed_run_is_committed_at_most_once(kind: str, before: int, tmp_path: Path) -> None:
    for attempt in attempts((DeltaDirectory, "_try")):
        directory = DeltaDirectory(str(tmp_path / str(attempt.step)), kind)
        for _ in range(before):
            export(directory)
        attempt.run(export, directory)
        last = DeltaDirectory(directory.path, kind).last()
        number = 0 if last is None else last.number
        assert number in ((before + 1,) if attempt.ended else (before, before + 1))
        assert values_in(directory.path) == expected(kind, number) * (number > 0)
        assert export(DeltaDirectory(directory.path, kind)).number == number + 1
        assert values_in(directory.path) == expected(kind, number + 1)
        assert not os.path.exists(directory.writing)


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_maintenance_by_others_changes_nothing(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a table")
    for _ in range(2):
        export(DeltaDirectory(path, kind))
    for number, cleaned in ((3, False), (4, True)):
        DeltaTable(path).optimize.compact()
        vacuum(path)
        if cleaned:
            DeltaTable(path).create_checkpoint()
            for old in sorted(Path(path, "_delta_log").glob("*.json"))[:-1]:
                old.unlink()
        assert values_in(path) == expected(kind, number - 1)
        assert export(DeltaDirectory(path, kind)).number == number
        assert values_in(path) == expected(kind, number)
    vacuum(path)
    assert values_in(path) == expected(kind, 4)
    found = find(path)
    assert (type(found), found.kind, found.last()) == (DeltaDirectory, kind, DeltaDirectory(path, kind).last())
    assert len(os.listdir(f"{path}/_export/runs")) == 4
    shown = next(commit["txnbuffer"] for commit in DeltaTable(path).history() if "txnbuffer" in commit)
    assert shown == {"run": 4, "kind": kind, "records": ROWS}


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("change", ["append", "overwrite", "delete", "restore"])
def test_an_export_stops_if_others_changed_records(change: str, cleaned: bool, tmp_path: Path) -> None:
    path = str(tmp_path)
    for _ in range(2):
        export(DeltaDirectory(path, LATEST), rows=2 if change == "overwrite" else 1)
    table = DeltaTable(path)
    if change == "delete":
        table.delete("value IS NOT NULL")
    elif change == "restore":
        export(DeltaDirectory(path, LATEST), rows=3)
        DeltaTable(path).restore(0)
    else:
        write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode=change)
    vacuum(path)
    if cleaned:
        DeltaTable(path).create_checkpoint()
        for old in sorted(Path(path, "_delta_log").glob("*.json"))[:-1]:
            old.unlink()
    before = values_in(path)
    with pytest.raises(ExportChanged, match=r"has changed since run .*\): export to another directory"):
        export(DeltaDirectory(path, LATEST))
    assert values_in(path) == before
    assert find(path).last() is not None, "what was changed can be audited"


def test_an_export_stops_if_others_changed_values_but_not_the_number_of_rows(tmp_path: Path) -> None:
    directory = DeltaDirectory(str(tmp_path), LATEST)
    export(directory)
    DeltaTable(directory.path).update({"topic": "'stock'"})
    vacuum(directory.path)
    with pytest.raises(ExportChanged, match=r"version 1 added or removed records\): export"):
        export(directory)


def test_new_columns_and_features_are_detected(tmp_path: Path) -> None:
    columns, features = str(tmp_path / "columns"), str(tmp_path / "features")
    for path in (columns, features):
        export(DeltaDirectory(path, VERSIONS))
    wider = DeltaTable(columns).to_pyarrow_table().slice(0, 0).append_column("more", pa.nulls(0, pa.string()))
    write_deltalake(columns, wider, mode="append", schema_mode="merge")
    with pytest.raises(ExportChanged, match="it has other columns"):
        export(DeltaDirectory(columns, VERSIONS))
    log = Path(features, "_delta_log", f"{1:020d}.json")
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    log.write_text(json.dumps({"protocol": {**protocol, "writerFeatures": ["deletionVectors", "appendOnly"]}}))
    with pytest.raises(Unreadable, match="can't read: deletionVectors"):
        find(features)


def test_one_of_two_concurrent_exports_commits(tmp_path: Path) -> None:
    path = str(tmp_path)
    for number in (1, 2):  # the first makes the table
        slow = DeltaDirectory(path, VERSIONS)
        with slow.locked():
            slow.clear()
            with pytest.raises(ExportLocked, match="another process exports to"):
                export(DeltaDirectory(path, VERSIONS))
            os.remove(f"{path}/_export/lock")  # so that only Delta detects it
            export(DeltaDirectory(path, VERSIONS), rows=1)
            write(slow, number)
            with pytest.raises(ExportLocked, match=f"has committed run {number} to .*: run one export at a time"):
                slow.publish(run_of(number, VERSIONS))
        assert values_in(path) == [*range(1, number + 1)]


def test_two_hosts_with_separate_locks_keep_each_others_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path)
    here = DeltaDirectory(path, VERSIONS)
    with here.locked():
        here.clear()
        write(here, 1)
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "there")
        there = DeltaDirectory(path, VERSIONS)
        export(there)
        assert os.path.exists(here.writing)
        os.utime(here.writing, (0, 0))
        export(there)
        assert not os.path.exists(here.writing)
        write(there, 3)
    export(DeltaDirectory(path, VERSIONS))
    assert os.path.exists(there.writing)
    assert values_in(path) == expected(VERSIONS, 3)


def test_one_of_two_equal_runs_commits(tmp_path: Path) -> None:
    slow = DeltaDirectory(str(tmp_path), VERSIONS)
    with slow.locked():
        slow.clear()
        os.remove(tmp_path / "_export" / "lock")
        fast = DeltaDirectory(str(tmp_path), VERSIONS)
        export(fast)
        counted = fast.last()
        write(slow, 1)
        with pytest.raises(ExportLocked, match="has committed run 1 to"):
            slow.publish(run_of(1, VERSIONS))
    assert values_in(str(tmp_path)) == expected(VERSIONS, 1)
    assert fast.last() == counted


def test_descriptions_of_the_last_runs_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        export(DeltaDirectory(str(tmp_path), LATEST))
        if not number:
            (tmp_path / "_export" / "runs" / "another file").touch()
    left = {*os.listdir(tmp_path / "_export" / "runs")} - {"another file"}
    numbers = sorted(int(name.partition("-")[0]) for name in left)
    assert numbers == list(range(3, KEPT + 4))


def test_files_that_another_process_removed_are_detected(tmp_path: Path) -> None:
    directory = DeltaDirectory(str(tmp_path), VERSIONS)
    with directory.locked():
        directory.clear()
        write(directory, 1)
        os.remove(f"{directory.writing}/part-0.parquet")
        with pytest.raises(ExportLocked, match="another process changed files of"):
            directory.publish(run_of(1, VERSIONS))
    assert values_in(str(tmp_path)) == []


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_others_may_commit_during_a_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path)
    directory = DeltaDirectory(path, kind)
    export(directory)
    attempt, left = DeltaDirectory._try, [3]

    def overtaken(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 2:
            DeltaTable(path).optimize.compact()
        elif left[0] == 1:
            vacuum(path)
        attempt(*arguments)

    monkeypatch.setattr(DeltaDirectory, "_try", overtaken)
    assert export(directory).number == 2
    assert left == [0]
    assert values_in(path) == expected(kind, 2)


def test_a_commit_with_an_unknown_outcome_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake.exceptions import DeltaError

    path = str(tmp_path)
    attempt = DeltaDirectory._try

    def reported_failed(*arguments: Any) -> None:
        attempt(*arguments)
        raise DeltaError("connection lost")

    def full(*_: Any) -> None:
        raise DeltaError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(DeltaDirectory, "_try", reported_failed)
        assert [export(DeltaDirectory(path, VERSIONS)).number for _ in range(2)] == [1, 2]
        patch.setattr(DeltaDirectory, "_try", full)
        with pytest.raises(ExportFailed, match=r"can't commit run 3 to .* \(no space left\)"):
            export(DeltaDirectory(path, VERSIONS))
    export(DeltaDirectory(path, VERSIONS))
    assert values_in(path) == expected(VERSIONS, 3)


def test_exports_of_another_kind_or_format_are_rejected(tmp_path: Path) -> None:
    versions = DeltaDirectory(str(tmp_path / "v"), VERSIONS)
    assert versions.last() is None
    export(versions)
    with pytest.raises(InvalidRequest, match="is an export of versions: export latest to another"):
        DeltaDirectory(versions.path, LATEST).last()
    with pytest.raises(InvalidRequest, match="is a Delta table"):
        ExportDirectory(versions.path, VERSIONS).last()
    for kind in (VERSIONS, LATEST):
        parquet = ExportDirectory(str(tmp_path / kind), kind)
        export(parquet)
        with pytest.raises(InvalidRequest, match="contains an export as Parquet files"):
            target(parquet.path, kind, DELTA).last()
    os.makedirs(tmp_path / "empty" / "_delta_log")
    with pytest.raises(InvalidRequest, match="there is no export"):
        find(str(tmp_path / "empty"))
    write_deltalake(str(tmp_path / "other"), pa.table({"a": [1]}))
    with pytest.raises(Unreadable, match=r"another program made the table, or delta\.setTransactionRetentionDuration"):
        export(DeltaDirectory(str(tmp_path / "other"), VERSIONS))


def test_missing_and_changed_descriptions_of_runs_are_rejected(tmp_path: Path) -> None:
    directory = DeltaDirectory(str(tmp_path), VERSIONS)
    export(directory)
    (file,) = Path(tmp_path, "_export", "runs").iterdir()
    data = file.read_bytes()
    file.write_bytes(data.replace(b"1:1", b"1:9"))
    with pytest.raises(Unreadable, match=f"{file.name} has changed since it was written"):
        export(directory)
    file.unlink()
    with pytest.raises(Unreadable, match=f"{file.name} is missing"):
        export(directory)
    file.write_bytes(data)
    export(directory)
    next(Path(tmp_path, "_delta_log").glob(f"{0:020d}.json")).write_text("{")
    with pytest.raises(Unreadable, match="can't read the Delta table"):
        directory.last()


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingDependency, match=r"pip install 'txnbuffer\[delta\]'"):
        DeltaDirectory(str(tmp_path), VERSIONS)


def test_readers_skip_files_by_statistics(tmp_path: Path) -> None:
    path = str(tmp_path)
    for _ in range(3):
        export(DeltaDirectory(path, VERSIONS))
    table = DeltaTable(path)
    time = datetime.datetime(2026, 1, 3, 0, 0, 0, 123456, datetime.UTC)
    found = table.to_pyarrow_table(filters=[("publish_time", "=", time)])
    assert found["value"].to_pylist() == [b"2", b"2"]
    assert len(table.file_uris(file_pruning_predicate="publish_time = '2026-01-03 00:00:00.123456Z'")) == ROWS
    assert table.file_uris(file_pruning_predicate="topic = 'stock'") == []
    for one in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        assert one["min.publish_time"].microsecond == 123_000 < time.microsecond < one["max.publish_time"].microsecond
    assert len(table.to_pyarrow_table(filters=[("topic", "=", "orders")])) == 3 * ROWS


def test_statistics_omit_times_that_delta_cannot_write(tmp_path: Path) -> None:
    directory = DeltaDirectory(str(tmp_path), VERSIONS)
    with directory.locked():
        directory.clear()
        os.makedirs(directory.writing)
        times = pa.array([-(2**62), 0, 2**62], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        columns = [pa.array(["t"] * 3), pa.nulls(3, schema_of(COLUMNS).field("position").type), pa.nulls(3, "binary")]
        written = pa.Table.from_arrays([*columns, times], schema=schema_of(COLUMNS))
        pq.write_table(written, f"{directory.writing}/part-0.parquet")
        directory.publish(run_of(1, VERSIONS, 3))
    assert DeltaTable(str(tmp_path)).to_pyarrow_table() == written
    files = pa.table(DeltaTable(str(tmp_path)).get_add_actions(flatten=True)).to_pylist()
    assert [(one["min.publish_time"], one["max.topic"], one["num_records"]) for one in files] == [(None, "t", 3)]


def test_golden_run_of_a_delta_table() -> None:
    run = ExportRun(2, LATEST, ("topic", "position", "key", "value"), run_of(7, LATEST).offset, 4711, rows=4711)
    data = committed("pipeline/delta-run-1.json", run.encode())
    assert ExportRun.decode("run", data) == run
    assert mark_of(2, data) == 0x2_2C8C359F


def test_application_transactions_of_other_programs_are_ignored(tmp_path: Path) -> None:
    directory = DeltaDirectory(str(tmp_path), VERSIONS)
    export(directory)
    table = DeltaTable(str(tmp_path))
    properties = CommitProperties(app_transactions=[Transaction("other", 9)])
    table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
    assert export(directory).number == 2
    assert DeltaTable(str(tmp_path)).transaction_version(APP) >> 32 == 2
