"""The Spark data source `txnbuffer`: committed records of topics as rows, in batch and streaming queries

    from txnbuffer.pipeline.spark.source import register

    register(spark)
    spark.read.format("txnbuffer").option("broker", "file:DIR").load("orders")

Topics are pinned when Spark plans a data frame, at its first action; a data frame that is loaded again sees what is
decided by then. In streaming queries one process plans all micro-batches, and tasks read them. A micro-batch ends at a
position before which everything is decided, and its tasks filter by the visibility that the planner pinned. A restarted
query reads exactly what it had planned, as decisions never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from broker_io import is_cluster
from broker_io.errors import TopicNotFound
from broker_io.port import Broker
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position
from txnbuffer.pipeline.offsets import Json, Offset, ReadProgress, UnreadRange, limited
from txnbuffer.pipeline.options import END, READ_COMMITTED, ReadOptions, WriteOptions
from txnbuffer.pipeline.pinned import CHECK_INTERVAL, Marks, PinnedTopic, TopicView, deleted_topics, end_below
from txnbuffer.pipeline.planning import (
    ReadPlan,
    check_not_trimmed,
    first_wanted,
    milliseconds,
    names,
    not_before_origin,
    plan,
    range_planner,
)
from txnbuffer.pipeline.ranges import RangeAnchor, RecordRange, packed
from txnbuffer.pipeline.reading import RecordFilter
from txnbuffer.pipeline.spark.sink import BatchWriter, StreamWriter
from txnbuffer.pipeline.spark.tasks import ReadTask, anywhere, filter_of, frame_schema, open_for_reading, read_task
from txnbuffer.recovery.restore import SnapshotLoader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the micro-batches of a streaming query. Raises InvalidRequest for options of batch queries."""

    def __init__(self, options: ReadOptions) -> None:
        if options.end != {"": END}:
            raise InvalidRequest("option end is for batch queries: leave it out, a streaming query has no end")
        if options.latest:
            raise InvalidRequest("option latest is for batch queries: leave it out of streaming queries")
        self._options = anywhere(options)
        self._planner = range_planner(options)
        self._broker: Broker | None = None
        self._views: dict[str, TopicView] = {}
        self._pinned: dict[str, PinnedTopic] = {}
        self._target: Offset | None = None
        self._marks = Marks(CHECK_INTERVAL if is_cluster(options.broker) else 0.0)

    def __getstate__(self) -> dict[str, Any]:
        """Only the options are sent to tasks."""
        return {"_options": self._options}

    # Called by Spark in the planner

    def initialOffset(self) -> Json:  # noqa: N802  # named by Spark
        pinned = self._pin_all(require_all=True)
        return Offset({topic: self._beginning(one) for topic, one in pinned.items()}).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit = self._options.max_messages
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._end_of(self._pin_all())

    def reportLatestOffset(self) -> Json:  # noqa: N802
        return self._end_of(self._pinned or self._pin_all()).to_json()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802
        begun = Offset.of_json(start)
        pinned = self._pin_all()
        ends = self._end_of(pinned) if self._target is None else self._target
        unread, reached = [], {**begun.topics}
        for topic in deleted_topics(self._options, begun.topics, pinned):
            if topic not in self._options.topics:
                del reached[topic]
        for topic, one in pinned.items():
            before = begun.topics.get(topic)
            if before is not None and before.since is not None:
                reached[topic] = self._awaited(one, before, before.since, begun)
            elif before is not None and (end := self._end_below(one, before)) is not None:
                reached[topic] = ReadProgress(end, one.incarnation)
            elif topic in ends.topics:
                first = self._first(topic, one, begun)
                unread.append(UnreadRange(topic, one.ledgers, first, max(first, min(ends.topics[topic].at, one.stop))))
        messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        for topic, at in limited(unread, messages).items():
            before = begun.topics.get(topic)
            if before is None or before.at != at or before.incarnation != pinned[topic].incarnation:
                mark = self._marks.of(self._open(), pinned[topic], before, at)
                reached[topic] = ReadProgress(at, pinned[topic].incarnation, _seqno_at(pinned[topic], at), mark=mark)
        return Offset(reached).to_json()

    def partitions(self, start: Json, end: Json) -> list[InputPartition]:
        begun, reached = Offset.of_json(start), Offset.of_json(end)
        ranges: list[RecordRange] = []
        for topic, (stop, incarnation, _, since, _) in reached.topics.items():
            before = begun.topics.get(topic)
            if before is not None and before.incarnation == incarnation and before.at >= stop:
                continue
            if since is not None or (before is not None and before.since is not None):
                continue  # no record has the start time yet
            one = self._pinned_for(topic, reached.topics[topic])
            if one is not None:
                ranges += self._ranges(one, begun, reached.topics[topic])
        return [
            ReadTask(task, {one.topic: filter_of(self._options, self._pinned[one.topic]) for one in task})
            for task in packed(ranges, self._options.partition_bytes)
        ]

    def commit(self, end: Json) -> None:
        """Nothing to do: a query holds no resources for planned records."""

    def stop(self) -> None:
        for view in self._views.values():
            view.close()
        self._views.clear()
        if self._broker is not None:
            self._broker.close()
            self._broker = None

    # Called by Spark in a task

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            raise TypeError(f"{partition!r} is not a ReadTask")
        return read_task(self._options, partition.ranges, partition.filters)

    def _open(self) -> Broker:
        if self._broker is None:
            self._broker = open_for_reading(self._options)
        return self._broker

    def _pin_all(self, *, require_all: bool | None = None) -> dict[str, PinnedTopic]:
        """Pin all topics of the query. Missing topics raise TopicNotFound with `require_all`, else they are left out.

        `require_all` is `fail_on_data_loss` by default.
        """
        strict = self._options.fail_on_data_loss if require_all is None else require_all
        self._pinned = {}
        topics = names(self._open(), self._options, require_all=strict)
        with SnapshotLoader(self._open(), topics) as snapshots:
            for topic in topics:
                try:
                    self._pinned[topic] = self._view(topic).pin(snapshots)
                except TopicNotFound:
                    if strict:
                        raise
        return self._pinned

    def _beginning(self, one: PinnedTopic) -> ReadProgress:
        """The start of a new query in a topic. Raises InvalidRequest, PositionTrimmed."""
        broker, start = self._open(), self._options.start_of(one.topic)
        at = first_wanted(broker, one, start)
        if isinstance(start, datetime) and broker.position_at(one.topic, since := milliseconds(start)) is None:
            return ReadProgress(at, one.incarnation, since=since)
        return ReadProgress(at, one.incarnation, _seqno_at(one, at))

    def _awaited(self, one: PinnedTopic, before: ReadProgress, since: int, begun: Offset) -> ReadProgress:
        """The progress in a topic that is read from the time `since` on: the start, once a record has that time."""
        broker = self._open()
        found = broker.position_at(one.topic, since)
        if one.incarnation != before.incarnation or (found and found == broker.first_position(one.topic)):
            self._first(one.topic, one, begun)
        if found is None:
            return before._replace(incarnation=one.incarnation)
        return ReadProgress(found, one.incarnation)

    def _view(self, topic: str) -> TopicView:
        if topic not in self._views:
            isolated = self._options.isolation == READ_COMMITTED
            self._views[topic] = TopicView(self._open(), topic, isolated=isolated, numbered=self._planner.numbered)
        return self._views[topic]

    def _end_of(self, pinned: dict[str, PinnedTopic]) -> Offset:
        return Offset(
            {topic: ReadProgress(one.stop, one.incarnation, _seqno_at(one, one.stop)) for topic, one in pinned.items()}
        )

    def _first(self, topic: str, one: PinnedTopic, begun: Offset) -> Position:
        """The position to continue from in a topic. Raises TopicNotFound, PositionTrimmed if records were lost."""
        before = begun.topics.get(topic)
        if before is None:
            return not_before_origin(one, EARLIEST)
        if before.incarnation != one.incarnation:
            if self._options.fail_on_data_loss:
                raise TopicNotFound(
                    f"topic {topic} was deleted and created again since it was read: use another checkpoint, or set "
                    f"fail_on_data_loss=false to read the new one from its beginning"
                )
            return not_before_origin(one, EARLIEST)
        if self._options.fail_on_data_loss:
            check_not_trimmed(self._open(), one, before.at)
            self._end_below(one, before)
            self._marks.check(self._open(), one, before)
        return not_before_origin(one, before.at)

    def _end_below(self, one: PinnedTopic, before: ReadProgress) -> Position | None:
        if one.incarnation != before.incarnation:
            return None
        return end_below(self._open(), one, before.at, fail_on_data_loss=self._options.fail_on_data_loss)

    def _pinned_for(self, topic: str, reached: ReadProgress) -> PinnedTopic | None:
        """The pinned topic, pinned again if it ends before what was planned; None if it was deleted."""
        one = self._pinned.get(topic)
        if one is None or one.stop < reached.at or one.incarnation != reached.incarnation:
            try:
                one = self._pinned[topic] = self._view(topic).pin()
            except TopicNotFound:
                if self._options.fail_on_data_loss:
                    raise
                return None
        if one.incarnation == reached.incarnation:
            return one
        if self._options.fail_on_data_loss:
            raise TopicNotFound(
                f"topic {topic} was deleted and created again after its records were planned: use another checkpoint, "
                f"or set fail_on_data_loss=false to read the new one from its beginning"
            )
        return None

    def _ranges(self, one: PinnedTopic, begun: Offset, reached: ReadProgress) -> list[RecordRange]:
        first = self._first(one.topic, one, begun)
        anchors = {anchor.position: anchor for anchor in one.anchors}
        before = begun.topics.get(one.topic)
        if before is not None and before.seqno is not None and before.at == first:
            anchors[first] = RangeAnchor(first, before.seqno)
        last = one.last if reached.at >= one.stop else None
        known = [anchors[position] for position in sorted(anchors)]
        return self._planner.ranges(one.topic, one.ledgers, known, first, reached.at, last)


def _seqno_at(one: PinnedTopic, at: Position) -> int | None:
    return next((anchor.seqno for anchor in one.anchors if anchor.position == at), None)


NAME = "txnbuffer"


def register(spark: SparkSession) -> None:
    """Register the format `txnbuffer` in a session."""
    spark.dataSource.register(TxnbufferSource)


class TxnbufferSource(DataSource):
    """The data source and sink `txnbuffer`; docs/reference/spark.md describes the options."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return frame_schema(ReadOptions.of(self.options).columns)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(ReadOptions.of(self.options))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # named by Spark
        return StreamReader(ReadOptions.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:  # called so by Spark
        return BatchWriter(WriteOptions.of(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802  # as above
        return StreamWriter(WriteOptions.of(self.options, streaming=True), schema, overwrite=overwrite)


class BatchReader(DataSourceReader):
    """Plans and reads a batch query. Spark pickles it once per query, after planning, so all tasks get its filters."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = anywhere(options)
        self._plan: ReadPlan | None = None
        self._filters: dict[str, RecordFilter] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Plan first: Spark sends the reader, and with it the filters, before it asks for the partitions."""
        self._planned()
        return {"_options": self._options, "_filters": self._filters}

    def partitions(self) -> list[InputPartition]:
        return [ReadTask(ranges) for ranges in self._planned().tasks] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            raise TypeError(f"{partition!r} is not a ReadTask")
        return read_task(self._options, partition.ranges, self._filters)

    def _planned(self) -> ReadPlan:
        if self._plan is None:
            with open_for_reading(self._options) as broker:
                self._plan = plan(broker, self._options)
            self._filters = {topic: filter_of(self._options, pinned) for topic, pinned in self._plan.topics.items()}
        return self._plan
