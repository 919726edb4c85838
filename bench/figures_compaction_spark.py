"""Compaction of a data topic by Spark, against the compaction of a copy of it by one process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.figures_log import TOPIC
from bench.figures_pipeline_jobs import session, write_log
from bench.fresh import fresh
from bench.harness import Pair, figure
from broker_io import open_broker
from broker_io.port import Broker
from snapshots.shards import Shard
from txnbuffer.config import CompactionConfig
from txnbuffer.errors import CompactionFailed
from txnbuffer.recovery.audit import CommittedLog, LogDigest, digest_of
from txnbuffer.recovery.decision_log import reset_decisions
from txnbuffer.service.offline import compact_all, owning

RECORDS, KEYS = 2_000_000, 400_000
EQUAL = ("records_in", "records_out", "bytes_in", "bytes_out", "ledgers", "rewritten")
"""The statistics that do not depend on who compacts."""

Compacted = tuple[list[dict[str, Any]], list[CompactionFailed]]


def measured(address: str, compact: Callable[[Broker], Compacted]) -> dict[str, Any]:
    """The statistics of a compaction, with the seconds from opening the log to closing it."""
    start = time.perf_counter()
    with open_broker(address) as broker:
        rows, failures = compact(broker)
    if failures:
        raise failures[0]
    return {**rows[0], "seconds": time.perf_counter() - start}


def in_one_process(address: str) -> dict[str, Any]:
    """As `txnbuf compact --log` does."""

    async def work(broker: Broker) -> Compacted:
        async with owning(broker, "bench", CompactionConfig()) as ask:
            return await compact_all(ask, [TOPIC])

    return measured(address, lambda broker: asyncio.run(work(broker)))


def on_spark(*addresses: str) -> list[dict[str, Any]]:
    """As `txnbuf pipeline compact` does, one log after the other in a session on local[2]."""
    from txnbuffer.pipeline.jobs.compact import compact

    spark = session()

    def work(broker: Broker) -> Compacted:
        return compact(spark, broker, CompactionConfig(), [TOPIC], on_progress=lambda _: None)

    done = [measured(address, work) for address in addresses]
    spark.stop()
    return done


def digest(address: str, like: LogDigest | None = None) -> LogDigest:
    """The digest of the newest records of a log."""
    with open_broker(address, read_only=True) as broker, tempfile.TemporaryDirectory() as directory:
        return digest_of(CommittedLog(broker, TOPIC), directory, like=like)[0]


def check(before: LogDigest, address: str, statistics: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises AssertionError unless a compacted log has its newest records, and lost what another one has lost."""
    if digest(address, before) != before:
        raise AssertionError(f"{address} has other newest records than before its compaction")
    if [statistics[name] for name in EQUAL] != [other[name] for name in EQUAL]:
        raise AssertionError(f"{statistics} and {other} are not of the same compaction")
    if not statistics["records_out"] < statistics["records_in"]:
        raise AssertionError(f"nothing was compacted: {statistics}")


@figure("compaction.spark.records_per_s", unit="records/s", peer="one process on a copy of the log")
def records_per_s() -> Pair:
    """Of transactions of 1,000 records, five records a key; the session has compacted another copy before."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"file:{directory}/log"
        write_log(address, RECORDS, KEYS)
        with open_broker(address) as broker:
            reset_decisions(broker, Shard(0, 1), "bench")  # no service wrote these transactions
        for name in ("warm", "process"):
            shutil.copytree(f"{directory}/log", f"{directory}/{name}")
        before = digest(address)
        _, ours = fresh("bench.figures_compaction_spark", "on_spark", f"file:{directory}/warm", address)
        theirs = fresh("bench.figures_compaction_spark", "in_one_process", f"file:{directory}/process")
        check(before, address, ours, theirs)
        check(before, f"file:{directory}/process", theirs, ours)
    return Pair(RECORDS / ours["seconds"], RECORDS / theirs["seconds"])
