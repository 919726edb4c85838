"""The latest values of what an export holds, without a trip of all its records through the JVM.

Tasks open the Parquet files themselves, and drop what later records of theirs supersede before Spark is given a row:
making rows of columns, and columns of rows for Python, costs more than all the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.arrow import schema_of
from txnbuffer.pipeline.exports import ExportDirectory, Run
from txnbuffer.pipeline.jobs.latest import HELD_BYTES, latest, newest, with_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEAST_BYTES, MOST_BYTES = 32 * 1024 * 1024, 1024 * 1024 * 1024
"""No task is given less to read if there is more, and none much more."""

BATCH_ROWS, BATCH_BYTES = 65_536, 16 * 1024 * 1024
"""Records that are read at a time; fewer of large ones."""


class Piece(NamedTuple):
    """One of `pieces` about equal shares of the row groups of a Parquet file."""

    path: str
    number: int
    pieces: int


def latest_of(spark: SparkSession, export: ExportDirectory, run: Run, *, deleted: bool = False) -> DataFrame:
    """The record of each topic and key that stands last in an export up to a run; those without a key are left out.

    A key whose latest value is null is there with `deleted` only. The files have to be there until the last action on
    what is returned: see `ExportDirectory.reading`. Raises InvalidRequest for an export without keys.
    """
    if "key" not in run.columns:
        raise InvalidRequest(f"{export.path} has no column key: export it with one to look for the latest of each")
    return latest(thinned_files(spark, export.files(run), run.columns), deleted=deleted, thinned=True)


def thinned_files(spark: SparkSession, paths: Sequence[str], columns: tuple[str, ...]) -> DataFrame:
    """Records of exported files; left out is what a later one of the same task supersedes, and what has no key."""
    from pyspark.sql.types import StructField, StructType

    from txnbuffer.pipeline.spark.source import TYPES

    schema = StructType([StructField(name, TYPES[name]) for name in columns])
    sizes = {path: os.path.getsize(path) for path in paths}
    tasks = shares(sizes, int(spark.sparkContext.defaultParallelism))
    numbers = spark.range(0, len(tasks), 1, max(len(tasks), 1))
    return numbers.mapInArrow(partial(_newest_of_task, tasks, columns), schema)


def shares(sizes: dict[str, int], cores: int) -> list[list[Piece]]:
    """Files by task, in their order, about as many bytes for each. Of few large tasks a key leaves fewer records."""
    share = min(max(sum(sizes.values()) // cores + 1, LEAST_BYTES), MOST_BYTES)
    tasks: list[list[Piece]] = []
    room = 0.0
    for path, size in sizes.items():
        pieces = max(round(size / share), 1)
        for number in range(pieces):
            if not tasks or room < size / pieces / 2:
                tasks.append([])
                room = share
            tasks[-1].append(Piece(path, number, pieces))
            room -= size / pieces
    return tasks


def _newest_of_task(
    tasks: Sequence[Sequence[Piece]], columns: tuple[str, ...], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    chosen = [number for batch in numbers for number in batch["id"].to_pylist()]
    found = (batch for number in chosen for piece in tasks[number] for batch in read(piece, columns))
    return newest(map(with_key, found), HELD_BYTES)


def read(piece: Piece, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The records of a piece of a file, whoever wrote that, with the types of the data source."""
    import pyarrow.parquet as pq

    schema = schema_of(columns)
    with pq.ParquetFile(piece.path) as file:
        low, high = (file.num_row_groups * border // piece.pieces for border in (piece.number, piece.number + 1))
        groups = [file.metadata.row_group(number) for number in range(low, high)]
        size = sum(group.total_byte_size for group in groups) // max(sum(group.num_rows for group in groups), 1)
        rows = max(min(BATCH_ROWS, BATCH_BYTES // max(size, 1)), 1)
        for batch in file.iter_batches(rows, [*range(low, high)], [*columns], use_threads=False):
            yield batch.select([*columns]).cast(schema)
