"""The embedded log: appending durably, and reading what committed from another process."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from bench import sqlite_peer
from bench.harness import Pair, figure
from bench.workload import batches
from broker_io import open_broker
from broker_io.batch import Batch
from broker_io.port import Broker, Writer
from broker_io.position import Positions

TOPIC = "bench"
RECORDS = 1_000_000
BATCH = 1_000
UNDER_WAY = 32
"""Appends that a writer has under way at most; the peer has one transaction."""


def append_all(writer: Writer, work: list[Batch]) -> None:
    """Append batches and return once all are durable."""
    under_way: deque[Future[Positions]] = deque()
    for batch in work:
        under_way.append(writer.append(batch))
        if len(under_way) == UNDER_WAY:
            under_way.popleft().result()
    for future in under_way:
        future.result()


def append_seconds(broker: Broker, work: list[Batch]) -> float:
    broker.create_topic(TOPIC)
    with broker.writer(TOPIC) as writer:
        start = time.perf_counter()
        append_all(writer, work)
        return time.perf_counter() - start


@figure("log.append_records_per_s", unit="records/s", goal=">= 500000", peer="sqlite3, WAL, one transaction a batch")
def append() -> Pair:
    work = batches(RECORDS, BATCH)
    with tempfile.TemporaryDirectory() as directory:
        with open_broker(f"file:{directory}/log") as broker:
            ours = append_seconds(broker, work)
        theirs = sqlite_peer.append_seconds(str(Path(directory, "peer.sqlite")), work)
    return Pair(RECORDS / ours, RECORDS / theirs)


@figure("log.append_single_per_s", unit="records/s")
def append_one_at_a_time() -> float:
    count = 20_000
    work = batches(count, 1)
    with tempfile.TemporaryDirectory() as directory, open_broker(f"file:{directory}/log") as broker:
        return count / append_seconds(broker, work)
