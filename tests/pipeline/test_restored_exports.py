"""Exports of latest values that continue, if data loss is allowed, on a log restored from an older copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from writing import TopicWriter

from broker_io import open_broker
from txnbuffer.errors import LogReplaced, LogTruncated
from txnbuffer.pipeline.delta import DELTA, PARQUET, target
from txnbuffer.pipeline.exports import LATEST
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.options import reading_options


class Exported:
    """The latest values of a log in files that can be saved and restored."""

    def __init__(self, spark: Any, path: Path, form: str) -> None:
        self.spark = spark
        self.path = path
        self.address = f"file:{path}/log"
        self.directory = target(str(path / "table"), LATEST, form)

    def send(self, **values: str) -> None:
        with open_broker(self.address) as broker:
            for key, value in values.items():
                TopicWriter(broker, "orders").plain(value, key=key)
            TopicWriter(broker, "stock").plain("other", key=str(values))

    def save(self) -> None:
        shutil.copytree(self.path / "log", self.path / "saved")

    def restore(self) -> None:
        shutil.rmtree(self.path / "log")
        shutil.copytree(self.path / "saved", self.path / "log")

    def run(self, *, skip_lost: bool = False) -> None:
        options = reading_options(self.address) | {"fail_on_data_loss": "false" if skip_lost else "true"}
        with self.directory.locked():
            Export(self.spark, options, self.directory, on_progress=lambda _: None).run()

    def files(self) -> list[str]:
        run = self.directory.last()
        assert run is not None
        return self.directory.files(run)

    def values(self) -> dict[str, str]:
        rows = [row for file in self.files() for row in pq.read_table(file).to_pylist() if row["topic"] == "orders"]
        return {row["key"].decode(): row["value"].decode() for row in rows}


@pytest.fixture
def made(spark: Any, tmp_path: Path) -> Callable[[str], Exported]:
    return lambda form: Exported(spark, tmp_path, form)


def test_lost_records_supersede_nothing(made: Callable[[str], Exported]) -> None:
    export = made(PARQUET)
    export.send(a="1", b="1", c="1")
    export.save()
    export.send(a="lost")
    export.send(b="lost", d="lost")
    export.run()
    export.restore()
    with pytest.raises(LogTruncated):
        export.run()
    export.run(skip_lost=True)
    assert export.values() == {"a": "1", "b": "1", "c": "1"}
    export.send(a="2")
    export.run()
    assert export.values() == {"a": "2", "b": "1", "c": "1"}


def test_lost_records_supersede_nothing_after_the_log_has_grown(made: Callable[[str], Exported]) -> None:
    export = made(DELTA)
    export.send(a="1", b="1")
    export.save()
    export.send(a="lost", b="lost")
    export.run()
    export.restore()
    export.send(a="2")
    export.send(c="2", d="2")
    with pytest.raises(LogReplaced):
        export.run()
    export.run(skip_lost=True)
    assert export.values() == {"a": "2", "b": "1", "c": "2", "d": "2"}


def test_times_are_written_in_microseconds(made: Callable[[str], Exported]) -> None:
    """Whatever the session's settings: `deltalake` finds nothing by the times that Spark writes by default."""
    export = made(PARQUET)
    unit = "spark.sql.parquet.outputTimestampType"
    before = export.spark.conf.get(unit)
    export.send(a="1")
    try:
        export.spark.conf.set(unit, "TIMESTAMP_MILLIS")
        export.run()
        assert export.spark.conf.get(unit) == "TIMESTAMP_MILLIS"
    finally:
        export.spark.conf.set(unit, before)
    assert {str(pq.read_schema(path).field("publish_time").type) for path in export.files()} == {
        "timestamp[us, tz=UTC]"
    }
