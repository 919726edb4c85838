"""The data source `txnbuffer`: committed records of topics as rows.

    from txnbuffer.pipeline.spark.source import register

    register(spark)
    spark.read.format("txnbuffer").option("broker", "file:DIR").option("topics", "orders").load()

What is read is fixed when Spark plans a query: each action plans anew, and sees what is decided by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer.pipeline.arrow import record_batch, schema_of
from txnbuffer.pipeline.options import READ_COMMITTED, ReadOptions
from txnbuffer.pipeline.planning import Fixed, Plan, plan
from txnbuffer.pipeline.ranges import Range
from txnbuffer.pipeline.reading import Judge, read_range

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

NAME = "txnbuffer"

POSITION = StructType([StructField(axis, LongType()) for axis in ("ledger", "entry", "batch")])
TYPES: dict[str, DataType] = {
    "topic": StringType(),
    "position": POSITION,
    "seqno": LongType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "properties": MapType(StringType(), StringType()),
    "txn": StringType(),
    "event_time": TimestampType(),
    "publish_time": TimestampType(),
    "outcome": StringType(),
}


def register(spark: SparkSession) -> None:
    """Make the format `txnbuffer` known to a session."""
    spark.dataSource.register(TxnbufferSource)


class TxnbufferSource(DataSource):
    """Options: see docs/pipeline.md."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return StructType([StructField(name, TYPES[name]) for name in self._read_options().columns])

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(self._read_options())

    def _read_options(self) -> ReadOptions:
        return ReadOptions.of({name: text for name, text in self.options.items() if name.lower() != "path"})


class Task(InputPartition):
    """Ranges that one task reads, one after the other."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        self.ranges = ranges


class BatchReader(DataSourceReader):
    """Spark pickles it between planning and reading: once for the query, so that tasks share what it holds."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = replace(options, broker=absolute(options.broker))
        self._plan: Plan | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get the verdicts with the reader, which Spark sends before it asks for the partitions."""
        return {"_options": self._options, "_plan": Plan((), self._planned().topics)}

    def partitions(self) -> list[InputPartition]:
        return [Task(ranges) for ranges in self._planned().tasks] or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Task):
            raise TypeError("a task reads the ranges that were planned for it")
        return read_ranges(self._options, partition.ranges, self._planned().topics)

    def _planned(self) -> Plan:
        if self._plan is None:
            with open_for_reading(self._options.broker) as broker:
                self._plan = plan(broker, self._options)
        return self._plan


def read_ranges(
    options: ReadOptions, ranges: tuple[Range, ...], topics: Mapping[str, Fixed]
) -> Iterator[pa.RecordBatch]:
    """What stands in ranges, as Arrow record batches with the columns of the options."""
    if not ranges:
        return
    schema = schema_of(options.columns)
    with open_for_reading(options.broker) as broker:
        for one in ranges:
            judge = judge_of(options, topics[one.topic])
            for rows in read_range(broker, one, judge, fail_on_data_loss=options.fail_on_data_loss):
                yield record_batch(rows, schema)


def judge_of(options: ReadOptions, fixed: Fixed) -> Judge:
    return Judge(
        fixed.topic,
        fixed.verdicts,
        fixed.registered,
        isolated=options.isolation == READ_COMMITTED,
        keep_hidden=options.include_aborted,
    )


def open_for_reading(address: str) -> Broker:
    """A broker that changes nothing, so that a log in files may belong to another process."""
    return open_broker(address, read_only=True) if address.startswith("file:") else open_broker(address)


def absolute(address: str) -> str:
    """The same address for processes in other directories."""
    scheme, _, rest = address.partition(":")
    return f"file:{os.path.abspath(rest)}" if scheme == "file" else address
