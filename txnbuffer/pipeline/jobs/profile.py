"""Profile: the sizes, aborts, late records, long transactions and hot keys of a log, as JSON and as a page.

It reads all decided records with their outcomes. `sizes` reduces them to narrow rows, which the other functions
aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from txnbuffer.errors import counted
from txnbuffer.pipeline.jobs.running import OnProgress, report_progress, source
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.pinned import pin_topics
from txnbuffer.pipeline.planning import names
from txnbuffer.pipeline.report import Section, bars, page, shown, stacked, table, text
from txnbuffer.pipeline.spark.tasks import open_for_reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


COLUMNS = "topic,key,value,txn,publish_time,outcome"
OUTCOMES = ("committed", "aborted", "suppressed")
SLICES = 60
"""About the number of columns in the plot over time."""
TOP = 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Profile:
    """The tables of `txnbuf pipeline profile`, by their names.

    Bytes are those of keys and values; times are milliseconds since 1970, and durations milliseconds. `slice_ms` is the
    duration of a row of `over_time`.
    """

    ledgers: list[Row]
    topics: list[Row]
    slice_ms: int
    over_time: list[Row]
    long_transactions: list[Row]
    large_transactions: list[Row]
    late: list[Row]
    hot_keys: list[Row]


def sizes(frame: DataFrame) -> DataFrame:
    """The columns topic, key, txn, `at` (milliseconds since 1970), outcome, bytes, deleted of records."""
    from pyspark.sql import functions as f

    size = sum((f.coalesce(f.octet_length(name), f.lit(0)) for name in ("key", "value")), f.lit(0).cast("long"))
    at = f.unix_millis("publish_time").alias("at")
    return frame.select(
        "topic", "key", "txn", at, "outcome", size.alias("bytes"), f.col("value").isNull().alias("deleted")
    )


def by_topic(records: DataFrame) -> DataFrame:
    """Records and bytes of each topic by outcome, records without a key, deletes, transactions."""
    from pyspark.sql import functions as f

    counts = [f.count_if(f.col("outcome") == outcome).alias(outcome) for outcome in OUTCOMES]
    weights = [
        f.coalesce(f.sum(f.when(f.col("outcome") == outcome, f.col("bytes"))), f.lit(0)).alias(f"{outcome}_bytes")
        for outcome in OUTCOMES
    ]
    return (
        records.groupBy("topic")
        .agg(
            *counts,
            *weights,
            f.count_if(f.col("key").isNull()).alias("without_key"),
            f.count_if("deleted").alias("deletes"),
            f.count_distinct("txn").alias("transactions"),
            f.min("at").alias("first_at"),
            f.max("at").alias("last_at"),
        )
        .orderBy("topic")
    )


def over_time(records: DataFrame, slice_ms: int) -> DataFrame:
    """Bytes by outcome in each time slice with records."""
    from pyspark.sql import functions as f

    start = (f.col("at") - f.pmod("at", f.lit(slice_ms))).alias("at")
    by_slice = records.groupBy(start).pivot("outcome", [*OUTCOMES]).agg(f.sum("bytes"))
    return by_slice.na.fill(0).orderBy("at")


def transactions(records: DataFrame) -> DataFrame:
    """Each transaction over all topics: outcome, records, bytes, first write, duration of its writes."""
    from pyspark.sql import functions as f

    ended = f.min(f.when(f.col("outcome") != "suppressed", f.col("outcome")))
    return (
        records.where(f.col("txn").isNotNull())
        .groupBy("txn")
        .agg(
            f.coalesce(ended, f.lit("suppressed")).alias("outcome"),
            f.count(f.lit(1)).alias("records"),
            f.count_if(f.col("outcome") == "suppressed").alias("suppressed"),
            f.sum("bytes").alias("bytes"),
            f.array_sort(f.collect_set("topic")).alias("topics"),
            f.min("at").alias("first_at"),
            (f.max("at") - f.min("at")).alias("duration"),
        )
    )


def hot_keys(records: DataFrame) -> DataFrame:
    """The keys with the most records, and their proportion of their topic's records."""
    from pyspark.sql import functions as f

    keys = records.where(f.col("key").isNotNull()).groupBy("topic", "key")
    found = keys.agg(f.count(f.lit(1)).alias("records"), f.sum("bytes").alias("bytes"))
    return found.orderBy(f.desc("records"), "topic", "key").limit(TOP)


def slice_of(first_ms: int, last_ms: int) -> int:
    """The round number of milliseconds that splits a time span into about SLICES slices."""
    steps = [1, 10, 100, *(1000 * many for many in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800))]
    steps += [3_600_000 * many for many in (1, 2, 3, 6, 12, 24, 48, 168)]
    return next((step for step in steps if step * SLICES >= last_ms - first_ms), steps[-1])


def profile(spark: SparkSession, options: Mapping[str, str], *, on_progress: OnProgress = print) -> Profile:
    """Profile the topics of a log, given as options of the data source. Raises JobFailed, and as `ReadOptions.of`."""
    ledgers = _ledgers(options)
    frame = source(spark, options, include_aborted="true", columns=COLUMNS)
    records = sizes(frame).persist()
    try:
        with report_progress(spark, "reading", on_progress):
            topics = _rows(by_topic(records))
        if not topics:
            return Profile(ledgers, [], 1, [], [], [], [], [])
        with report_progress(spark, "adding up", on_progress):
            slice_ms = slice_of(min(row["first_at"] for row in topics), max(row["last_at"] for row in topics))
            txns = transactions(records).persist()
            longest = _rows(txns.orderBy("duration", "records", "txn", ascending=[False, False, True]).limit(TOP))
            largest = _rows(txns.orderBy("records", "bytes", "txn", ascending=[False, False, True]).limit(TOP))
            late = _rows(txns.where("suppressed > 0").orderBy("suppressed", "txn", ascending=[False, True]).limit(TOP))
            txns.unpersist()
            return Profile(
                ledgers, topics, slice_ms, _rows(over_time(records, slice_ms)), longest, largest, late,
                _rows(hot_keys(records)),
            )  # fmt: skip
    finally:
        records.unpersist()


def _ledgers(options: Mapping[str, str]) -> list[Row]:
    """Bytes and messages of each ledger in storage, and how many of its messages are not decided."""
    wanted = ReadOptions.of(options)
    rows = []
    with open_for_reading(wanted) as broker:
        for topic, one in pin_topics(broker, names(broker, wanted), numbered=False).items():
            for ledger in one.ledgers:
                below = ledger.entries
                if ledger.ledger >= one.stop.ledger:
                    below = min(one.stop.entry, ledger.entries) if ledger.ledger == one.stop.ledger else 0
                undecided = ledger.entries - max(below, 0)
                rows.append({"topic": topic, **ledger._asdict(), "undecided": undecided})
    return rows


def _rows(frame: DataFrame) -> list[Row]:
    return [{name: bytes(item) if isinstance(item, bytearray) else item for name, item in row.asDict().items()}
            for row in frame.collect()]  # fmt: skip


def as_page(found: Profile, address: str) -> str:
    records = sum(row[outcome] for row in found.topics for outcome in OUTCOMES)
    volume = sum(row[f"{outcome}_bytes"] for row in found.topics for outcome in OUTCOMES)
    summary = (
        f"{counted(records, 'record')} of {counted(len(found.topics), 'topic')}, {volume:,} bytes of keys and values."
    )
    hot = [(f"{shown(row['key'])} ({row['topic']})", float(row["records"])) for row in found.hot_keys]
    long = [(f"{row['txn']} ({row['outcome']})", row["duration"] / 1000) for row in found.long_transactions]
    sections = [
        Section(
            "Topics", [bars([(row["topic"], _bytes_of(row)) for row in found.topics], "bytes"), _table(found.topics)]
        ),
        Section(
            "Over time",
            [
                text(f"Bytes published, by outcome; a column is {found.slice_ms / 1000:g} s."),
                stacked(
                    [_time(row["at"]) for row in found.over_time],
                    {outcome: [float(row[outcome]) for row in found.over_time] for outcome in OUTCOMES},
                    "bytes",
                ),
            ],
        ),
        Section("Long transactions", [bars(long[:10], "s"), _table(found.long_transactions)]),
        Section("Large transactions", [_table(found.large_transactions)]),
        Section("Late and duplicate records", [_table(found.late)]),
        Section("Hot keys", [bars(hot[:10], "records"), _table(found.hot_keys)]),
        Section("Ledgers", [_table(found.ledgers)]),
    ]
    return page(f"Profile of {address}", summary, True, sections)


def _bytes_of(row: Row) -> float:
    return float(sum(row[f"{outcome}_bytes"] for outcome in OUTCOMES))


def _table(rows: list[Row]) -> str:
    return table([{name: _cell(name, item) for name, item in row.items()} for row in rows])


def _cell(name: str, item: Any) -> Any:
    if name.endswith("_at"):
        return _time(item)
    return ", ".join(item) if isinstance(item, list) else item


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
