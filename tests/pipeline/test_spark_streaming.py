"""The data source `txnbuffer` in streaming queries that stop and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline_world import Life, records_of, row_of, rows_of_spark
from spark_frames import run_out

from broker_io import open_broker
from snapshots.keeper import BufferKeeper


def test_a_query_that_goes_on_gives_every_record_once(spark: Any, tmp_path: Path) -> None:
    target = str(tmp_path / "table")

    def run() -> Any:
        frame = spark.readStream.format("txnbuffer").options(
            broker=f"file:{tmp_path / 'log'}", topics="orders", max_messages_per_trigger="60", partition_bytes="4000"
        )
        return run_out(
            frame.load()
            .writeStream.format("parquet")
            .option("path", target)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )

    with open_broker(f"file:{tmp_path / 'log'}") as broker, BufferKeeper(broker) as keeper:
        keeper.recover()
        life = Life(broker, keeper, "orders", 7)
        life.run(60)
        first = run()
        assert len([progress for progress in first.recentProgress if progress.numInputRows]) > 1
        life.run(40)
        run()
        found = rows_of_spark(spark.read.parquet(target))
        expected = [row_of(record) for record in records_of(broker, "orders")]
    assert [(row[1], *row[3:]) for row in found] == [(row[1], *row[3:]) for row in expected]
    assert all(row[2] in (None, right[2]) for row, right in zip(found, expected, strict=True))
