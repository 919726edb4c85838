"""Recover: checks the buffer snapshots of many topics against their logs in parallel, and rebuilds them.

Each task folds one log and returns the result; the driver becomes the owner and writes the snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from broker_io import open_broker
from broker_io.errors import Error
from broker_io.port import Broker
from snapshots.format import SNAPSHOT_TOPIC, is_internal
from snapshots.shard_count import owner_of
from snapshots.writer import acquire
from txnbuffer.errors import InvalidRequest, counted
from txnbuffer.pipeline.jobs.running import OnProgress, report_progress
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.planning import names
from txnbuffer.pipeline.spark.tasks import anywhere, open_for_reading
from txnbuffer.recovery.decision_log import exclusive_writer
from txnbuffer.recovery.rebuild import FoldedLog, fold_log, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "incarnation": pa.string(),
        "transactional": pa.bool_(),
        "applied": pa.string(),
        "aborts": pa.int64(),
        "open_transactions": pa.int64(),
        "visible_records": pa.int64(),
        "state": pa.binary(),
        "segments": pa.list_(pa.binary()),
        "problem": pa.string(),
        "differences": pa.list_(pa.string()),
        "trimmed": pa.bool_(),
        "failure": pa.string(),
    }
)
"""The columns of `fold_all`: those of `FoldedLog`, or topic and failure if a log can't be folded."""

Row = dict[str, Any]

TRIMMED = "complete, with data of trimmed ledgers"


def fold_all(options: ReadOptions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the logs of the topics of a task; one row with the columns SCHEMA for each."""
    with open_for_reading(options) as broker:
        for batch in batches:
            for topic in batch["topic"].to_pylist():
                yield pa.RecordBatch.from_pylist([_fold(broker, topic)], schema=SCHEMA)


def _fold(broker: Broker, topic: str) -> Row:
    """Fold a log; the row has `failure` if that fails, so that the other topics are folded."""
    try:
        found = fold_log(broker, topic)
    except Error as error:
        return {"topic": topic, "failure": str(error)}
    return {name: getattr(found, name, None) for name in SCHEMA.names}


def recover(
    spark: SparkSession,
    options: Mapping[str, str],
    *,
    everything: bool = False,
    wanted: bool = False,
    on_progress: OnProgress = print,
) -> list[Row]:
    """Fold the logs of topics and compare their snapshots; with `wanted`, write those that are lost or wrong.

    With `everything`, write all except sound ones with data of trimmed ledgers, which can't be rebuilt. Returns a row
    for each topic that has transactions or can't be read. Raises OwnershipLost, and Locked or StillHeld while a service
    owns the log.
    """
    chosen = anywhere(ReadOptions.of(options))
    with open_for_reading(chosen) as broker:
        topics = [topic for topic in names(broker, chosen) if not is_internal(topic)]
    if not topics:
        return []
    on_progress(f"folding the logs of {counted(len(topics), 'topic')}")
    frame = spark.createDataFrame([(topic,) for topic in topics], "topic string").repartition(len(topics))
    folded = frame.mapInArrow(partial(fold_all, chosen), from_arrow_schema(SCHEMA))
    with report_progress(spark, "folding", on_progress):
        rows = sorted(folded.collect(), key=lambda row: str(row.topic))
    failed = [_failed(row) for row in rows if row.failure is not None]
    found = [_folded(row) for row in rows if row.failure is None]
    found = [one for one in found if one.transactional or one.differences]
    due = [one for one in found if not one.sound or (everything and not one.trimmed)]
    if wanted and due:
        _write(chosen, due, on_progress)
    written = {one.topic for one in due} if wanted else set()
    return failed + [_row(one, written=one.topic in written) for one in found]


def _write(options: ReadOptions, found: list[FoldedLog], on_progress: OnProgress) -> None:
    if options.broker.startswith("txnbuf:"):
        raise InvalidRequest(
            f"{options.broker} is a service, which owns its snapshots: stop it and give the address of its log"
        )
    with open_broker(options.broker, **options.broker_options) as broker:
        owners = {one.topic: owner_of(broker, one.topic) for one in found}
        written = 0
        for owner in sorted(set(owners.values())):
            with exclusive_writer(broker, owner):
                ownership, table = acquire(broker, owner.topic(SNAPSHOT_TOPIC))
                with ownership:
                    for one in (one for one in found if owners[one.topic] == owner):
                        write(broker, ownership, table, one, time.time_ns() // 1_000_000)
                        written += 1
                        on_progress(f"{written} of {len(found)}: wrote the snapshot of {one.topic}")


def _folded(row: Any) -> FoldedLog:
    columns = row.asDict()
    del columns["failure"]
    columns |= {
        "state": bytes(row.state),
        "segments": tuple(map(bytes, row.segments)),
        "differences": tuple(row.differences),
    }
    return FoldedLog(**columns)


def _failed(row: Any) -> Row:
    nothing = dict.fromkeys(("applied", "aborts", "open_transactions", "visible_records"))
    return {
        "topic": row.topic, "snapshot": f"not checked: {row.failure}", "differences": [], **nothing, "written": False,
    }  # fmt: skip


def _row(one: FoldedLog, *, written: bool) -> Row:
    return {
        "topic": one.topic,
        "snapshot": one.problem or ("differs" if one.differences else TRIMMED if one.trimmed else "equal"),
        "differences": [*one.differences],
        "applied": one.applied,
        "aborts": one.aborts,
        "open_transactions": one.open_transactions,
        "visible_records": one.visible_records,
        "written": written,
    }
