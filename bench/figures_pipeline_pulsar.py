"""Committed records of a real broker read and written in bulk with Spark, as record sets."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bench.figures_pipeline import best_pass_seconds
from bench.fresh import fresh
from bench.harness import figure
from bench.pulsar_broker import broker, service
from bench.workload import VALUE_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 2_000_000
TOPIC = "bench"


def both_seconds(address: str, admin: str, records: int) -> dict[str, float]:
    """As `measured`, on local[2]."""
    from txnbuffer.pipeline.spark.session import open_session

    spark = open_session("local[2]", settings={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    seconds = measured(spark, {"broker": address, "pulsar.admin_url": admin}, records)
    spark.stop()
    return seconds


def measured(spark: SparkSession, options: dict[str, str], records: int) -> dict[str, float]:
    """Seconds of one job that writes records, and of one pass that reads them."""
    frame = spark.range(0, records, 1, 4).selectExpr(
        "CAST(id AS STRING) key", f"left(sha2(CAST(id AS STRING), 512), {VALUE_BYTES}) value"
    )
    start = time.perf_counter()
    frame.write.format("txnbuffer").mode("append").options(topic=TOPIC, batching="records", **options).save()
    written = time.perf_counter() - start
    found = spark.read.format("txnbuffer").options(topics=TOPIC, columns="key,value", **options).load()
    if (count := found.count()) != records:
        raise RuntimeError(f"{count} of {records} records were read")
    return {"write": written, "read": best_pass_seconds(found)}


def seconds_of(records: int) -> dict[str, Any]:
    address = f"{broker().url}/{broker().namespace()}"
    with service(address):
        seconds: dict[str, Any] = fresh(
            "bench.figures_pipeline_pulsar", "both_seconds", address, broker().admin, records
        )
    return seconds


@figure("pipeline.read_records_per_s.pulsar", unit="records/s", goal=">= 300000")
def read_pulsar() -> float:
    return RECORDS / float(seconds_of(RECORDS)["read"])


@figure("pipeline.write_records_per_s.pulsar", unit="records/s")
def write_pulsar() -> float:
    return RECORDS / float(seconds_of(RECORDS)["write"])
