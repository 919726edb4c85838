"""Export: writes committed records to Parquet or Delta, each exactly once.

A run reads from the positions stored by the previous run up to the end of the decided records, writes them, and
publishes them with one rename or commit (see `pipeline.exports` and `pipeline.delta`). A killed run publishes nothing;
the next one does its work.

The latest values of an export are found by tasks that open the Parquet files themselves and drop superseded records
before Spark gets a row: converting columns to rows and back for Python costs more than everything else.
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
from txnbuffer.errors import InvalidRequest, LogReplaced, counted
from txnbuffer.model import Position
from txnbuffer.pipeline.arrow import schema_of
from txnbuffer.pipeline.exports import LATEST, ExportDirectory, ExportRun
from txnbuffer.pipeline.jobs.latest import latest
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
from txnbuffer.pipeline.spark.newest import HELD_BYTES, newest, with_key
from txnbuffer.pipeline.spark.tasks import frame_schema, open_for_reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MIN_TASK_BYTES, MAX_TASK_BYTES = 32 * 1024 * 1024, 1024 * 1024 * 1024
"""Bytes that a task reads, at least (if there are as many) and about at most."""

BATCH_ROWS, BATCH_BYTES = 65_536, 16 * 1024 * 1024
"""Records read at a time, and about their bytes; large records are read in smaller batches."""


class RowGroupSlice(NamedTuple):
    """Slice `number` of the row groups of a Parquet file, which are split into `slices` about equal ones."""

    path: str
    number: int
    slices: int


def latest_of(spark: SparkSession, export: ExportDirectory, run: ExportRun, *, deleted: bool = False) -> DataFrame:
    """The last record of each topic and key in an export up to a run; records without a key are dropped.

    Records whose value is null are dropped unless `deleted`. The files must exist until the last action on the frame:
    see `ExportDirectory.reading`. Raises InvalidRequest for an export without keys.
    """
    if "key" not in run.columns:
        raise InvalidRequest(f"{export.path} has no column key, which latest values require: export with that column")
    return latest(thinned_files(spark, export.files(run), run.columns), deleted=deleted, thinned=True)


def thinned_files(spark: SparkSession, paths: Sequence[str], columns: tuple[str, ...]) -> DataFrame:
    """Records of exported files, without those that a later one of the same task supersedes or that have no key."""
    sizes = {path: os.path.getsize(path) for path in paths}
    tasks = file_tasks(sizes, int(spark.sparkContext.defaultParallelism))
    numbers = spark.range(0, len(tasks), 1, max(len(tasks), 1))
    return numbers.mapInArrow(partial(_newest_of_task, tasks, columns), frame_schema(columns))


def file_tasks(sizes: dict[str, int], cores: int) -> list[list[RowGroupSlice]]:
    """Slices of files by task, in order, with about the same number of bytes for each task.

    `sizes` are bytes by path. With fewer tasks, fewer records per key remain.
    """
    target_bytes = min(max(sum(sizes.values()) // cores + 1, MIN_TASK_BYTES), MAX_TASK_BYTES)
    tasks: list[list[RowGroupSlice]] = []
    room = 0.0
    for path, size in sizes.items():
        slices = max(round(size / target_bytes), 1)
        for number in range(slices):
            if not tasks or room < size / slices / 2:
                tasks.append([])
                room = target_bytes
            tasks[-1].append(RowGroupSlice(path, number, slices))
            room -= size / slices
    return tasks


def _newest_of_task(
    tasks: Sequence[Sequence[RowGroupSlice]], columns: tuple[str, ...], numbers: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    chosen = [number for batch in numbers for number in batch["id"].to_pylist()]
    found = (batch for number in chosen for part in tasks[number] for batch in read(part, columns))
    return newest(map(with_key, found), HELD_BYTES)


def read(part: RowGroupSlice, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The records of a slice of a file, with the types of the data source."""
    import pyarrow.parquet as pq

    schema = schema_of(columns)
    with pq.ParquetFile(part.path) as file:
        low, high = (file.num_row_groups * boundary // part.slices for boundary in (part.number, part.number + 1))
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
"""Bytes of the log that a task reads at most."""
COLUMNS = ("topic", "position", "key", "value", "properties", "event_time", "publish_time")
"""Default columns, without seqno, which restricts a long ledger to one task."""
PARQUET = {
    **{f"parquet.enable.dictionary#{name}": "false" for name in ("key", "value", "position.entry")},
    "parquet.compression.codec.zstd.level": "1",
}
"""Dictionaries of distinct values, and zstd above level 1, cost more time than everything else."""


class Export:
    """Exports topics to a directory, run by run.

    `options` are those of the data source, without `columns`, `start` and `end`. One run reads at most `messages`
    messages of the log; None: no limit.
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
        self._task_bytes = PARTITION_BYTES
        self._reread: dict[str, Position] = {}
        self._limited = False

    def run(self) -> ExportRun | None:
        """Export new records; None if there are none. The caller must have locked the directory.

        Raises PositionTrimmed, LogTruncated or LogReplaced if records were lost, TopicNotFound if a topic was deleted
        or created again, JobFailed.
        """
        began, self._limited = time.monotonic(), False
        self._directory.clear()
        last = self._directory.last()
        if last is not None and last.columns != self.columns:
            raise InvalidRequest(
                f"{self._directory.path} has the columns {', '.join(last.columns)}: export these, or use another "
                f"directory"
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
        more = "; the next run exports more" if self._limited else ""
        self._on_progress(
            f"run {run.number}: {counted(run.records, 'record')} in {time.monotonic() - began:.1f} s{more}"
        )
        return run

    def follow(self, stop: threading.Event, every: float) -> ExportRun | None:
        """Export new records every `every` seconds, without a pause while there are more, until `stop`; the last run.

        Retryable errors are reported and retried; other errors are raised as by `run`.
        """
        last = None
        while not stop.is_set():
            pause = every
            try:
                last = self.run() or last
                pause = 0.0 if self._limited else every
            except Error as error:
                if not error.retryable:
                    raise
                self._on_progress(f"trying again in {every:g} s: {error}")
            stop.wait(pause)
        return last

    def _next(self, broker: Broker, last: Offset | None) -> tuple[Offset, dict[str, Position]]:
        """The offset that this run reaches, and the first position of each topic with unread records."""
        begun = {} if last is None else last.topics
        careful = self._wanted.fail_on_data_loss
        unread, looked = [], {}
        self._reread = {}
        topics = names(broker, self._wanted, require_all=careful)
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
                self._reread[topic] = first
            unread.append(UnreadRange(topic, one.ledgers, first, max(first, one.stop)))
            looked[topic] = one
        ends = limited(unread, self._messages)
        self._limited = any(ends[one.topic] < one.stop for one in unread)
        self._task_bytes = task_bytes(unread, self._cores)
        firsts = {one.topic: one.first for one in unread if ends[one.topic] > one.first}
        reached = dict(begun)
        for topic, one in looked.items():
            if topic in firsts or topic not in begun or ends[topic] < begun[topic].at:
                known = begun[topic].mark if topic in begun and topic not in self._reread else None
                if careful and known is not None:
                    check_mark(broker, topic, known)
                mark = mark_below(broker, one, ends[topic], known)
                reached[topic] = ReadProgress(ends[topic], one.incarnation, mark=mark)
        return Offset(reached), firsts

    def _lost(self, broker: Broker, one: PinnedTopic, before: ReadProgress) -> Position | None:
        """The position to continue from if the log has lost exported records and may have grown since; else None.

        An older copy of the log that has grown is detected by a mark. Raises LogTruncated with fail_on_data_loss.
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
        """Write the records of a run; returns their number."""
        import pyarrow.parquet as pq

        with report_progress(self._spark, "exporting", self._on_progress), microseconds(self._spark):
            frame = self._news(offset, firsts)
            if self._directory.kind == LATEST:
                frame = latest(frame if last is None else self._kept(last).unionByName(frame), thinned=True)
            frame.write.mode("overwrite").options(**PARQUET).parquet(self._directory.writing)
        files = [entry.path for entry in os.scandir(self._directory.writing) if entry.name[0] not in "._"]
        return sum(pq.read_metadata(path).num_rows for path in files)

    def _kept(self, last: ExportRun) -> DataFrame:
        """The latest values of the last run, without those of positions that are read again."""
        from pyspark.sql import functions as f

        kept = thinned_files(self._spark, self._directory.files(last), last.columns)
        for topic, first in self._reread.items():
            place = f.struct(*(f.lit(axis).cast("long").alias(name) for name, axis in first._asdict().items()))
            kept = kept.where((f.col("topic") != topic) | (f.col("position") < place))
        return kept

    def _news(self, offset: Offset, firsts: Mapping[str, Position]) -> DataFrame:
        options = {name: text for name, text in self._options.items() if name not in ("topics", "pattern")}
        columns = ",".join(self.columns)
        if self._directory.kind == LATEST:
            options = {"partition_bytes": str(self._task_bytes), **options, "latest": "true"}
        if not firsts:
            return source(self._spark, options, pattern=NO_TOPIC, columns=columns)
        ends = places({topic: offset.topics[topic].at for topic in firsts})
        return source(
            self._spark, options, topics=json.dumps([*firsts]), columns=columns, start=places(firsts), end=ends
        )


@contextmanager
def microseconds(spark: SparkSession) -> Iterator[None]:
    """Write times in microseconds, as readers of Parquet and Delta expect, whatever the session's setting."""
    before = str(spark.conf.get(TIME_UNIT))
    spark.conf.set(TIME_UNIT, SETTINGS[TIME_UNIT])
    try:
        yield
    finally:
        spark.conf.set(TIME_UNIT, before)


def task_bytes(unread: Iterable[UnreadRange], cores: int) -> int:
    """Bytes of the log that each task reads. With fewer tasks, fewer records per key remain."""
    size = sum(ledger.bytes for one in unread for ledger in one.ledgers if ledger.ledger >= one.first.ledger)
    return min(max(size // cores + 1, PARTITION_BYTES), MAX_PARTITION_BYTES)


def columns_of(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """The columns of an export in their fixed order, including those that every export of the kind has."""
    wanted = {*names, *ALWAYS, *(("key", "value") if kind == LATEST else ())}
    if strange := sorted(wanted - {*KNOWN}):
        raise InvalidRequest(f"unknown column {', '.join(strange)}: use {', '.join(KNOWN)}")
    return tuple(name for name in KNOWN if name in wanted)
