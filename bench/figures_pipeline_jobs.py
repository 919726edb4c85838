"""Spark jobs: exporting a log, the latest value of each key, and the cost of a record in a large export."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.figures_log import TOPIC, append_all
from bench.figures_pipeline import pass_seconds
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.log_owner import LogOwner
from bench.workload import KEY_BYTES, VALUE_BYTES, batches, end_of
from broker_io import open_broker
from broker_io.batch import Blobs
from txnbuffer.model import Outcome, TxnId
from txnbuffer.pipeline.delta import DELTA, PARQUET, find, target
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory, ExportRun
from txnbuffer.protocol import transactional

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = 5_000_000
TXN_RECORDS = 1_000
AT_ONCE = 500_000
"""Records that are generated at a time."""

LATEST_RECORDS, KEYS = 10_000_000, 1_000_000
FILES = 8
FEW, MANY = 1_000_000, 50_000_000
HARDLY_ANY = 10_000
LARGE_TASK = 640 * 1024 * 1024
"""Bytes of the log that a task of the search for the latest records reads: two tasks for ten million records."""
COLUMNS = ("topic", "position", "key", "value")
PEERS = ("row_number", "max_by")


def write_log(address: str, records: int, keys: int | None = None) -> None:
    """Write records in committed transactions of 1,000, with `keys` distinct keys; None: one key per record."""
    chance = np.random.default_rng(2)
    with open_broker(address) as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register(TOPIC)
        number = 0
        with broker.writer(TOPIC) as writer:
            for first in range(0, records, AT_ONCE):
                appends = []
                for batch in batches(min(AT_ONCE, records - first), TXN_RECORDS):
                    number += 1
                    if keys is not None:
                        batch = replace(batch, keys=_keys(chance, len(batch), keys))
                    appends.append(transactional(batch, TxnId(0, number), 1))
                    appends.append(end_of(range(number, number + 1), Outcome.COMMIT, len(batch)))
                append_all(writer, appends)
                manager.pump()


def write_versions(directory: str, records: int, keys: int) -> None:
    """Write one run of an export to Parquet files: records of repeated keys, in the order of a log."""
    from txnbuffer.pipeline.offsets import Offset

    export = ExportDirectory(directory, VERSIONS)
    with export.locked():
        _write_versions(export.writing, records, keys)
        export.publish(ExportRun(1, VERSIONS, COLUMNS, Offset({}), records))


def _write_versions(directory: str, records: int, keys: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from txnbuffer.client.reading.arrow import binary, fixed, strings
    from txnbuffer.pipeline.arrow import TYPES

    chance = np.random.default_rng(1)
    schema = pa.schema([(name, TYPES[name]) for name in COLUMNS])
    Path(directory).mkdir(parents=True)
    share = -(-records // FILES)
    for file in range(FILES):
        with pq.ParquetWriter(f"{directory}/part-{file}.parquet", schema, compression="zstd") as writer:
            for first in range(file * share, min((file + 1) * share, records), AT_ONCE // 4):
                count = min(AT_ONCE // 4, min((file + 1) * share, records) - first)
                numbers = np.arange(first, first + count)
                axes = [fixed(axis, pa.int64()) for axis in (numbers // 100_000, numbers % 100_000, np.full(count, -1))]
                columns = [
                    strings([TOPIC] * count),
                    pa.StructArray.from_arrays(axes, fields=[*TYPES["position"]]),
                    binary(_keys(chance, count, keys)),
                    binary(_blobs(chance.bytes(count * VALUE_BYTES), VALUE_BYTES, count)),
                ]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _keys(chance: np.random.Generator, count: int, keys: int) -> Blobs:
    return _blobs(chance.integers(0, keys, count).astype(">u8").tobytes(), KEY_BYTES, count)


def _blobs(data: bytes, width: int, count: int) -> Blobs:
    return Blobs(data, np.arange(0, (count + 1) * width, width, dtype=np.int32), None)


def plans(spark: SparkSession, path: str) -> dict[str, DataFrame]:
    """The latest record of each key, of an export or a log: the plans of this package, and the two usual ones in SQL.

    `frame` is the plan for any data frame.
    """
    from txnbuffer.pipeline.jobs.export import latest_of
    from txnbuffer.pipeline.jobs.latest import latest

    if path.startswith("file:"):
        options = {"broker": path, "topics": TOPIC, "columns": ",".join(COLUMNS)}
        frame = spark.read.format("txnbuffer").options(**options).load()
        whole = {**options, "latest": "true", "partition_bytes": str(LARGE_TASK)}
        ours = latest(spark.read.format("txnbuffer").options(**whole).load(), thinned=True)
    else:
        export = find(path)
        run = export.last()
        if run is None:
            raise RuntimeError(f"there is no export at {path}")
        frame = export.frame(spark, run).select(*COLUMNS)
        ours = latest_of(spark, export, run)
    frame.createOrReplaceTempView("versions")
    ranked = "SELECT *, row_number() OVER (PARTITION BY topic, key ORDER BY position DESC) rank FROM versions"
    by_key = "max(position) position, max_by(value, position) value"
    return {
        "ours": ours,
        "frame": latest(frame),
        "row_number": spark.sql(f"SELECT topic, position, key, value FROM ({ranked}) WHERE rank = 1"),
        "max_by": spark.sql(f"SELECT topic, key, {by_key} FROM versions GROUP BY topic, key"),
    }


def latest_seconds(path: str, mine: str) -> dict[str, float]:
    """Seconds of the plan `mine` and of those of the peers on local[2]; each has run once before."""
    spark = session()
    seconds = {}
    chosen = {name: frame for name, frame in plans(spark, path).items() if name in (mine, *PEERS)}
    for name, frame in chosen.items():
        pass_seconds(frame)
        seconds[name] = pass_seconds(frame)
    spark.stop()
    return seconds


def export_seconds(directory: str, *logs: str) -> list[float]:
    """Seconds of the first export of each log on local[2], after a warm-up export."""
    spark = session()
    seconds = [export(spark, f"file:{log}", f"{directory}/{number}") for number, log in enumerate([logs[0], *logs])]
    spark.stop()
    return seconds[1:]


def format_seconds(directory: str, log: str) -> dict[str, float]:
    """Seconds of the first export of a log on local[2] in each format, after a warm-up export."""
    spark = session()
    seconds = {}
    for warm in (True, False):
        for form in (PARQUET, DELTA):
            seconds[form] = export(spark, f"file:{log}", f"{directory}/{form}-{warm}", form)
    spark.stop()
    return seconds


def session() -> SparkSession:
    from txnbuffer.pipeline.jobs.running import SETTINGS
    from txnbuffer.pipeline.spark.session import open_session

    return open_session("local[2]", settings={**SETTINGS, "spark.driver.memory": "3g"})


def export(spark: SparkSession, address: str, directory: str, form: str = PARQUET) -> float:
    from txnbuffer.pipeline.jobs.export import Export
    from txnbuffer.pipeline.options import reading_options

    to = target(directory, VERSIONS, form)
    start = time.perf_counter()
    with to.locked():
        Export(spark, reading_options(address), to, columns=COLUMNS, on_progress=lambda _: None).run()
    return time.perf_counter() - start


@figure("pipeline.export_records_per_s", unit="records/s", goal=">= 1000000")
def export_records() -> float:
    with tempfile.TemporaryDirectory() as directory:
        write_log(f"file:{directory}/log", RECORDS)
        (seconds,) = fresh("bench.figures_pipeline_jobs", "export_seconds", directory, f"{directory}/log")
    return float(RECORDS / seconds)


@figure("pipeline.delta_records_per_s", unit="records/s", peer="the same export to Parquet files")
def delta_records() -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        write_log(f"file:{directory}/log", RECORDS)
        seconds = fresh("bench.figures_pipeline_jobs", "format_seconds", directory, f"{directory}/log")
    return Pair(RECORDS / seconds[DELTA], RECORDS / seconds[PARQUET])


@figure(
    "pipeline.latest_records_per_s",
    unit="records/s",
    goal=">= 1500000",
    peer="Spark SQL, the faster of row_number and max_by",
)
def latest_records() -> Pair:
    """From an export of all versions to Parquet files, which the tasks of this package open themselves."""
    return _latest_of_export("ours")


@figure("pipeline.latest_records_per_s.frame", unit="records/s", peer="Spark SQL, the faster of row_number and max_by")
def latest_of_frame() -> Pair:
    """From the same files as Spark reads them, as from any other data frame."""
    return _latest_of_export("frame")


def _latest_of_export(mine: str) -> Pair:
    with tempfile.TemporaryDirectory() as directory:
        write_versions(f"{directory}/versions", LATEST_RECORDS, KEYS)
        seconds = fresh("bench.figures_pipeline_jobs", "latest_seconds", f"{directory}/versions", mine)
    return _compared_with_sql(seconds, mine)


@figure("pipeline.latest_records_per_s.log", unit="records/s", peer="Spark SQL, the faster of row_number and max_by")
def latest_of_log() -> Pair:
    """From a log, where the reading tasks omit records that they see superseded; Spark SQL gets all records."""
    with tempfile.TemporaryDirectory() as directory:
        write_log(f"file:{directory}/log", LATEST_RECORDS, KEYS)
        seconds = fresh("bench.figures_pipeline_jobs", "latest_seconds", f"file:{directory}/log", "ours")
    return _compared_with_sql(seconds, "ours")


def _compared_with_sql(seconds: dict[str, float], mine: str) -> Pair:
    return Pair(LATEST_RECORDS / seconds[mine], LATEST_RECORDS / min(seconds[name] for name in PEERS))


@figure("pipeline.flatness", unit="times", goal="<= 1.2")
def flatness() -> float:
    """Time per record in an export of 50 million over that in one of 1 million, both without start-up."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = (HARDLY_ANY, FEW, MANY)
        for size in sizes:
            write_log(f"file:{directory}/log-{size}", size)
        logs = [f"{directory}/log-{size}" for size in sizes]
        nothing, few, many = fresh("bench.figures_pipeline_jobs", "export_seconds", directory, *logs)
    return float((many - nothing) / MANY / ((few - nothing) / FEW))
