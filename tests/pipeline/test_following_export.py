"""A continuous export: which errors stop it, and which it retries."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from writing import TopicWriter

from broker_io import open_broker
from broker_io.errors import PositionTrimmed, ServiceUnavailable
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.jobs.running import job_error
from txnbuffer.pipeline.options import reading_options


def test_it_runs_until_it_is_stopped_or_fails_permanently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    directory = ExportDirectory(str(tmp_path), VERSIONS)
    job = Export(None, reading_options("file:log"), directory, on_progress=said.append)  # type: ignore[arg-type]  # not used
    stop = threading.Event()
    ways: list[Any] = ["run", None, ServiceUnavailable("away"), "last run"]

    def run() -> Any:
        way = ways.pop(0)
        if not ways:
            stop.set()
        if isinstance(way, Exception):
            raise way
        return way

    monkeypatch.setattr(job, "run", run)
    assert job.follow(stop, 0.001) == "last run"
    assert said == ["trying again in 0.001 s: away"]
    stop.clear()
    ways[:] = [PositionTrimmed("gone"), None]
    with pytest.raises(PositionTrimmed):
        job.follow(stop, 0.001)


def test_it_does_not_wait_while_there_are_unread_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with open_broker(f"file:{tmp_path}/log") as broker:
        for _ in range(5):
            TopicWriter(broker, "a").plain("value")
    directory = ExportDirectory(str(tmp_path / "table"), VERSIONS)
    stop = threading.Event()
    waits: list[float] = []

    def write(*_: object) -> int:
        Path(directory.writing).mkdir(parents=True)
        return 1

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if seconds:
            stop.set()

    monkeypatch.setattr(Export, "_cores", 2)
    monkeypatch.setattr(Export, "_write", write)
    monkeypatch.setattr(stop, "wait", wait)
    options = reading_options(f"file:{tmp_path}/log")
    with directory.locked():
        job = Export(None, options, directory, messages=2, on_progress=said.append)  # type: ignore[arg-type]  # not used
        run = job.follow(stop, 60.0)
    assert run is not None
    assert (run.number, waits) == (3, [0.0, 0.0, 60.0])
    assert [text.endswith("; the next run exports more") for text in said] == [True, True, False]


def test_an_error_of_spark_becomes_one_line() -> None:
    text = "[PYTHON_DATA_SOURCE_ERROR] x\nTraceback\nbroker_io.errors.ServiceUnavailable: no service answers\n\tat jvm"
    found = job_error(text)
    assert (str(found), found.exit_code, found.retryable) == ("no service answers", 3, True)
    assert str(job_error("\n  Job aborted. \n at x")) == "Spark failed: Job aborted."
    assert job_error("txnbuffer.errors.Nothing: x").exit_code == 5


def test_the_cause_of_a_failure_in_the_jvm_is_named() -> None:
    text = (
        "An error occurred while calling o59.parquet.\n: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task "
        "failed while writing rows to file:/x.\n\tat a\nCaused by: java.lang.B: b\n\tat c\nCaused by: "
        "java.io.IOException: No space left on device\n\tat d\n"
    )
    assert str(job_error(text)) == (
        "Spark failed: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/x. "
        "(java.io.IOException: No space left on device)"
    )
    assert str(job_error("An error occurred while calling o1.x", "Spark does not start")).startswith(
        "Spark does not start: An"
    )
