"""Input partitions of the Spark data source, and the reading of them in a task"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from broker_io import open_broker
from broker_io.port import Broker
from txnbuffer.pipeline.arrow import record_batch, schema_of
from txnbuffer.pipeline.options import READ_COMMITTED, ReadOptions
from txnbuffer.pipeline.pinned import PinnedTopic
from txnbuffer.pipeline.ranges import RecordRange
from txnbuffer.pipeline.reading import RecordFilter, read_range
from txnbuffer.pipeline.spark.newest import HELD_BYTES, newest, with_key

if TYPE_CHECKING:
    import pyarrow as pa


class ReadTask(InputPartition):
    """Ranges that one task reads in this order; the filters of their topics, unless the reader has them."""

    def __init__(self, ranges: tuple[RecordRange, ...], filters: Mapping[str, RecordFilter] | None = None) -> None:
        self.ranges = ranges
        self.filters = filters or {}


def read_task(
    options: ReadOptions, ranges: tuple[RecordRange, ...], filters: Mapping[str, RecordFilter]
) -> Iterator[pa.RecordBatch]:
    """The records of ranges as Arrow record batches with the columns of the options."""
    schema = schema_of(options.columns)

    def read() -> Iterator[pa.RecordBatch]:
        with open_for_reading(options) as broker:
            for one in ranges:
                for rows in read_range(broker, one, filters[one.topic], fail_on_data_loss=options.fail_on_data_loss):
                    yield record_batch(rows, schema)

    found = read() if ranges else iter(())
    return newest(map(with_key, found), HELD_BYTES) if options.latest else found


def frame_schema(columns: Sequence[str]) -> StructType:
    """The schema of a data frame of records with these columns."""
    return from_arrow_schema(schema_of(columns))


def filter_of(options: ReadOptions, pinned: PinnedTopic) -> RecordFilter:
    return RecordFilter(
        pinned.topic,
        pinned.incarnation,
        pinned.visibility,
        pinned.registered,
        isolated=options.isolation == READ_COMMITTED,
        keep_hidden=options.include_aborted,
    )


def open_for_reading(options: ReadOptions) -> Broker:
    """The broker of the options, for reading; another process may own a log in files."""
    if options.broker.startswith("file:"):
        return open_broker(options.broker, read_only=True)
    return open_broker(options.broker, **options.broker_options)


def anywhere(options: ReadOptions) -> ReadOptions:
    """The same options with an absolute path, for processes with another working directory."""
    scheme, _, rest = options.broker.partition(":")
    return replace(options, broker=f"file:{os.path.abspath(rest)}") if scheme == "file" else options
