"""Compact: compacts data topics of an embedded log with more keys or bytes than one process should handle.

The driver owns the log, so no service can have it open; its engine decides how far each topic is compacted, as
`txnbuf compact` does. The tasks read and write the directory, which all workers must have at the same path.

First each task reads the key columns of one ledger, and sends a digest and an ordinal for the newest record of each
key. Of all with one digest the highest ordinal survives. These are numbers only, which Spark aggregates in place in a
hash table; keys and values are never shuffled. Then each task rewrites one ledger with the bitmap of its survivors, in
a file of its own attempt. The driver checks the files, and replaces all ledgers of the topic by one change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.taskcontext import TaskContext

from broker_io.compaction import (
    ROW_BITS,
    CompactionReport,
    CompactionRequest,
    CompactionTasks,
    LedgerPart,
    Ordinals,
    Survivors,
    TaskingBroker,
)
from broker_io.port import Broker
from txnbuffer.client.reading.arrow import fixed
from txnbuffer.config import CompactionConfig
from txnbuffer.errors import CompactionFailed, counted
from txnbuffer.pipeline.jobs.running import OnProgress, report_progress
from txnbuffer.service.engine.compaction import unsupported
from txnbuffer.service.offline import compact_all, owning

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]

NEWEST = pa.schema({"first": pa.int64(), "second": pa.int64(), "ordinal": pa.int64()})
"""The halves of a key's digest, and the ordinal of its newest record in a ledger.

A ledger with visible record sets adds a row without a digest and with the ordinal -1 - (number of the ledger), so that
the highest of these is that of the first such ledger.
"""
SURVIVORS = pa.schema({"ledger": pa.int64(), "newest": pa.binary(), "purged": pa.binary()})
"""The columns of `Survivors`; -1 - (number of the ledger) for the first ledger with record sets."""


def newest_rows(tasks: CompactionTasks, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The newest records in ledgers, whose numbers are in the column `id`, with the columns NEWEST."""
    for batch in batches:
        for number in batch["id"].to_pylist():
            found = tasks.newest(number)
            columns = [*np.ascontiguousarray(found.digests.T), found.ordinals]
            yield pa.RecordBatch.from_arrays([fixed(column, pa.int64()) for column in columns], schema=NEWEST)
            if found.record_sets:
                yield pa.RecordBatch.from_pylist([{"ordinal": -1 - number}], schema=NEWEST)


def bitmaps(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The survivors of ledgers, by the column `ordinal`, which ascends, with the columns SURVIVORS."""
    held: list[Ordinals] = []
    ledger = -1
    for batch in batches:
        ordinals = np.asarray(batch["ordinal"].to_numpy(zero_copy_only=False))
        numbers = np.where(ordinals < 0, ordinals, ordinals >> (ROW_BITS + 1))
        for part in np.split(ordinals, np.flatnonzero(np.diff(numbers)) + 1) if len(ordinals) else ():
            number = int(part[0]) if part[0] < 0 else int(part[0]) >> (ROW_BITS + 1)
            if held and number != ledger:
                yield _bitmap(ledger, held)
                held = []
            ledger = number
            held.append(part)
    if held:
        yield _bitmap(ledger, held)


def _bitmap(ledger: int, held: list[Ordinals]) -> pa.RecordBatch:
    found = Survivors() if ledger < 0 else Survivors.of(np.concatenate(held))
    return pa.RecordBatch.from_pylist([{"ledger": ledger, **found._asdict()}], schema=SURVIVORS)


def rewrite(tasks: CompactionTasks, work: tuple[int, Survivors]) -> LedgerPart:
    """Rewrite the ledger of a number."""
    context = TaskContext.get()
    return tasks.rewrite(*work, "0" if context is None else str(context.taskAttemptId()))


class SparkCompaction:
    """Runs the tasks of a compaction on Spark."""

    def __init__(self, spark: SparkSession, on_progress: OnProgress) -> None:
        self._spark, self._on_progress = spark, on_progress

    def __call__(self, tasks: CompactionTasks) -> list[LedgerPart]:
        """As `TaskingBroker.compact_in_tasks` asks. Raises JobFailed."""
        topic, ledgers = tasks.topic, tasks.count
        if not ledgers:
            return []
        self._on_progress(f"{topic}: looking for the newest records in {counted(ledgers, 'ledger')}")
        with report_progress(self._spark, f"{topic}, newest records", self._on_progress):
            rows = self.survivors(tasks).collect()
        found = {row.ledger: Survivors(bytes(row.newest), bytes(row.purged)) for row in rows}
        first_sets = min((-1 - number for number in found if number < 0), default=ledgers)
        work = []
        for number in range(ledgers):
            one = found.get(number, Survivors())
            work.append((number, one if number <= first_sets else Survivors(one.newest)))
        self._on_progress(f"{topic}: rewriting the ledgers that lose records")
        with report_progress(self._spark, f"{topic}, rewriting", self._on_progress):
            return self._spark.sparkContext.parallelize(work, ledgers).map(partial(rewrite, tasks)).collect()

    def survivors(self, tasks: CompactionTasks) -> DataFrame:
        """The survivors of each ledger that has any, with the columns SURVIVORS."""
        from pyspark.sql import functions as f

        ledgers = tasks.count
        numbers = self._spark.range(0, ledgers, 1, ledgers)
        newest = numbers.mapInArrow(partial(newest_rows, tasks), from_arrow_schema(NEWEST))
        # Neither keys nor values may be in an aggregation: Spark would sort instead of hashing.
        last = newest.groupBy("first", "second").agg(f.max("ordinal").alias("ordinal"))
        ledger = f.shiftright("ordinal", ROW_BITS + 1)
        by_ledger = last.select("ordinal").repartition(ledger).sortWithinPartitions("ordinal")
        return by_ledger.mapInArrow(bitmaps, from_arrow_schema(SURVIVORS))


def with_policy(broker: Broker, topics: Iterable[str]) -> list[str]:
    """The topics that have a policy."""
    if not isinstance(broker, TaskingBroker):
        return []
    return [topic for topic in topics if broker.compaction(topic).policy is not None]


def compact(
    spark: SparkSession,
    broker: Broker,
    config: CompactionConfig,
    topics: Sequence[str],
    *,
    on_progress: OnProgress = print,
) -> tuple[list[Row], list[CompactionFailed]]:
    """Compact topics of a log, one after the other; a row of statistics for each, and the errors of the others.

    The path of the log is absolute. Raises what starting an engine raises, and NotSupported.
    """
    tasks = SparkCompaction(spark, on_progress)
    if not isinstance(broker, TaskingBroker):
        raise unsupported(topics[0])

    def compact_records(topic: str, request: CompactionRequest) -> CompactionReport:
        return broker.compact_in_tasks(topic, request, tasks)

    async def work() -> tuple[list[Row], list[CompactionFailed]]:
        async with owning(broker, "txnbuf pipeline compact", config, compact_records) as ask:
            return await compact_all(ask, topics)

    return asyncio.run(work())
