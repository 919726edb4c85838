"""The data source `txnbuffer` in batch queries, on a log that another process may own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from export_world import address_of, living
from pipeline_world import Life, records_of, row_of, rows_of_spark

from bench import figures_pipeline
from broker_io.port import Broker


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    """Topics with transactions across many small ledgers."""
    with living(tmp_path, 150) as lives:
        yield lives


def source(spark: Any, tmp_path: Path, **options: str) -> Any:
    return spark.read.format("txnbuffer").option("broker", address_of(tmp_path)).options(**options).load()


def test_rows_are_what_a_reader_gets(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    frame = source(spark, tmp_path, pattern=".*", partition_bytes="8000")
    expected = [row_of(record) for topic in ("orders", "stock") for record in records_of(broker, topic)]
    assert rows_of_spark(frame) == expected
    lives[0].plain()
    lives[0].sent = {1_000: 0}
    lives[0].records()
    lives[0].end()
    assert rows_of_spark(source(spark, tmp_path, topics="orders")) == [
        row_of(record) for record in records_of(broker, "orders")
    ]


def test_the_tasks_of_a_long_topic_share_its_filter(
    spark: Any, broker: Broker, lives: list[Life], tmp_path: Path
) -> None:
    frame = source(spark, tmp_path, topics="orders", partition_bytes="2000", columns="value,topic")
    assert frame.columns == ["value", "topic"]
    rows = frame.selectExpr("value", "spark_partition_id() task").collect()
    assert len({row.task for row in rows}) > 5
    assert [None if row.value is None else bytes(row.value) for row in rows] == [
        record.value for record in records_of(broker, "orders")
    ]


def test_places_and_outcomes(spark: Any, broker: Broker, lives: list[Life], tmp_path: Path) -> None:
    records = records_of(broker, "stock")
    first, stop = records[3].position, records[-5].position
    frame = source(spark, tmp_path, topics="stock", start=str(first), end=str(stop), include_aborted="true")
    found = rows_of_spark(frame)
    assert [row[:-1] for row in found if row[-1] == "committed"] == [row_of(record) for record in records[3:-5]]
    hidden = [r for r in records_of(broker, "stock", isolation="read_uncommitted") if first <= r.position < stop]
    assert len(found) == len(hidden)
    everything = source(spark, tmp_path, topics="stock", isolation="read_uncommitted", start='{"stock": "beginning"}')
    assert everything.count() == len(records_of(broker, "stock", isolation="read_uncommitted"))
    assert source(spark, tmp_path, topics="stock", start="end").count() == 0
    assert source(spark, tmp_path, topics="stock", start="2000-01-01T00:00:00", columns="key").count() == len(records)


def test_the_figure_of_reading_reads_everything(spark: Any, tmp_path: Path) -> None:
    figures_pipeline.write_both(str(tmp_path), 3_000)
    frame = figures_pipeline.log_frame(spark, str(tmp_path))
    assert frame.exceptAll(spark.read.parquet(f"{tmp_path}/parquet")).count() == 0
    assert frame.count() == 3_000
    assert figures_pipeline.pass_seconds(frame) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "orders", "colums": "key"}, "unknown option colums"),
        ({"topics": "missing"}, "topic 'missing' does not exist"),
        ({"topics": "orders", "start": "yesterday"}, "option start can't be 'yesterday'"),
    ],
)
def test_the_error_names_what_can_not_be_read(
    spark: Any, lives: list[Life], tmp_path: Path, options: dict[str, str], message: str
) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=message):
        source(spark, tmp_path, **options).count()
