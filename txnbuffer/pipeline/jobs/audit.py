"""Audit: compares an export with the log key by key, up to the exported positions; the result as JSON and as a page.

An export of all versions must have every record at its position; one of the latest values must have the latest value
of each key; both with properties and event times, if these are exported. Each side is aggregated to one row per key:
the number of records, and the sum of their digests.

Exported records that were trimmed from the log are not compared; keys that have no others are counted as unproven.
Exported rows outside the exported topics and positions are differences. Deleted topics are not compared, and an export
with one is not the same as the log.

**Digests.** A record's digest is 64 bits: XXH64 over its topic (seed 42), then, each with the previous hash as the
seed, over its key, over ledger, entry and batch of its position if versions are compared (8 bytes each, little-endian),
and over its value; a null key or value is left out. If they are compared, the event time (microseconds since 1970, 8
bytes; 0: none) and the number of properties (8 bytes) with their names and texts, sorted by name, follow. Spark's
`xxhash64` gives the same for the same columns. Digests are added modulo 2^64, so sums by key, by range of keys and by
topic do not depend on the order of records.

**Ranges.** A range has the keys from one split point up to the next (exclusive), compared as unsigned bytes; the first
range also has the records without a key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_io import is_cluster
from txnbuffer.errors import InvalidRequest, counted
from txnbuffer.model import Position
from txnbuffer.pipeline.exports import LATEST, VERSIONS, ExportDirectory, ExportRun
from txnbuffer.pipeline.jobs.latest import latest
from txnbuffer.pipeline.jobs.running import JobFailed, OnProgress, places, report_progress, source
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.report import Section, bars, page, shown, stacked, table, text
from txnbuffer.pipeline.spark.tasks import open_for_reading

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


MASK = 2**64 - 1


class KeyTally(NamedTuple):
    """A number of keys, the number of their records, and the sum of the records' digests."""

    keys: int = 0
    records: int = 0
    digest: int = 0

    def plus(self, other: KeyTally) -> KeyTally:
        return KeyTally(self.keys + other.keys, self.records + other.records, (self.digest + other.digest) & MASK)


def added(low: int, high: int) -> int:
    """The sum of digests, given the sums of their lower and upper 32 bits."""
    return (low + (high << 32)) & MASK


def cut_points(sample: Iterable[bytes], ranges: int) -> list[bytes]:
    """The split points of at most `ranges` ranges with about the same number of keys, by a sample of the keys."""
    keys = sorted(set(sample))
    places = [len(keys) * number // ranges for number in range(1, ranges)]
    return [keys[place] for place in dict.fromkeys(places) if place]


RANGES = 32
SAMPLE = 10_000
"""About the number of keys sampled to find split points."""
FIRST_DIFFERENCES = 20
FIRST_LEDGER = 1
"""The number of a topic's first ledger in an embedded log."""
COLUMNS = ("topic", "position", "key", "value")
MORE = ("properties", "event_time")
"""Columns that are compared if they are exported."""
KEY = ["topic", "key"]
LOG, EXPORT = "log", "export"
NO_TOPIC = ""
"""The topic of rows without one."""
SUMS = ("records", "low", "high")


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys of a topic from `first` on (None: from the beginning): tallies of both sides, and differing keys."""

    topic: str
    number: int
    first: bytes | None
    log: KeyTally
    export: KeyTally
    different: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that differs between log and export."""

    topic: str
    key: bytes | None
    what: str
    log_records: int
    export_records: int


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit.

    `unproven`: number of exported keys whose records were all trimmed from the log. `gone`: exported topics that were
    deleted, or deleted and created again.
    """

    run: ExportRun
    ranges: tuple[KeyRange, ...]
    differences: tuple[Difference, ...]
    unproven: int
    gone: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.different and not self.gone

    @property
    def different(self) -> int:
        """The number of keys that differ between log and export."""
        return sum(one.different for one in self.ranges)

    def topics(self) -> list[KeyRange]:
        """The totals of each topic: all its ranges as one."""
        found: dict[str, KeyRange] = {}
        for one in self.ranges:
            so_far = found.get(one.topic, KeyRange(one.topic, 0, None, KeyTally(), KeyTally(), 0))
            both = so_far.log.plus(one.log), so_far.export.plus(one.export), so_far.different + one.different
            found[one.topic] = KeyRange(one.topic, 0, None, *both)
        return [found[topic] for topic in sorted(found)]


def key_digests(frame: DataFrame, *, versions: bool) -> DataFrame:
    """One row for each topic and key: `records`, and `low` and `high`, the sums of the halves of their digests.

    `frame` has the columns topic, position, key and value, and optionally event_time and properties. A row whose
    optional column `strange` is true gets a digest that no record has.
    """
    from pyspark.sql import functions as f

    place = [f"position.{axis}" for axis in ("ledger", "entry", "batch")] if versions else []
    strange = ["strange"] if "strange" in frame.columns else []  # null for all others, which changes no hash
    more: list[Column] = []
    if "event_time" in frame.columns:
        more.append(f.coalesce(f.unix_micros("event_time"), f.lit(0).cast("long")))
    if "properties" in frame.columns:
        entries = f.array_sort(f.map_entries("properties"))
        more += [f.coalesce(f.size(entries), f.lit(0)).cast("long"), entries]
    digest = f.xxhash64("topic", "key", *place, "value", *more, *strange)
    hashed = frame.select("topic", "key", digest.alias("digest"))
    return hashed.groupBy(*KEY).agg(
        f.count(f.lit(1)).alias("records"),
        f.sum(f.col("digest").bitwiseAND(f.lit(0xFFFFFFFF))).alias("low"),
        f.sum(f.shiftrightunsigned("digest", 32)).alias("high"),
    )


def compared(log: DataFrame, export: DataFrame) -> DataFrame:
    """One row for each key of either side: both sides' digests, and whether they are `different`."""
    from pyspark.sql import functions as f

    left = log.select(*KEY, *(f.col(name).alias(f"{LOG}_{name}") for name in SUMS))
    right = export.select(
        f.col("topic").alias("topic_"),
        f.col("key").alias("key_"),
        *(f.col(name).alias(f"{EXPORT}_{name}") for name in SUMS),
    )
    same_key = left["topic"].eqNullSafe(right["topic_"]) & left["key"].eqNullSafe(right["key_"])
    both = left.join(right, same_key, "full_outer")
    here = f.col("topic").isNotNull()
    equal = reduce(and_, (f.col(f"{LOG}_{name}").eqNullSafe(f.col(f"{EXPORT}_{name}")) for name in SUMS))
    numbers = [
        f.coalesce(f"{side}_{name}", f.lit(0)).alias(f"{side}_{name}") for side in (LOG, EXPORT) for name in SUMS
    ]
    return both.select(
        f.coalesce("topic", "topic_").alias("topic"),
        f.when(here, f.col("key")).otherwise(f.col("key_")).alias("key"),
        *numbers,
        (~equal).alias("different"),
    )


def in_ranges(both: DataFrame, cuts: Mapping[str, Sequence[bytes]]) -> DataFrame:
    """The rows of `compared`, added up by topic and range of keys; `cuts` are the split points of each topic."""
    from pyspark.sql import functions as f

    spark = both.sparkSession
    table = spark.createDataFrame(
        [(topic, [bytearray(cut) for cut in found]) for topic, found in sorted(cuts.items())],
        "cut_topic string, cuts array<binary>",
    )
    placed = both.join(f.broadcast(table), f.col("topic") == f.col("cut_topic"), "left")
    number = f.size(f.filter(f.coalesce("cuts", f.array().cast("array<binary>")), lambda cut: cut <= f.col("key")))
    sides = [f.sum((f.col(f"{side}_records") > 0).cast("long")).alias(f"{side}_keys") for side in (LOG, EXPORT)]
    sums = [f.sum(f"{side}_{name}").alias(f"{side}_{name}") for side in (LOG, EXPORT) for name in SUMS]
    different = f.sum(f.col("different").cast("long")).alias("different")
    return (
        placed.withColumn("range", f.coalesce(number, f.lit(0)))
        .groupBy("topic", "range")
        .agg(*sides, *sums, different)
        .orderBy("topic", "range")
    )


def audit(
    spark: SparkSession, options: Mapping[str, str], directory: ExportDirectory, *, on_progress: OnProgress = print
) -> Audit:
    """Compare an export with its log, whose address is the option `broker`.

    Raises InvalidRequest for an export without a run or a required column, JobFailed.
    """
    with directory.reading() as run:
        if run is None or (missing := {*COLUMNS} - {*run.columns}):
            what = f"column {', '.join(sorted(missing))}" if run else "run"
            raise InvalidRequest(f"{directory.path} has no {what}, which an audit requires: export again")
        return _audit(spark, options, directory, run, on_progress)


def _audit(
    spark: SparkSession, options: Mapping[str, str], directory: ExportDirectory, run: ExportRun, on_progress: OnProgress
) -> Audit:
    origins = _origins(options, run)
    gone = tuple(sorted(run.offset.topics.keys() - origins.keys()))
    for topic in gone:
        on_progress(f"topic {topic} was deleted after the export and is not compared")
    on_progress(f"auditing run {run.number} of {directory.path}: {run.kind} of {', '.join(origins) or 'no topic'}")
    log, export, unproven, held = _sides(spark, options, directory, run, origins)
    both = compared(log, export).persist()
    try:
        with report_progress(spark, "comparing", on_progress):
            total = both.count()
        with report_progress(spark, "adding up", on_progress):
            sample = both.where(f"pmod(xxhash64(topic, key), {max(total // SAMPLE, 1)}) = 0").select(*KEY)
            keys: dict[str, list[bytes]] = {topic: [] for topic in origins}
            for topic, key in sample.collect():
                if topic in keys and key is not None:
                    keys[topic].append(bytes(key))
            cuts = {topic: cut_points(found, RANGES) for topic, found in keys.items()}
            ranges = tuple(_range(row, cuts) for row in in_ranges(both, cuts).collect())
            first = both.where("different").orderBy("topic", "key").limit(FIRST_DIFFERENCES)
            differences = tuple(map(_difference, first.collect()))
            found = Audit(run, ranges, differences, unproven.count(), gone)
    except JobFailed:
        _check_unchanged(options, run, origins, trimmed=True)
        raise
    finally:
        for one in (both, held):
            one.unpersist()
    _check_unchanged(options, run, origins, trimmed=found.different > 0)
    return found


def _origins(options: Mapping[str, str], run: ExportRun) -> dict[str, Position]:
    """The start of the log of each exported topic, except topics that were deleted or created again."""
    wanted = ReadOptions.of({**options, "topics": "any"})
    origins = {}
    with open_for_reading(wanted) as broker:
        existing = set(broker.topics())
        for topic, reached in run.offset.topics.items():
            if topic in existing and broker.incarnation(topic) == reached.incarnation:
                origins[topic] = Position(broker.ledgers(topic)[0].ledger, 0)
    return origins


def _check_unchanged(
    options: Mapping[str, str], run: ExportRun, origins: Mapping[str, Position], *, trimmed: bool
) -> None:
    """Raises JobFailed if topics were deleted or created again meanwhile or, with `trimmed`, were trimmed."""
    now = _origins(options, run)
    changed = [topic for topic, origin in origins.items() if topic not in now or (trimmed and now[topic] != origin)]
    if changed:
        raise JobFailed(
            f"topic {', '.join(sorted(changed))} was trimmed, deleted or created again during the audit: audit again",
            retryable=True,
        )


def _sides(
    spark: SparkSession,
    options: Mapping[str, str],
    directory: ExportDirectory,
    run: ExportRun,
    origins: Mapping[str, Position],
) -> tuple[DataFrame, DataFrame, DataFrame, DataFrame]:
    """Digests by key of the comparable records of the log and of the export; unproven keys; the persisted frame."""
    from pyspark.sql import functions as f

    reached = run.offset.topics
    columns = (*COLUMNS, *(name for name in MORE if name in run.columns))
    ends = places({topic: reached[topic].at for topic in origins})
    first_ever = 0 if is_cluster(options["broker"]) else FIRST_LEDGER
    table = directory.frame(spark, run)
    table = table.where(~f.coalesce(table["topic"].isin(sorted(reached.keys() - origins.keys())), f.lit(False)))
    old = f.lit(False)
    for topic, origin in origins.items():
        before = (table["position.ledger"] >= first_ever) & (table["position.ledger"] < origin.ledger)
        old = old | f.coalesce((table["topic"] == topic) & before, f.lit(False))
    only = "true" if run.kind == LATEST else "false"
    log = table.select(*columns).where(f.lit(False))
    if origins:
        log = source(spark, options, topics=json.dumps([*origins]), columns=",".join(columns), end=ends, latest=only)
    placed = reduce(and_, (table[f"position.{axis}"].isNotNull() for axis in ("ledger", "entry", "batch")))
    rows = table.select(*columns, old.alias("old"), f.when(~placed, f.lit(True)).alias("strange"))
    if run.kind == VERSIONS:
        digests = key_digests(log, versions=True).persist()
        unproven = _without(rows.where("old").select(*KEY).distinct(), digests.select(*KEY))
        return digests, key_digests(rows.where(~f.col("old")), versions=True), unproven, digests
    newest = latest(log, deleted=True, thinned=True).persist()
    known = newest.select(*KEY)
    unproven = rows.where("old").join(known, KEY, "left_anti").select(*KEY)
    proven = rows.where(~f.col("old")).unionByName(rows.where("old").join(known, KEY, "left_semi").select(rows.columns))
    kept = newest.where(f.col("value").isNotNull())
    return key_digests(kept, versions=False), key_digests(proven, versions=False), unproven, newest


def _without(keys: DataFrame, known: DataFrame) -> DataFrame:
    """The keys that are not in `known`; null keys are compared like others."""
    other = known.toDF("topic_", "key_")
    same = keys["topic"].eqNullSafe(other["topic_"]) & keys["key"].eqNullSafe(other["key_"])
    return keys.join(other, same, "left_anti")


def _range(row: Any, cuts: Mapping[str, Sequence[bytes]]) -> KeyRange:
    first = cuts[row.topic][row.range - 1] if row.range else None
    topic = NO_TOPIC if row.topic is None else row.topic
    log, export = (
        KeyTally(row[f"{side}_keys"], row[f"{side}_records"], added(row[f"{side}_low"], row[f"{side}_high"]))
        for side in (LOG, EXPORT)
    )
    return KeyRange(topic, row.range, first, log, export, row.different)


def _difference(row: Any) -> Difference:
    what = "different"
    if not row.log_records:
        what = "in the export only"
    elif not row.export_records:
        what = "in the log only"
    key = None if row.key is None else bytes(row.key)
    return Difference(NO_TOPIC if row.topic is None else row.topic, key, what, row.log_records, row.export_records)


def as_json(found: Audit) -> dict[str, Any]:
    """The result for `json.dumps`; digests are 16 hexadecimal digits."""
    return {
        "same": found.same,
        "kind": found.run.kind,
        "run": found.run.number,
        "unproven_keys": found.unproven,
        "deleted_topics": [*found.gone],
        "topics": [{"topic": one.topic, "up_to": _up_to(found, one.topic), **_sums(one)} for one in found.topics()],
        "ranges": [{"topic": one.topic, "from_key": one.first, **_sums(one)} for one in found.ranges],
        "differences": [asdict(one) for one in found.differences],
    }


def _up_to(found: Audit, topic: str) -> str | None:
    reached = found.run.offset.topics.get(topic)
    return None if reached is None else str(reached.at)


def _sums(one: KeyRange) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for side, tally in ((LOG, one.log), (EXPORT, one.export)):
        sums |= {
            f"{side}_keys": tally.keys,
            f"{side}_records": tally.records,
            f"{side}_digest": f"{tally.digest:016x}",
        }
    return {**sums, "different_keys": one.different}


def as_page(found: Audit, directory: str, address: str) -> str:
    report = as_json(found)
    summary = "The export and the log are equal for every key."
    if found.gone:
        summary = f"Topics were deleted after the export; different in the others: {counted(found.different, 'key')}."
    elif not found.same:
        summary = f"The export and the log differ in {counted(found.different, 'key')}."
    what = f"Run {found.run.number} ({found.run.kind}) of {directory}, compared with {address}. "
    if found.unproven:
        what += f"Not compared because they were trimmed from the log: {counted(found.unproven, 'key')}. "
    if found.gone:
        what += f"Not compared because they were deleted: {', '.join(found.gone)}."
    sections = [
        Section("Compared topics", [text(what), table(report["topics"])]),
        Section("First different keys", [table([{**row, "key": shown(row["key"])} for row in report["differences"]])]),
    ]
    for topic in [one.topic for one in found.topics()]:
        ranges = [one for one in found.ranges if one.topic == topic]
        names = ["the first keys" if one.first is None else shown(one.first) for one in ranges]
        series = {
            "log": [float(one.log.records) for one in ranges],
            "export": [float(one.export.records) for one in ranges],
        }
        parts = [stacked(names, series, "records of both")]
        if differing := [
            (name, float(one.different)) for name, one in zip(names, ranges, strict=True) if one.different
        ]:
            parts += [text("Different keys by range, named by its first key:"), bars(differing, "keys")]
        sections.append(Section(f"{topic} by range of keys", parts))
    return page("Audit of an export", summary, found.same, sections)
