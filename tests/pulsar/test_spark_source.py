"""The data source in Spark on logs that are trimmed meanwhile: in files, and on a real cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import Life, Row, records_of, row_of, rows_of_spark
from pulsar_cluster import Cluster
from pyspark.errors import PySparkException, StreamingQueryException
from spark_frames import held, run_out

from bench.log_owner import LogOwner
from broker_io import open_broker
from broker_io.port import Broker

FULL = os.environ.get("SOAK") == "full"
SECONDS = 400.0
TOPIC = "orders"


class World:
    """A topic that its owner writes and trims and Spark reads: transactions span small ledgers and ranges."""

    def __init__(self, spark: Any, broker: Broker, manager: LogOwner, options: dict[str, str]) -> None:
        self.spark = spark
        self.broker = broker
        self.life = Life(broker, manager, TOPIC, 5)
        self.options = {"topics": TOPIC, "partition_bytes": "400", **options}

    def write(self, ledgers: int = 1) -> None:
        """Write transactions, some of which stay open, and ledgers that no snapshot needs."""
        for _ in range(ledgers):
            self.life.run(20)
            self.life.roll()
        while self.life.sent:
            self.life.end()
        self.life.plain()
        self.life.snapshot()
        self.life.snapshot()
        self.life.sent = {self.life.least + 1: 0}  # a long transaction, whose records are not read
        self.life.least += 1
        self.life.records()

    def visible(self) -> list[Row]:
        return [row_of(record, seqno=False) for record in records_of(self.broker, TOPIC)]

    def trim(self) -> None:
        """Drop the ledgers below the last visible record; a cluster may start another one after it at any time."""
        first = self.visible()[-1][1][0]
        assert self.life.manager.trim(TOPIC, first) == first

    def read(self, **options: str) -> Any:
        return self.spark.read.format("txnbuffer").options(**self.options, **options).load()


@pytest.fixture
def world(request: pytest.FixtureRequest, spark: Any, tmp_path: Path) -> Iterator[World]:
    if request.param == "files":
        broker, options = open_broker(f"file:{tmp_path}/log"), {"broker": f"file:{tmp_path}/log"}
    else:
        cluster: Cluster = request.getfixturevalue("cluster")
        opening: Callable[..., Broker] = request.getfixturevalue("opening")
        namespace = request.getfixturevalue("namespace")
        broker = opening()
        options = {"broker": f"{cluster.url}/{namespace}", "pulsar.admin_url": cluster.admin}
    with broker, LogOwner(broker, segment_size=3) as manager:
        manager.recover()
        yield World(spark, broker, manager, options)


@pytest.mark.parametrize("world", ["files", "cluster"], indirect=True)
def test_long_read_fails_or_continues_if_its_log_is_trimmed_meanwhile(world: World, tmp_path: Path) -> None:
    def read(name: str, **options: str) -> list[Row]:
        """Read; the log is trimmed after the first tasks have read some records and before the others start."""
        frame = world.read(**options)
        assert frame.rdd.getNumPartitions() > 4
        (directory := tmp_path / name).mkdir()
        with ThreadPoolExecutor(1) as other:
            rows = other.submit(rows_of_spark, frame.mapInArrow(held(str(directory)), frame.schema))
            deadline = time.monotonic() + SECONDS
            while not (directory / "begun").exists() and not rows.done():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            world.trim()
            (directory / "go").touch()
            return rows.result(400)

    world.write(3)
    with pytest.raises(PySparkException, match="PositionTrimmed"):
        read("strict")
    world.write(3)
    before = world.visible()
    found = read("careless", fail_on_data_loss="false")
    left = world.visible()
    without_seqnos = [(*row[:2], None, *row[3:]) for row in found]
    assert without_seqnos == [row for row in before if row in without_seqnos]
    assert without_seqnos[-len(left) :] == left
    assert len(left) < len(found) < len(before)


@pytest.mark.parametrize("world", ["files", *(["cluster"] if FULL else [])], indirect=True)
def test_restarted_query_returns_every_record_once_though_the_log_is_trimmed(world: World, tmp_path: Path) -> None:
    def run(**options: str) -> Any:
        frame = world.spark.readStream.format("txnbuffer").options(
            **{**world.options, "max_messages_per_trigger": "12", **options}
        )
        return run_out(
            frame.load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "table"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )

    def found() -> list[Row]:
        rows = rows_of_spark(world.spark.read.parquet(str(tmp_path / "table")))
        return [(*row[:2], None, *row[3:]) for row in rows]

    world.write(2)
    expected = world.visible()
    first = run()
    assert len([progress for progress in first.recentProgress if progress.numInputRows]) > 1
    assert found() == expected
    world.trim()  # all of it was read
    read, gone = len(world.visible()), len(expected)
    world.write(2)
    expected += world.visible()[read:]
    run()
    assert found() == expected
    read = len(world.visible())
    world.write(3)
    news = world.visible()[read:]
    world.trim()
    with pytest.raises(StreamingQueryException, match="PositionTrimmed"):
        run()
    assert found() == expected
    run(fail_on_data_loss="false")
    left = [row for row in world.visible() if row in news]
    assert found() == expected + left
    assert gone < len(expected)
    assert 0 < len(left) < len(news)
