"""The source and the sink on a cluster in miniature, where executors and drivers die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service_process import ServiceProcess
from spark_cluster import Driver, SparkCluster
from spark_frames import assert_soon_same_rows, run_out

from txnbuffer import connect


def test_what_is_read_and_written_where_executors_and_drivers_are_killed(spark: Any, tmp_path: Path) -> None:
    texts = [str(number) for number in range(60)]
    with ServiceProcess(tmp_path / "log") as service, SparkCluster(tmp_path) as cluster:
        address = f"txnbuf://127.0.0.1:{service.port}"
        with connect(address) as client:
            for text in texts:
                with client.transaction() as txn:
                    txn.send("source", text, key=text)
        driver = Driver(cluster.url, address, str(tmp_path))
        try:
            read, tasks = driver.said("read")
            assert read == sorted(texts)
            assert tasks > 2
            assert driver.said("killed") is True
            assert driver.said("speculated") is True
            assert driver.said("streaming") is True
        finally:
            driver.end(gently=False)

        def found(topic: str) -> Any:
            frame = spark.read.format("txnbuffer").options(broker=address, topics=topic).load()
            return frame.selectExpr("CAST(value AS STRING)")

        for topic in ("killed", "speculated"):
            assert_soon_same_rows(found(topic), spark.range(40).selectExpr("CAST(id AS STRING) value"))
        run_out(
            spark.readStream.format("txnbuffer")
            .options(broker=address, topics="source", columns="key,value")
            .load()
            .writeStream.format("txnbuffer")
            .options(broker=address, topic="streamed", checkpointLocation=f"{tmp_path}/checkpoint")
        )
        assert_soon_same_rows(found("streamed"), spark.range(60).selectExpr("CAST(id AS STRING) value"))
