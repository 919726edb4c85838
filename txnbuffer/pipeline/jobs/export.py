"""Export: committed records to Parquet or Delta, each once, from where the run before ended.

A run reads from the positions that the last one stored up to where everything is decided now, writes, and counts by
one rename or commit (see `pipeline.exports` and `pipeline.delta`). A run that is killed has never been; the next one
does its work.

The latest values of what an export holds, without a trip of all its records through the JVM.

Tasks open the Parquet files themselves, and drop what later records of theirs supersede before Spark is given a row:
making rows of columns, and columns of rows for Python, costs more than all the rest.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import InvalidRequest, LogReplaced
from txnbuffer.model import Position
from txnbuffer.pipeline.arrow import schema_of
from txnbuffer.pipeline.exports import LATEST, ExportDirectory, ExportRun
from txnbuffer.pipeline.jobs.latest import HELD_BYTES, latest, newest, with_key
from txnbuffer.pipeline.jobs.running import SETTINGS, OnProgress, places, report_progress, source
from txnbuffer.pipeline.offsets import Offset, ReadProgress, UnreadRange, limited
from txnbuffer.pipeline.options import COLUMNS as KNOWN
from txnbuffer.pipeline.options import PARTITION_BYTES, READ_COMMITTED, ReadOptions
from txnbuffer.pipeline.pinned import (
    PinnedTopic,
    check_mark,
    check_same,
    deleted_topics,
    end_below,
    mark_below,
    pin_topics,
)
from txnbuffer.pipeline.planning import first_wanted, names
from txnbuffer.pipeline.spark.tasks import open_for_reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MIN_TASK_BYTES, MAX_TASK_BYTES = 32 * 1024 * 1024, 1024 * 1024 * 1024
"""No task is given less to read if there is more, and none much more."""

BATCH_ROWS, BATCH_BYTES = 65_536, 16 * 1024 * 1024
"""Records that are read at a time; fewer of large ones."""


class RowGroups(NamedTuple):
    """One of `pieces` about equal shares of the row groups of a Parquet file."""

    path: str
    number: int
    pieces: int


def latest_of(spark: SparkSession, export: ExportDirectory, run: ExportRun, *, deleted: bool = False) -> DataFrame:
    """The record of each topic and key that is last in an export up to a run; those without a key are left out.

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


def shares(sizes: dict[str, int], cores: int) -> list[list[RowGroups]]:
    """Files by task, in their order, about as many bytes for each. Of few large tasks a key leaves fewer records."""
    share = min(max(sum(sizes.values()) // cores + 1, MIN_TASK_BYTES), MAX_TASK_BYTES)
    tasks: list[list[RowGroups]] = []
    room = 0.0
    for path, size in sizes.items():
        pieces = max(round(size / share), 1)
        for number in range(pieces):
            if not tasks or room < size / pieces / 2:
                tasks.append([])
                room = share
            tasks[-1].append(RowGroups(path, number, pieces))
            room -= size / pieces
    return tasks


def _newest_of_task(
    tasks: Sequence[Sequence[RowGroups]], columns: tuple[str, ...], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    chosen = [number for batch in numbers for number in batch["id"].to_pylist()]
    found = (batch for number in chosen for piece in tasks[number] for batch in read(piece, columns))
    return newest(map(with_key, found), HELD_BYTES)


def read(piece: RowGroups, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The records of a slice of a file, with the types of the data source."""
    import pyarrow.parquet as pq

    schema = schema_of(columns)
    with pq.ParquetFile(piece.path) as file:
        low, high = (file.num_row_groups * boundary // piece.pieces for boundary in (piece.number, piece.number + 1))
        groups = [file.metadata.row_group(number) for number in range(low, high)]
        size = sum(group.total_byte_size for group in groups) // max(sum(group.num_rows for group in groups), 1)
        rows = max(min(BATCH_ROWS, BATCH_BYTES // max(size, 1)), 1)
        for batch in file.iter_batches(rows, [*range(low, high)], [*columns], use_threads=False):
            yield batch.select([*columns]).cast(schema)


ALWAYS = ("topic", "position")
TIME_UNIT = "spark.sql.parquet.outputTimestampType"
NO_TOPIC = "(?!)"
"""A pattern that matches nothing."""
MAX_PARTITION_BYTES = 1024 * 1024 * 1024
"""No task reads more of the log."""
COLUMNS = ("topic", "position", "key", "value", "properties", "event_time", "publish_time")
"""What is exported unless columns are named; seqno is not there, for it makes long ledgers tasks of one core."""
PARQUET = {
    **{f"parquet.enable.dictionary#{name}": "false" for name in ("key", "value", "position.entry")},
    "parquet.compression.codec.zstd.level": "1",
}
"""Dictionaries of what differs from record to record, and zstd beyond its first level, cost more than the rest."""


class Export:
    """Exports topics to a directory, run by run.

    `options` are those of the data source, without `columns`, `start` and `end`. `messages` of the log at most are read
    in one run; None: all that there are.
    """

    def __init__(
        self,
        spark: SparkSession,
        options: Mapping[str, str],
        directory: ExportDirectory,
        *,
        columns: tuple[str, ...] = COLUMNS,
        messages: int | None = None,
        on_progress: OnProgress = print,
    ) -> None:
        self._spark = spark
        self._options = dict(options)
        self._directory = directory
        self.columns = columns_of(columns, directory.kind)
        self._wanted = ReadOptions.of({**options, "columns": ",".join(self.columns)})
        self._messages = messages
        self._on_progress = on_progress
        self._share = PARTITION_BYTES
        self._anew: dict[str, Position] = {}
        self._cut = False

    def run(self) -> ExportRun | None:
        """Export new records; None if there are none. The caller has locked the directory.

        Raises PositionTrimmed, LogTruncated or LogReplaced if some of it is gone, TopicNotFound if a topic is gone or
        another one now, JobFailed.
        """
        began, self._cut = time.monotonic(), False
        self._directory.clear()
        last = self._directory.last()
        if last is not None and last.columns != self.columns:
            raise InvalidRequest(
                f"{self._directory.path} has the columns {', '.join(last.columns)}: name these, or another directory"
            )
        with open_for_reading(self._wanted) as broker:
            offset, firsts = self._next(broker, None if last is None else last.offset)
        if last is not None and offset == last.offset:
            return None
        records = self._write(offset, firsts, last)
        with open_for_reading(self._wanted) as broker:
            for topic in firsts:
                check_same(broker, topic, offset.topics[topic].incarnation)
        run = ExportRun(1 if last is None else last.number + 1, self._directory.kind, self.columns, offset, records)
        run = self._directory.publish(run)
        more = "; there is more, for the next run" if self._cut else ""
        self._on_progress(f"run {run.number}: {run.records:,} records in {time.monotonic() - began:.1f} s{more}")
        return run

    def follow(self, stop: threading.Event, every: float) -> ExportRun | None:
        """Export what is new every so many seconds, at once while there is more, until told to stop; the last run.

        What trying again can help with is told and tried again. Raises as `run` else.
        """
        last = None
        while not stop.is_set():
            pause = every
            try:
                last = self.run() or last
                pause = 0.0 if self._cut else every
            except Error as error:
                if not error.retryable:
                    raise
                self._on_progress(f"trying again in {every:g} s: {error}")
            stop.wait(pause)
        return last

    def _next(self, broker: Broker, last: Offset | None) -> tuple[Offset, dict[str, Position]]:
        """How far to go now; from where, for each topic of which there is anything to read."""
        begun = {} if last is None else last.topics
        careful = self._wanted.fail_on_data_loss
        stretches, looked = [], {}
        self._anew = {}
        topics = names(broker, self._wanted, all_there=careful)
        deleted_topics(self._wanted, begun, topics)
        isolated = self._wanted.isolation == READ_COMMITTED
        for topic, one in pin_topics(broker, topics, isolated=isolated, numbered=False).items():
            before = begun.get(topic)
            if before is not None and before.incarnation != one.incarnation:
                raise TopicNotFound(
                    f"topic {topic} was deleted and created again since it was exported: export it to another directory"
                )
            start = self._wanted.start_of(topic) if before is None else before.at
            lost = None if before is None else self._lost(broker, one, before)
            if lost is not None:
                start = self._wanted.start_of(topic) if self._directory.kind == LATEST else lost
            first = first_wanted(broker, one, start, fail_on_data_loss=careful)
            if lost is not None:
                self._anew[topic] = first
            stretches.append(UnreadRange(topic, one.extents, first, max(first, one.stop)))
            looked[topic] = one
        ends = limited(stretches, self._messages)
        self._cut = any(ends[one.topic] < one.stop for one in stretches)
        self._share = share_of(stretches, self._cores)
        firsts = {one.topic: one.first for one in stretches if ends[one.topic] > one.first}
        reached = dict(begun)
        for topic, one in looked.items():
            if topic in firsts or topic not in begun or ends[topic] < begun[topic].at:
                known = begun[topic].mark if topic in begun and topic not in self._anew else None
                if careful and known is not None:
                    check_mark(broker, topic, known)
                mark = mark_below(broker, one, ends[topic], known)
                reached[topic] = ReadProgress(ends[topic], one.incarnation, mark=mark)
        return Offset(reached), firsts

    def _lost(self, broker: Broker, one: PinnedTopic, before: ReadProgress) -> Position | None:
        """Where to continue on a log that lost exported records and may have grown since; else None.

        Raises LogTruncated, unless what is gone may be; to on_progress an older copy that has grown takes a mark.
        """
        careful = self._wanted.fail_on_data_loss
        end = end_below(broker, one, before.at, fail_on_data_loss=careful)
        if end is None and self._directory.kind == LATEST and not careful and before.mark and one.stop > before.at:
            try:
                check_mark(broker, one.topic, before.mark)
            except LogReplaced:
                return before.at
        return end

    @property
    def _cores(self) -> int:
        return int(self._spark.sparkContext.defaultParallelism)

    def _write(self, offset: Offset, firsts: Mapping[str, Position], last: ExportRun | None) -> int:
        with report_progress(self._spark, "exporting", self._on_progress), microseconds(self._spark):
            frame = self._news(offset, firsts)
            if self._directory.kind == LATEST:
                frame = latest(frame if last is None else self._kept(last).unionByName(frame), thinned=True)
            frame.write.mode("overwrite").options(**PARQUET).parquet(self._directory.writing)
        return rows_in(self._directory.writing)

    def _kept(self, last: ExportRun) -> DataFrame:
        """The latest values of the last run, without those that a topic read again may no longer hold."""
        from pyspark.sql import functions as f

        from txnbuffer.pipeline.spark.source import POSITION

        kept = thinned_files(self._spark, self._directory.files(last), last.columns)
        for topic, first in self._anew.items():
            place = f.struct(*(f.lit(axis).alias(name) for name, axis in first._asdict().items())).cast(POSITION)
            kept = kept.where((f.col("topic") != topic) | (f.col("position") < place))
        return kept

    def _news(self, offset: Offset, firsts: Mapping[str, Position]) -> DataFrame:
        options = {name: text for name, text in self._options.items() if name not in ("topics", "pattern")}
        columns = ",".join(self.columns)
        if self._directory.kind == LATEST:
            options = {"partition_bytes": str(self._share), **options, "latest": "true"}
        if not firsts:
            return source(self._spark, options, pattern=NO_TOPIC, columns=columns)
        ends = places({topic: offset.topics[topic].at for topic in firsts})
        return source(
            self._spark, options, topics=json.dumps([*firsts]), columns=columns, start=places(firsts), end=ends
        )


@contextmanager
def microseconds(spark: SparkSession) -> Iterator[None]:
    """Write times as readers of Parquet and Delta expect them, whatever a session is told."""
    before = str(spark.conf.get(TIME_UNIT))
    spark.conf.set(TIME_UNIT, SETTINGS[TIME_UNIT])
    try:
        yield
    finally:
        spark.conf.set(TIME_UNIT, before)


def share_of(stretches: Iterable[UnreadRange], cores: int) -> int:
    """Bytes of the log for each core: of few large tasks a key leaves fewer records."""
    size = sum(extent.bytes for one in stretches for extent in one.extents if extent.ledger >= one.first.ledger)
    return min(max(size // cores + 1, PARTITION_BYTES), MAX_PARTITION_BYTES)


def columns_of(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """The columns of an export in the order that they always have; what it can't be without is added."""
    wanted = {*names, *ALWAYS, *(("key", "value") if kind == LATEST else ())}
    if strange := sorted(wanted - {*KNOWN}):
        raise InvalidRequest(f"an export has no columns {', '.join(strange)}: there are {', '.join(KNOWN)}")
    return tuple(name for name in KNOWN if name in wanted)


def rows_in(directory: str) -> int:
    """How many rows the Parquet files of a directory say they hold."""
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(entry.path).num_rows for entry in os.scandir(directory) if entry.name[0] not in "._")
