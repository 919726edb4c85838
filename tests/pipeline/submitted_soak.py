"""A job submitted to a Spark cluster does what the command does; run by `make soak`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from export_world import run_job
from pyspark.testing import assertDataFrameEqual
from service_process import ServiceProcess
from spark_cluster import SparkCluster, Submitted

from txnbuffer import connect
from txnbuffer.pipeline.spark.session import check_master


def test_submitted_job_does_what_the_command_does(spark: Any, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "log") as service, SparkCluster(tmp_path / "workers", workers=1) as cluster:
        check_master(cluster.url)
        address = f"txnbuf://127.0.0.1:{service.port}"
        texts = [f"{transaction}-{index}" for transaction in range(8) for index in range(8)]
        with connect(address) as client:
            for transaction in range(8):
                with client.transaction() as aborted, client.transaction() as txn:
                    for text in texts[8 * transaction : 8 * transaction + 8]:
                        txn.send("submitted", text, key=text)
                        aborted.send("submitted", f"never-{text}", key=text)
                    aborted.abort()
        job = ["export", address, "--topic", "submitted"]
        printed = Submitted(cluster.url, *job, str(tmp_path / "there"), "--output", "json").finish()
        assert run_job(spark, *job, str(tmp_path / "here"))[:2] == (0, printed)
        here, there = (spark.read.parquet(str(tmp_path / name / "run=1")) for name in ("here", "there"))
        assertDataFrameEqual(there, here)
        found = here.selectExpr("CAST(value AS STRING)").collect()
        assert Counter(row.value for row in found) == Counter(texts)
