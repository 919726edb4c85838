"""Directories of exports: a run is published as a whole or not at all, also if its process is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
from golden_files import committed
from pipeline.killed_exports import Killed, attempts

from broker_io.errors import Error, InvalidAddress
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.pipeline import exports
from txnbuffer.pipeline.delta import find
from txnbuffer.pipeline.exports import (
    LATEST,
    VERSIONS,
    ExportDirectory,
    ExportFailed,
    ExportLocked,
    ExportRun,
    UnreadableExport,
)
from txnbuffer.pipeline.offsets import Offset, ReadProgress

DRIVER = """
import os, signal, sys
from txnbuffer.pipeline.exports import ExportDirectory

directory = ExportDirectory(*sys.argv[1:])
with directory.locked():
    directory.clear()
    os.makedirs(directory.writing)
    if os.fork() == 0:
        signal.alarm(120)
        print(directory.writing, flush=True)  # by the child, which has released the parent's lock by now
        sys.stdin.read()
        os._exit(0)
    signal.pause()
"""


def run_of(number: int, kind: str) -> ExportRun:
    return ExportRun(
        number, kind, ("topic", "position"), Offset({"orders": ReadProgress(Position(1, number), "9f")}), number
    )


def export(directory: ExportDirectory) -> None:
    """Publish a run whose only data is its number."""
    with directory.locked():
        directory.clear()
        last = directory.last()
        run = run_of(1 if last is None else last.number + 1, directory.kind)
        os.makedirs(directory.writing)
        Path(directory.writing, "part-0").write_text(str(run.number))
        directory.publish(run)


def data_of(directory: ExportDirectory) -> list[str]:
    """The data that a reader of the table gets."""
    if directory.kind == LATEST:
        return [Path(directory.table, "part-0").read_text()] if os.path.exists(directory.table) else []
    return sorted(path.read_text() for path in Path(directory.table).glob("run=*/part-*"))


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_killed_run_is_published_at_most_once(kind: str, tmp_path: Path) -> None:
    for attempt in attempts():
        directory = ExportDirectory(str(tmp_path / str(attempt.step)), kind)
        export(directory)
        export(directory)
        attempt.run(export, directory)
        last = directory.last()
        assert last is not None
        assert last.number in ((3,) if attempt.ended else (2, 3))
        runs = [str(number + 1) for number in range(last.number)]
        assert data_of(directory) == (runs if kind == VERSIONS else runs[-1:])
        while last.number < 4:
            export(directory)
            last = directory.last() or last
        assert data_of(directory) == (["1", "2", "3", "4"] if kind == VERSIONS else ["4"])
        assert not os.path.exists(directory.writing)


def test_a_reader_of_replaced_values_can_continue(tmp_path: Path) -> None:
    directory = ExportDirectory(str(tmp_path), LATEST)
    for _ in range(4):
        export(directory)
    assert sorted(os.listdir(tmp_path / "runs")) == ["3", "4"]
    assert find(str(tmp_path)).kind == LATEST


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_the_files_of_an_export_are_those_up_to_a_run(kind: str, tmp_path: Path) -> None:
    directory = ExportDirectory(str(tmp_path), kind)
    for _ in range(11):
        export(directory)
    last = directory.last()
    assert last is not None
    assert [Path(path).read_text() for path in directory.files(replace(last, number=10))] == (
        [str(number) for number in range(1, 11)] if kind == VERSIONS else ["10"]
    )


def test_a_run_in_use_is_not_removed(tmp_path: Path) -> None:
    directory = ExportDirectory(str(tmp_path), LATEST)
    export(directory)
    with directory.reading() as run, directory.reading():
        assert run is not None
        for _ in range(3):
            export(ExportDirectory(str(tmp_path), LATEST))
        assert sorted(os.listdir(tmp_path / "runs")) == ["1", "3", "4"]
    export(directory)
    assert sorted(os.listdir(tmp_path / "runs")) == ["4", "5"]


def test_a_run_that_is_removed_before_it_is_locked_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, last = ExportDirectory(str(tmp_path), LATEST), ExportDirectory.last
    export(directory)
    found: list[ExportRun | None] = []

    def late(self: ExportDirectory) -> ExportRun | None:
        found.append(run := last(self))
        if len(found) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(ExportDirectory, "last", last)
                for _ in range(3):
                    export(directory)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(ExportDirectory, "last", late)
        with directory.reading() as run:
            assert run is not None
            assert (run.number, len(found)) == (4, 2)
    os.remove(tmp_path / "latest")
    os.symlink(os.path.join("..", "elsewhere"), tmp_path / "latest")
    with pytest.raises(UnreadableExport, match="latest links to a run that does not exist"), directory.reading():
        pass


def test_a_table_that_lost_its_runs_is_not_started_again(tmp_path: Path) -> None:
    """Records trimmed from the log by now existed only there."""
    directory = ExportDirectory(str(tmp_path / "table"), LATEST)
    export(directory)
    shutil.copytree(tmp_path / "table", tmp_path / "copy")
    with pytest.raises(InvalidRequest, match="latest must be a symbolic link to a run"):
        export(ExportDirectory(str(tmp_path / "copy"), LATEST))
    shutil.rmtree(tmp_path / "table" / "runs")
    with pytest.raises(UnreadableExport, match="latest links to a run that does not exist: restore the run"):
        export(directory)


def test_one_process_exports_at_a_time(tmp_path: Path) -> None:
    directory = ExportDirectory(f"file:{tmp_path}/a", VERSIONS)
    with directory.locked(), pytest.raises(ExportLocked, match="another process exports"):
        export(ExportDirectory(str(tmp_path / "a"), VERSIONS))
    export(directory)


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_tasks_of_a_killed_driver_neither_block_nor_change_the_next_run(kind: str, tmp_path: Path) -> None:
    """Its tasks may run for a moment longer and write to its directory."""
    directory = ExportDirectory(str(tmp_path), kind)
    export(directory)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), kind], stdin=PIPE, stdout=PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    with driver.stdin, driver.stdout:
        written = Path(driver.stdout.readline().strip())
        with pytest.raises(ExportLocked, match="another process exports"):
            export(directory)
        driver.kill()
        driver.wait(60)
        with directory.locked():
            directory.clear()
            assert not written.exists()
            for part in (written / "part-0", Path(directory.writing, "part-0")):
                part.parent.mkdir()
                part.write_text("late" if part.parent == written else "2")
            directory.publish(run_of(2, kind))
        assert data_of(directory) == (["1", "2"] if kind == VERSIONS else ["2"])
    export(directory)
    assert sorted(os.listdir(tmp_path / "_export")) == ["lock"]


def test_exports_of_another_kind_are_rejected(tmp_path: Path) -> None:
    versions, latest = ExportDirectory(str(tmp_path / "v"), VERSIONS), ExportDirectory(str(tmp_path / "l"), LATEST)
    with pytest.raises(InvalidRequest, match="there is no export"):
        find(str(tmp_path / "v"))
    export(versions)
    export(latest)
    with pytest.raises(InvalidRequest, match="contains all versions"):
        ExportDirectory(versions.path, LATEST).last()
    with pytest.raises(InvalidRequest, match="contains latest values"):
        ExportDirectory(latest.path, VERSIONS).last()
    os.rename(tmp_path / "v" / "run=1" / "_run.json", tmp_path / "run.json")
    with pytest.raises(UnreadableExport, match=r"_run\.json is missing"):
        versions.last()
    for address in ("s3a://bucket/table", "hdfs://host/table", ""):
        with pytest.raises(InvalidAddress, match="export"):
            ExportDirectory(address, VERSIONS)


def contents(path: Path) -> dict[str, str]:
    """The files in a directory, without `_export`."""
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if "_export" not in file.parts}
    return {
        name: os.readlink(file) if file.is_symlink() else file.read_text() if file.is_file() else ""
        for name, file in found.items()
    }


@pytest.mark.parametrize(
    ("kind", "files", "error"),
    [
        (LATEST, ["runs/1/model", "runs/2/model"], r"runs/1/_run.json is missing"),
        (LATEST, ["latest"], "latest links to a run that does not exist"),
        (LATEST, ["latest/model"], r"latest/_run.json is missing"),
        (LATEST, ["models/1", "latest -> models/1"], "latest links to a run that does not exist"),
        (LATEST, ["models/1", "latest -> models"], r"latest/_run.json is missing"),
        (LATEST, ["latest -> gone"], "latest links to a run that does not exist"),
        (VERSIONS, ["a.parquet"], "a.parquet does not belong to an export"),
        (VERSIONS, [".a", "_a/b", "day=1/a.parquet"], "day=1/a.parquet does not belong to an export"),
        (VERSIONS, ["run=1/model"], r"run=1/_run.json is missing"),
    ],
)
def test_files_of_others_in_a_directory_are_kept(kind: str, files: list[str], error: str, tmp_path: Path) -> None:
    for text in files:
        name, _, link = text.partition(" -> ")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if link:
            os.symlink(link, tmp_path / name)
        else:
            (tmp_path / name).write_text("theirs")
    before = contents(tmp_path)
    with pytest.raises(Error, match=error):
        export(ExportDirectory(str(tmp_path), kind))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_files_that_readers_skip_may_be_in_a_directory(kind: str, tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "_notes").write_text("theirs")
    directory = ExportDirectory(str(tmp_path), kind)
    export(directory)
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "notes").write_text("theirs")
    for _ in range(3):
        export(directory)
    assert (tmp_path / "_notes").read_text() == (tmp_path / "runs" / "notes").read_text() == "theirs"
    assert data_of(directory) == (["1", "2", "3", "4"] if kind == VERSIONS else ["4"])


def test_a_run_is_removed_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that is killed during a removal leaves only files that the next one can identify."""
    directory = ExportDirectory(str(tmp_path), LATEST)
    for _ in range(2):
        export(directory)

    def killed(path: str) -> None:
        os.remove(os.path.join(path, "_run.json"))
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(exports.shutil, "rmtree", killed)
        export(directory)
    export(directory)
    assert data_of(directory) == ["3"]
    assert sorted(os.listdir(tmp_path / "runs")) == ["2", "3"]
    assert sorted(os.listdir(tmp_path / "_export")) == ["lock"]


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"version": 2}', b'{"version": 1, "kind": "both"}',
     b'{"version": 1, "kind": "latest", "offset": {}, "run": 1, "columns": [], "records": 1}'],
)  # fmt: skip
def test_the_error_names_an_unreadable_run(data: bytes) -> None:
    with pytest.raises(Error, match="can't read x"):
        ExportRun.decode("x", data)


def test_the_error_names_a_file_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportFailed, match=r"can't write .*file/_export: Not a directory"):
        export(ExportDirectory(str(tmp_path / "file"), VERSIONS))
    directory = ExportDirectory(str(tmp_path / "full"), VERSIONS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "run=1")

    with monkeypatch.context() as patch:
        patch.setattr(exports.os, "rename", full)
        with pytest.raises(ExportFailed, match=r"can't write .*run=1: No space"):
            export(directory)
    export(directory)
    assert data_of(directory) == ["1"]


def test_a_directory_is_given_as_a_path_or_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    named = [exports.local_path(text) for text in ("a", "file:a", f"file:{tmp_path}/a", f"file://{tmp_path}/a")]
    assert named == [str(tmp_path / "a")] * 4


def test_golden_run() -> None:
    offset = Offset({"orders": ReadProgress(Position(3, 17), "9f3c"), "flüge": ReadProgress(Position(1, 0), "00aa")})
    run = ExportRun(2, VERSIONS, ("topic", "position", "key"), offset, 4711)
    assert ExportRun.decode("run", committed("pipeline/run-1.json", run.encode())) == run
