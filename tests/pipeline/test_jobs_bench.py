"""The benchmark figures of the jobs, with little data, in the session of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from bench import figures_pipeline_jobs as figures


def test_figures_of_jobs_run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "AT_ONCE", 400)
    monkeypatch.setattr(figures, "TXN_RECORDS", 100)
    figures.write_log(f"file:{tmp_path}/log", 1_000)
    assert figures.export(spark, f"file:{tmp_path}/log", f"{tmp_path}/export") > 0
    assert spark.read.parquet(f"{tmp_path}/export").count() == 1_000
    assert figures.export(spark, f"file:{tmp_path}/log", f"{tmp_path}/delta", figures.DELTA) > 0
    assert len(DeltaTable(f"{tmp_path}/delta").to_pyarrow_table()) == 1_000
    figures.write_versions(f"{tmp_path}/versions", 600, 50)
    figures.write_log(f"file:{tmp_path}/keyed", 600, 50)
    for path in (f"{tmp_path}/versions", f"file:{tmp_path}/keyed"):
        found = figures.plans(spark, path)
        newest = {name: {row.position: bytes(row.value) for row in frame.collect()} for name, frame in found.items()}
        assert newest["ours"] == newest["frame"] == newest["row_number"] == newest["max_by"]
        assert len(newest["ours"]) == 50
