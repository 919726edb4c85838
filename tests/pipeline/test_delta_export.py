"""Jobs that export to Delta tables, and audit them, on a log whose topics have lives of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pipeline_world import Life, records_of, row_of, rows_of_batch

from broker_io import open_broker
from broker_io.port import Broker
from snapshots.keeper import BufferKeeper
from txnbuffer.cli.pipeline import command
from txnbuffer.pipeline.delta import DeltaDirectory, ExportChanged
from txnbuffer.pipeline.exports import LATEST, VERSIONS
from txnbuffer.pipeline.jobs import running
from txnbuffer.pipeline.jobs.auditing import audit
from txnbuffer.pipeline.jobs.exporting import Export
from txnbuffer.pipeline.jobs.running import reading_options
from txnbuffer.pipeline.options import COLUMNS

TOPICS = ("orders", "stock")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with open_broker(f"file:{tmp_path}/log") as broker:
        yield broker


@pytest.fixture
def lives(broker: Broker) -> Iterator[list[Life]]:
    with BufferKeeper(broker, part_size=3) as keeper:
        keeper.recover()
        lives = [Life(broker, keeper, topic, seed) for seed, topic in enumerate(TOPICS)]
        for life in lives:
            life.run(40)
        yield lives


def expected(broker: Broker, kind: str) -> list[tuple[Any, ...]]:
    """All that there is to tell of the records, in the order of the columns."""
    records = [record for topic in TOPICS for record in records_of(broker, topic)]
    if kind == LATEST:
        newest = {(record.topic, record.key): record for record in records if record.key is not None}
        records = [record for record in newest.values() if record.value is not None]
    return sorted((row_of(record) for record in records), key=lambda row: row[:2])


def exported(path: str) -> list[tuple[Any, ...]]:
    """The same, of what a reader that knows Delta and no Spark is given."""
    table = DeltaTable(path).to_pyarrow_table()
    assert table.schema.names == [*COLUMNS]
    assert table.schema.field("publish_time").type == pa.timestamp("us", tz="UTC")
    rows = [row for batch in table.to_batches() for row in rows_of_batch(batch)]
    return sorted(rows, key=lambda row: row[:2])


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_a_delta_table_goes_on_where_it_ended(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = str(tmp_path / "table"), {**reading_options(f"file:{tmp_path}/log"), "partition_bytes": "4000"}
    job = Export(spark, options, DeltaDirectory(path, kind), columns=COLUMNS, tell=lambda _: None)
    audited = {"broker": options["broker"]}
    with DeltaDirectory(path, kind).locked():
        first = job.run()
        assert first is not None
        assert exported(path) == expected(broker, kind)
        assert first.rows == len(expected(broker, kind)) > 0
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
        assert exported(path) == expected(broker, kind)
        assert job.run() is None
    if kind == VERSIONS:  # a table that others changed can be audited, and no more
        write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append")
    found = audit(spark, audited, DeltaDirectory(path, kind), tell=lambda _: None)
    if kind == LATEST:
        assert (found.same, found.differences, found.unproven) == (True, (), 0)
        assert sum(one.export.records for one in found.ranges) == second.rows
        return
    assert [one.what for one in found.differences] == ["different"]
    with pytest.raises(ExportChanged, match="was written to in version"):
        job.run()


def test_delta_is_a_format_of_the_command(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, path = f"file:{tmp_path}/log", str(tmp_path / "table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "session", lambda *_: nullcontext(spark))

        def run(*arguments: str) -> tuple[int, Any, str]:
            with pytest.raises(SystemExit) as ended:
                command([*arguments, "--output", "json"])
            out, told = capsys.readouterr()
            return int(ended.value.code or 0), json.loads(out), told

        arguments = ("export", log, path, "--topic", "stock", "--format", "delta", "--columns", "key,value")
        code, rows, told = run(*arguments)
        assert (code, [row["topic"] for row in rows]) == (0, ["stock"])
        assert "run 1: " in told
        assert "nothing is new" in run(*arguments)[2]
        code, report, _ = run("audit", log, path)
        assert (code, report["same"], report["kind"]) == (0, True, "versions")
    assert rows[0]["records_of_run"] == DeltaTable(path).to_pyarrow_table().num_rows > 0
    assert "_run.json" not in os.listdir(path)
