"""Jobs that export and audit a log while its topics change."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from export_world import TOPICS, address_of, killed, options_of, wanted
from pipeline.record_digests import record_digest
from pipeline_world import Life, records_of
from pyspark.sql import DataFrame

from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.pipeline import exports
from txnbuffer.pipeline.delta import DELTA, PARQUET, target
from txnbuffer.pipeline.exports import LATEST, VERSIONS, ExportDirectory
from txnbuffer.pipeline.jobs import export as reading
from txnbuffer.pipeline.jobs.audit import MASK, as_json, as_page, audit, key_digests
from txnbuffer.pipeline.jobs.export import Export, latest_of
from txnbuffer.pipeline.jobs.latest import latest
from txnbuffer.pipeline.jobs.running import JobFailed, report_progress, source


def expected(broker: Broker, kind: str) -> list[tuple[Any, ...]]:
    return [(record.topic, record.position, record.key, record.value) for record in wanted(broker, kind)]


def exported(spark: Any, directory: ExportDirectory) -> list[tuple[Any, ...]]:
    return rows_of(spark.read.parquet(directory.table))


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    rows = frame.select("topic", "position", "key", "value").collect()
    plain = [(row[0], Position(*row[1]), *(None if item is None else bytes(item) for item in row[2:])) for row in rows]
    return sorted(plain, key=lambda row: row[:2])


@pytest.mark.parametrize("kind", [VERSIONS, LATEST])
def test_an_export_continues_where_it_ended(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ExportDirectory(str(tmp_path / "export"), kind)
    said: list[str] = []
    job = Export(spark, options_of(tmp_path), directory, on_progress=said.append)
    with directory.locked():
        first = job.run()
        assert first is not None
        assert exported(spark, directory) == expected(broker, kind)
        assert f"run 1: {first.records:,} records" in said[-1]
        for life in lives:
            life.run(25)
        with monkeypatch.context() as patch:
            patch.setattr(exports.os, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                job.run()
        assert directory.last() == first
        second = Export(spark, options_of(tmp_path), directory).run()
        assert second is not None
        assert second.number == 2
        assert exported(spark, directory) == expected(broker, kind)
        assert job.run() is None
    found = audit(spark, options_of_audit(tmp_path), directory, on_progress=said.append)
    assert (found.same, found.differences, found.unproven) == (True, (), 0)
    assert sum(one.export.records for one in found.ranges) == len(expected(broker, kind))


@pytest.mark.parametrize("form", [PARQUET, DELTA])
def test_the_latest_values_of_an_export_are_those_of_its_log(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MIN_TASK_BYTES", 1)  # so that there are several tasks
    directory = target(str(tmp_path / "export"), VERSIONS, form)
    for number in (1, 2):
        with directory.locked():
            Export(spark, options_of(tmp_path), directory).run()
        for life in lives if number == 1 else ():
            life.run(25)
    with directory.reading() as run:
        assert run is not None
        assert rows_of(latest_of(spark, directory, run)) == expected(broker, LATEST)
        ours = latest_of(spark, directory, run, deleted=True)
        plain = latest(directory.frame(spark, run).select(*run.columns), deleted=True)
        assert ours.schema == plain.schema
        assert sorted(map(str, ours.collect())) == sorted(map(str, plain.collect()))
        with pytest.raises(InvalidRequest, match="no column key"):
            latest_of(spark, directory, replace(run, columns=("topic", "position")))


def options_of_audit(tmp_path: Path) -> dict[str, str]:
    return {"broker": address_of(tmp_path)}


def test_an_audit_names_the_differences(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    directory = ExportDirectory(str(tmp_path / "export"), LATEST)
    with directory.locked():
        run = Export(spark, options_of(tmp_path), directory).run()
        assert run is not None
        table = spark.read.parquet(directory.table)
        wrong = "CASE WHEN key = X'61' AND topic = 'orders' THEN X'00' ELSE value END value"
        nowhere = "IF(key = X'61' AND topic = 'stock', NULL, position) position"
        marked = "IF(key = X'FF' AND topic = 'orders', map('x', 'y'), properties) properties"
        time = "IF(key = X'FF' AND topic = 'stock', TIMESTAMP'2001-01-01 00:00:00', event_time) event_time"
        named = _with(table.columns, wrong, nowhere, marked, time)
        changed = table.where("topic = 'orders' OR key != X'62'").selectExpr(*named)
        changed.coalesce(1).write.parquet(directory.writing)
        directory.publish(exports.ExportRun(2, LATEST, run.columns, run.offset, run.records))

    def export_meanwhile(line: str) -> None:
        if line.startswith("auditing"):
            for number in (3, 4):
                directory.clear()
                shutil.copytree(os.path.realpath(directory.table), directory.writing)
                directory.publish(exports.ExportRun(number, LATEST, run.columns, run.offset, run.records))

    found = audit(spark, options_of_audit(tmp_path), directory, on_progress=export_meanwhile)
    there = {(row[0], row[2]) for row in expected(broker, LATEST)}
    lost = [("orders", b"a", "different"), ("orders", b"\xff", "different"), ("stock", b"a", "different")]
    lost += [("stock", b"b", "in the log only"), ("stock", b"\xff", "different")]
    assert there >= {("orders", b"\xff"), ("stock", b"a"), ("stock", b"\xff")}
    assert [(one.topic, one.key, one.what) for one in found.differences] == [one for one in lost if one[:2] in there]
    assert found.different == len(found.differences) > 0
    report = as_json(found)
    assert (report["same"], report["run"]) == (False, 2)
    assert len(report["topics"]) == 2
    shown = as_page(found, directory.path, "<log>")
    assert "&lt;log&gt;" in shown
    assert "<svg" in shown
    broker.delete_topic("stock")
    said: list[str] = []
    found = audit(spark, options_of_audit(tmp_path), directory, on_progress=said.append)
    assert "topic stock was deleted after the export" in said[0]
    assert (found.gone, found.same) == (("stock",), False)
    assert [one.key for one in found.differences] == [key for topic, key, _ in lost[:2] if (topic, key) in there]
    assert {one.topic for one in found.topics()} == {"orders"}
    assert as_json(found)["deleted_topics"] == ["stock"]
    assert "because they were deleted: stock" in as_page(found, directory.path, "log")


def test_an_audit_reports_stray_rows_and_trimmed_keys(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path
) -> None:
    directory = ExportDirectory(str(tmp_path / "export"), VERSIONS)
    before = expected(broker, VERSIONS)
    nowhere = "named_struct('ledger', -1L, 'entry', 0L, 'batch', -1L)"
    strange = ["'bogus' topic", "CAST(NULL AS STRING) topic", f"IF(true, NULL, {nowhere}) position"]
    strange += [f"{nowhere} position", "named_struct('ledger', 0L, 'entry', 0L, 'batch', -1L) position"]
    with directory.locked():
        run = Export(spark, options_of(tmp_path), directory).run()
        assert run is not None
        one = spark.read.parquet(directory.table).where("topic = 'orders'").limit(1)
        rows = [one.selectExpr(*_with(one.columns, text, f"X'0{n}' key")) for n, text in enumerate(strange)]
        reduce(DataFrame.unionByName, rows).coalesce(1).write.parquet(directory.writing)
        directory.publish(exports.ExportRun(2, VERSIONS, run.columns, run.offset, len(strange)))
    for life in lives:
        life.manager.pump()
        life.manager.snapshot(life.topic)
        life.manager.trim(life.topic, broker.ledgers(life.topic)[-1].ledger)
    origins = {topic: broker.ledgers(topic)[0].ledger for topic in TOPICS}
    left = {(topic, key) for topic, position, key, _ in before if position.ledger >= origins[topic]}
    found = audit(spark, options_of_audit(tmp_path), directory)
    only = "in the export only"
    assert sorted((one.topic, one.key, one.what) for one in found.differences) == [
        ("", b"\x01", only), ("bogus", b"\x00", only), *(("orders", key, only) for key in (b"\x02", b"\x03", b"\x04")),
    ]  # fmt: skip
    assert found.different == 5
    assert found.unproven == len({(row[0], row[2]) for row in before} - left) > 0


def _with(columns: list[str], *changed: str) -> list[str]:
    names = {text.split()[-1]: text for text in changed}
    return [names.get(name, name) for name in columns]


def test_trimming_a_log_during_its_audit_is_an_error(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path
) -> None:
    directory = ExportDirectory(str(tmp_path / "export"), VERSIONS)
    with directory.locked():
        Export(spark, options_of(tmp_path), directory).run()

    def trim(line: str) -> None:
        for life in lives if line.startswith("auditing") else ():
            life.manager.pump()
            life.manager.snapshot(life.topic)
            life.manager.trim(life.topic, broker.ledgers(life.topic)[-1].ledger)

    with pytest.raises(JobFailed, match=r"^topic orders.* was trimmed, deleted or created again during") as failed:
        audit(spark, options_of_audit(tmp_path), directory, on_progress=trim)
    assert failed.value.retryable


def test_digests_equal_those_of_spark(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    sums: dict[tuple[str, bytes | None], int] = {}
    for record in (record for topic in TOPICS for record in records_of(broker, topic)):
        more = record.event_time * 1000, record.properties
        digest = record_digest(record.topic, record.key, record.value, record.position, *more)
        sums[record.topic, record.key] = (sums.get((record.topic, record.key), 0) + digest) & MASK
    rows = key_digests(source(spark, options_of(tmp_path)), versions=True).collect()
    found = {
        (row.topic, None if row.key is None else bytes(row.key)): (row.low + (row.high << 32)) & MASK for row in rows
    }
    assert found == sums


def test_impossible_exports_are_rejected(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    directory = ExportDirectory(str(tmp_path / "export"), VERSIONS)
    with pytest.raises(InvalidRequest, match="unknown column colour"):
        Export(spark, options_of(tmp_path), directory, columns=("colour",))
    with directory.locked():
        assert Export(spark, options_of(tmp_path), directory, columns=("key",), messages=5).run()
        with pytest.raises(InvalidRequest, match="has the columns topic, position, key"):
            Export(spark, options_of(tmp_path), directory).run()
        with pytest.raises(InvalidRequest, match="has no column value"):
            audit(spark, options_of_audit(tmp_path), directory)
        for life in lives:
            broker.delete_topic(life.topic)
            broker.create_topic(life.topic)
        with pytest.raises(TopicNotFound, match="was deleted and created again"):
            Export(spark, options_of(tmp_path), directory, columns=("key",)).run()
    with (
        pytest.raises(JobFailed, match="topic 'missing' does not exist") as failed,
        report_progress(spark, "", print),
    ):
        source(spark, {**options_of_audit(tmp_path), "topics": "missing"}).count()
    assert failed.value.exit_code == 2
    assert os.listdir(tmp_path / "export" / "run=1")


def test_trimmed_records_are_not_compared(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    exports_of = {kind: ExportDirectory(str(tmp_path / kind), kind) for kind in (VERSIONS, LATEST)}
    for life in lives:
        while life.sent:
            life.end()
        life.roll()
        life.plain()
        life.plain()
        life.snapshot()
        life.snapshot()
    for directory in exports_of.values():
        with directory.locked():
            assert Export(spark, options_of(tmp_path), directory).run()
    for life in lives:
        life.manager.trim(life.topic, broker.ledgers(life.topic)[-1].ledger)
    first = {topic: broker.ledgers(topic)[0].ledger for topic in TOPICS}
    there = {(record.topic, record.key) for topic in TOPICS for record in records_of(broker, topic)}
    rows = exported(spark, exports_of[LATEST])
    gone = [row for row in rows if row[1].ledger < first[row[0]] and (row[0], row[2]) not in there]
    assert 0 < len(gone) < len(rows)
    latest = audit(spark, options_of_audit(tmp_path), exports_of[LATEST])
    assert (latest.same, latest.unproven) == (True, len(gone))
    versions = audit(spark, options_of_audit(tmp_path), exports_of[VERSIONS])
    assert versions.same
    kept = [row for row in exported(spark, exports_of[VERSIONS]) if row[1].ledger >= first[row[0]]]
    assert sum(one.export.records for one in versions.ranges) == len(kept) > 0
