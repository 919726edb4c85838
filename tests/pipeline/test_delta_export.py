"""Jobs that export a log to Delta tables and audit them, while its topics change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from export_world import address_of, killed, options_of, run_job, wanted
from pipeline_world import Life, Row, row_of, rows_of_batch

from broker_io.port import Broker
from txnbuffer.pipeline.delta import DeltaDirectory, ExportChanged
from txnbuffer.pipeline.exports import LATEST, VERSIONS
from txnbuffer.pipeline.jobs.audit import audit
from txnbuffer.pipeline.jobs.export import Export
from txnbuffer.pipeline.options import COLUMNS


def rows_of(broker: Broker, kind: str) -> list[Row]:
    """All fields of the records, in the order of the columns."""
    return [row_of(record) for record in wanted(broker, kind)]


def exported(path: str) -> list[Row]:
    """The same fields as `deltalake` reads them, without Spark."""
    table = DeltaTable(path).to_pyarrow_table()
    assert table.schema.names == [*COLUMNS]
    assert table.schema.field("publish_time").type == pa.timestamp("us", tz="UTC")
    found = [row for batch in table.to_batches() for row in rows_of_batch(batch)]
    return sorted(found, key=lambda row: row[:2])


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_run_continues_a_delta_table(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "table")
    job = Export(spark, options_of(tmp_path), DeltaDirectory(path, kind), columns=COLUMNS, on_progress=lambda _: None)
    with DeltaDirectory(path, kind).locked():
        first = job.run()
        assert first is not None
        assert exported(path) == rows_of(broker, kind)
        assert first.rows == len(rows_of(broker, kind)) > 0
        for life in lives:
            life.run(25)
        with monkeypatch.context() as patch:
            patch.setattr(DeltaDirectory, "_try", killed)
            with pytest.raises(KeyboardInterrupt):
                job.run()
        assert DeltaDirectory(path, kind).last() == first
        DeltaTable(path).optimize.compact()
        second = job.run()
        assert second is not None
        assert second.number == 2
        assert exported(path) == rows_of(broker, kind)
        assert job.run() is None
    if kind == VERSIONS:  # a table that others changed can only be audited
        write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append")
    found = audit(spark, {"broker": address_of(tmp_path)}, DeltaDirectory(path, kind), on_progress=lambda _: None)
    if kind == LATEST:
        assert (found.same, found.differences, found.unproven) == (True, (), 0)
        assert sum(one.export.records for one in found.ranges) == second.rows
        return
    assert [one.what for one in found.differences] == ["different"]
    with pytest.raises(ExportChanged, match=r"version .* added or removed records"):
        job.run()


@pytest.mark.usefixtures("lives")
def test_the_command_exports_delta_tables(spark: Any, tmp_path: Path) -> None:
    log, path = address_of(tmp_path), str(tmp_path / "table")
    arguments = ("export", log, path, "--topic", "stock", "--format", "delta", "--columns", "key,value")
    code, shown, output = run_job(spark, *arguments)
    assert (code, [row["topic"] for row in shown]) == (0, ["stock"])
    assert "run 1: " in output
    assert "no new records" in run_job(spark, *arguments)[2]
    code, report, _ = run_job(spark, "audit", log, path)
    assert (code, report["same"], report["kind"]) == (0, True, "versions")
    assert shown[0]["records_of_run"] == DeltaTable(path).to_pyarrow_table().num_rows > 0
    assert "_run.json" not in os.listdir(path)
