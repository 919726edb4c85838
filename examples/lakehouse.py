"""Lakehouse: a topic as a Parquet table, and a report from it that goes to another topic, with Spark.

1. A streaming query appends the committed records of `orders` to the table `lake/orders`. Its checkpoint says how far
   it is, so each record is in the table once, however often the job is killed.
2. A batch query sums the table by item.
3. The sums are written to the topic `sales` in one transaction: readers see all of the new report or none of it.

    pip install 'txnbuffer[spark]'                  # and Java 17
    echo '{"key": "order-1", "value": {"item": "apples", "count": 3}}' | txnbuf produce file:data orders --json
    python examples/lakehouse.py                    # reads what is new, and ends; run it from a scheduler
    txnbuf tail file:data sales

Spark reads `file:data` also while another process owns it, but only the owner can write to it: to run this beside a
program that is connected, give both the address of a service. A report of many rows is written by Spark's tasks, with
`report.write.format("txnbuffer")`, which needs a service or a cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from txnbuffer import JsonSerializer, connect
from txnbuffer.pipeline.spark.session import open_session

ADDRESS = os.environ.get("TXNBUFFER_ADDRESS", "file:data")
LAKE = Path(os.environ.get("LAKE", "lake")).absolute()


def ingest(spark: SparkSession) -> None:
    """Append the records that were committed since the last run to the table of orders."""
    records = spark.readStream.format("txnbuffer").options(topics="orders", broker=ADDRESS).load()
    order = f.from_json(f.col("value").cast("string"), "item STRING, count LONG")
    table = records.select("topic", "position", f.col("key").cast("string"), "publish_time", order.alias("order"))
    query = (
        table.writeStream.format("parquet")
        .options(path=str(LAKE / "orders"), checkpointLocation=str(LAKE / "checkpoints" / "orders"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def sales(spark: SparkSession) -> DataFrame:
    """Return the number of pieces of each item that were ordered, from the table."""
    orders = spark.read.parquet(str(LAKE / "orders"))
    return orders.groupBy("order.item").agg(f.sum("order.count").alias("count"))


def publish(report: DataFrame) -> None:
    """Write a report to the topic `sales`, in one transaction."""
    rows = report.collect()
    with connect(ADDRESS, serializer=JsonSerializer()) as client, client.transaction() as txn:
        for row in rows:
            txn.send("sales", row.asDict(), key=row["item"])


def main() -> None:
    spark = open_session("local[2]")
    try:
        ingest(spark)
        report = sales(spark)
        report.orderBy("item").show()
        publish(report)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
