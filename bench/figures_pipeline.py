"""Committed records read in bulk with Spark, compared with the same rows in Parquet."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.figures_log import TOPIC, write_committed
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.workload import batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = 5_000_000
TXN_RECORDS = 1_000
COLUMNS = "key,value"
PASSES = 3


def write_both(directory: str, records: int) -> None:
    """Write records to a log, committed in transactions of 1,000, and to Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from txnbuffer.client.reading.arrow import binary

    work = batches(records, TXN_RECORDS)
    write_committed(f"file:{directory}/log", work)
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    Path(directory, "parquet").mkdir()
    per_file = max(len(work) // 8, 1)
    for number in range(0, len(work), per_file):
        with pq.ParquetWriter(f"{directory}/parquet/part-{number}.parquet", schema, compression="zstd") as writer:
            for batch in work[number : number + per_file]:
                writer.write_batch(
                    pa.RecordBatch.from_arrays([binary(batch.keys), binary(batch.values)], schema=schema)
                )


def read_seconds(directory: str, records: int) -> dict[str, float]:
    """Seconds of a pass over all rows on local[2]: over the log, and over the Parquet files."""
    from txnbuffer.pipeline.spark.session import open_session

    spark = open_session("local[2]", settings={"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    log, parquet = log_frame(spark, directory), spark.read.parquet(f"{directory}/parquet")
    for frame in (log, parquet):
        if (count := frame.count()) != records:  # this warms up workers and compilers too
            raise RuntimeError(f"{count} of {records} records were read")
    seconds = {"log": best_pass_seconds(log), "parquet": best_pass_seconds(parquet)}
    spark.stop()
    return seconds


def log_frame(spark: SparkSession, directory: str) -> DataFrame:
    options = {"broker": f"file:{directory}/log", "topics": TOPIC, "columns": COLUMNS}
    return spark.read.format("txnbuffer").options(**options).load()


def best_pass_seconds(frame: DataFrame) -> float:
    """Seconds of the fastest of several passes: the first ones still warm up compilers."""
    return min(pass_seconds(frame) for _ in range(PASSES))


def pass_seconds(frame: DataFrame) -> float:
    start = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - start


@figure(
    "pipeline.read_records_per_s.file",
    unit="records/s",
    goal=">= 3000000",
    peer="Spark, the same rows in Parquet (zstd)",
)
def read_file() -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        write_both(directory, RECORDS)
        seconds = fresh("bench.figures_pipeline", "read_seconds", directory, RECORDS)
    return Pair(RECORDS / seconds["log"], RECORDS / seconds["parquet"])
