"""The sink and the source on a real cluster: added partitions, failing tasks, a dead driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pulsar_cluster import Cluster
from service_process import ServiceProcess
from spark_frames import assert_soon_same_rows, failing, run_out, small_batches

from bench import figures_pipeline_pulsar
from broker_io.standalone import ask


def rows(spark: Any, first: int, stop: int) -> Any:
    return spark.range(first, stop, 1, 2).selectExpr("CAST(id % 7 AS STRING) key", "CAST(id AS STRING) value")


def test_each_row_is_written_once_despite_failures(
    spark: Any, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    address = {"broker": f"{cluster.url}/{namespace}", "pulsar.admin_url": cluster.admin}

    def write(frame: Any) -> None:
        sink = frame.write.format("txnbuffer").mode("append")
        sink.options(topic="wide", batching="records", **address).save()

    def copy() -> None:
        """Copy new records in one or two micro-batches, each of whose tasks fails once."""
        source = spark.readStream.format("txnbuffer").options(
            pattern="wide-partition-.*", columns="key,value", max_messages_per_trigger="6", **address
        )
        sink = source.load().mapInArrow(failing(1), "key binary, value binary").writeStream.format("txnbuffer")
        run_out(sink.options(topic="copy", checkpointLocation=str(tmp_path), **address))

    def read(**topics: str) -> Any:
        frame = spark.read.format("txnbuffer").options(**topics, **address).load()
        return frame.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")

    ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "PUT", 2)
    with ServiceProcess(address["broker"], "--admin-url", cluster.admin), small_batches(spark):
        first = rows(spark, 0, 30)
        write(first.mapInArrow(failing(1), first.schema))
        assert_soon_same_rows(read(pattern="wide-partition-.*"), rows(spark, 0, 30))
        copy()
        last = max((found for found in (tmp_path / "commits").iterdir() if found.name.isdigit()), key=_number)
        for file in (last, last.with_name(f".{last.name}.crc")):  # as if the driver died before it recorded the commit
            file.unlink(missing_ok=True)
        ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "POST", 3)
        write(rows(spark, 30, 60))
        assert_soon_same_rows(read(pattern="wide-partition-.*"), rows(spark, 0, 60))
        copy()
        assert_soon_same_rows(read(topics="copy"), rows(spark, 0, 60))
        assert min(figures_pipeline_pulsar.measured(spark, address, 40).values()) > 0


def _number(file: Path) -> int:
    return int(file.name)
