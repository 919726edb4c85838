"""The data source `txnbuffer`: committed records of topics as rows.

    from txnbuffer.pipeline.spark.source import register

    register(spark)
    spark.read.format("txnbuffer").option("broker", "file:DIR").option("topics", "orders").load()

What is read is fixed when Spark plans a data frame, at its first action; one that is loaded anew sees what is decided
by then.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.planning import Plan, plan
from txnbuffer.pipeline.reading import Judge
from txnbuffer.pipeline.spark.sink import BatchWriter, StreamWriter
from txnbuffer.pipeline.spark.stream import StreamReader
from txnbuffer.pipeline.spark.tasks import Task, anywhere, judge_of, open_for_reading, read_task
from txnbuffer.pipeline.write_options import WriteOptions

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

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # named by Spark
        return StreamReader(self._read_options())

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:  # called so by Spark
        return BatchWriter(WriteOptions.of(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  # as above
        return StreamWriter(WriteOptions.of(self.options, streaming=True), schema, overwrite=overwrite)

    def _read_options(self) -> ReadOptions:
        return ReadOptions.of({name: text for name, text in self.options.items() if name.lower() != "path"})


class BatchReader(DataSourceReader):
    """Spark pickles it between planning and reading: once for the query, so that tasks share what it holds."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = anywhere(options)
        self._plan: Plan | None = None
        self._judges: dict[str, Judge] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get their judges with the reader, which Spark sends before it asks for the partitions."""
        self._planned()
        return {"_options": self._options, "_judges": self._judges}

    def partitions(self) -> list[InputPartition]:
        return [Task(ranges) for ranges in self._planned().tasks] or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Task):
            raise TypeError("a task reads the ranges that were planned for it")
        return read_task(self._options, partition.ranges, self._judges)

    def _planned(self) -> Plan:
        if self._plan is None:
            with open_for_reading(self._options) as broker:
                self._plan = plan(broker, self._options)
            self._judges = {topic: judge_of(self._options, fixed) for topic, fixed in self._plan.topics.items()}
        return self._plan
