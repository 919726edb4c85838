"""Jobs that read a whole log: the profile, and the recovery of snapshots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from export_world import TOPICS, address_of, living, run_job
from pipeline_world import records_of
from pyspark.testing import assertDataFrameEqual

from broker_io import open_broker
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.pipeline.jobs.latest import latest
from txnbuffer.pipeline.jobs.profile import OUTCOMES, as_page, profile, slice_of
from txnbuffer.pipeline.jobs.recover import recover
from txnbuffer.pipeline.options import reading_options
from txnbuffer.recovery.verify import Level, verify


def write(path: Path, steps: int = 60) -> dict[str, str]:
    """Two topics without an owner; the options to read them."""
    with living(path, steps):
        return reading_options(address_of(path))


def test_a_profile_counts_everything(spark: Any, tmp_path: Path) -> None:
    found = profile(spark, write(tmp_path), on_progress=lambda _: None)
    with open_broker(address_of(tmp_path), read_only=True) as broker:
        visible = {topic: records_of(broker, topic) for topic in TOPICS}
        last = {topic: visible[topic][-1].position for topic in TOPICS}
        there = {
            topic: [r for r in records_of(broker, topic, isolation="read_uncommitted") if r.position <= last[topic]]
            for topic in TOPICS
        }
    for row in found.topics:
        records = visible[row["topic"]]
        assert row["committed"] == len(records)
        assert row["committed_bytes"] == sum(len(r.key or b"") + len(r.value or b"") for r in records)
        assert sum(row[outcome] for outcome in OUTCOMES) >= len(there[row["topic"]])
        assert row["aborted"] > 0
        assert row["transactions"] >= len({r.txn for r in there[row["topic"]] if r.txn})
    weight = sum(row[f"{outcome}_bytes"] for row in found.topics for outcome in OUTCOMES)
    assert sum(row[outcome] for row in found.over_time for outcome in OUTCOMES) == weight
    by_txn = {row["txn"]: row for row in found.large_transactions}
    largest, count = Counter(str(r.txn) for topic in TOPICS for r in there[topic] if r.txn).most_common(1)[0]
    assert by_txn[largest]["records"] >= count
    assert [row["records"] for row in found.hot_keys] == sorted(
        (row["records"] for row in found.hot_keys), reverse=True
    )
    assert {row["key"] for row in found.hot_keys} <= {b"", b"a", b"b", b"\xff"}
    assert sum(row["entries"] for row in found.ledgers) > 0
    assert as_page(found, "<log>").count("<svg") >= 4


def test_the_profile_of_an_empty_log_is_a_page(spark: Any, tmp_path: Path) -> None:
    found = profile(spark, write(tmp_path, 0), on_progress=lambda _: None)
    assert (found.topics, found.over_time, found.hot_keys) == ([], [], [])
    assert "0 records" in as_page(found, "log")


def test_slices_are_round_and_few() -> None:
    assert [slice_of(0, last) for last in (0, 60, 61, 60_000, 3_600_000)] == [1, 1, 10, 1000, 60_000]
    assert slice_of(0, 2**62) == 168 * 3_600_000


def test_lost_snapshots_are_rebuilt(spark: Any, tmp_path: Path) -> None:
    options = write(tmp_path)
    said: list[str] = []
    assert [row["snapshot"] for row in recover(spark, options, on_progress=said.append)] == ["equal", "equal"]
    with open_broker(address_of(tmp_path)) as broker:
        before = {topic: records_of(broker, topic) for topic in TOPICS}
        broker.delete_topic(SNAPSHOT_TOPIC)
    rows = recover(spark, options, wanted=True, on_progress=said.append)
    assert [(row["topic"], row["written"]) for row in rows] == [(topic, True) for topic in TOPICS]
    assert said[-1] == "2 of 2: wrote the snapshot of stock"
    with open_broker(address_of(tmp_path), read_only=True) as broker:
        assert [one for one in verify(broker) if one.level is Level.ERROR] == []
        assert {topic: records_of(broker, topic) for topic in TOPICS} == before
        assert [row["visible_records"] for row in rows] == [len(before[topic]) for topic in TOPICS]


def test_the_latest_record_of_each_key(spark: Any) -> None:
    schema = "topic string, position struct<ledger: long, entry: long, batch: long>, key binary, value binary"
    rows = [
        ("a", (1, 2, -1), b"k", b"old"), ("a", (2, 0, 3), b"k", b"new"), ("a", (2, 0, 2), b"k", b"between"),
        ("b", (1, 0, -1), b"k", b"other"), ("a", (3, 0, -1), None, b"none"), ("a", (1, 0, -1), b"gone", b"1"),
        ("a", (4, 0, -1), b"gone", None),
    ]  # fmt: skip
    frame = spark.createDataFrame(rows, schema)
    assertDataFrameEqual(latest(frame), spark.createDataFrame([rows[1], rows[3]], schema))
    assertDataFrameEqual(latest(frame, deleted=True), spark.createDataFrame([rows[1], rows[3], rows[6]], schema))


def test_jobs_are_commands(spark: Any, tmp_path: Path) -> None:
    write(tmp_path)
    log, table = address_of(tmp_path), str(tmp_path / "table")
    export = ("export", log, table, "--topic", "stock", "--columns", "key,value")
    code, rows, output = run_job(spark, *export)
    assert (code, [row["topic"] for row in rows]) == (0, ["stock"])
    assert "run 1: " in output
    assert "no new records" in run_job(spark, *export)[2]
    code, report, _ = run_job(spark, "audit", log, table, "--html", str(tmp_path / "audit.html"))
    assert (code, report["same"], report["kind"]) == (0, True, "versions")
    code, found, _ = run_job(spark, "profile", log, "--html", str(tmp_path / "profile.html"))
    assert code == 0
    assert {row["topic"] for row in found["topics"]} == {*TOPICS}
    assert (tmp_path / "profile.html").read_text().startswith("<!doctype html>")
    assert "equal for every key" in (tmp_path / "audit.html").read_text()
    assert run_job(spark, "recover", log)[0] == 0
