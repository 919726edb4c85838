"""The embedded log: durable appends, and reading committed records from another process."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

from bench import sqlite_peer
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.log_owner import LogOwner
from bench.workload import batches, end_of
from broker_io import open_broker
from broker_io.batch import Batch
from broker_io.port import Broker, Writer
from broker_io.position import Positions
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import transactional

TOPIC = "bench"
RECORDS = 1_000_000
BATCH = 1_000
READ_AT_ONCE = 10_000
MAX_WAIT = 10.0
"""Seconds without a record after which a reader reports missing records."""
UNDER_WAY = 32
"""Maximum number of pending appends of the writer; the peer has one transaction."""


def append_all(writer: Writer, work: list[Batch]) -> None:
    """Append batches and wait until all are durable."""
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


@figure("log.append_records_per_s", unit="records/s", goal=">= 500000", peer="sqlite3, WAL, one transaction per batch")
def append() -> Pair:
    work = batches(RECORDS, BATCH)
    with tempfile.TemporaryDirectory() as directory:
        with open_broker(f"file:{directory}/log") as broker:
            ours = append_seconds(broker, work)
        theirs = sqlite_peer.append_seconds(str(Path(directory, "peer.sqlite")), work)
    return Pair(RECORDS / ours, RECORDS / theirs)


def write_committed(address: str, work: list[Batch]) -> None:
    """Write each batch as a committed transaction, and a snapshot of the topic's buffer."""
    with open_broker(address) as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register(TOPIC)
        with broker.writer(TOPIC) as writer:
            for number, batch in enumerate(work, 1):
                append_all(writer, [transactional(batch, TxnId(0, number), 1)])
                append_all(writer, [end_of(range(number, number + 1), Outcome.COMMIT, len(batch))])
        manager.pump()


def read_committed_seconds(address: str, expected: int) -> float:
    """Seconds to read the `expected` visible records of a log that another process owns or owned."""
    from txnbuffer.client.reading.reader import CommittedReader

    start = time.perf_counter()
    count = 0
    with open_broker(address, read_only=True) as broker, CommittedReader(broker, TOPIC) as reader:
        while count < expected:
            batch = reader.read(limit=READ_AT_ONCE, timeout=MAX_WAIT)
            if batch is None:
                raise RuntimeError(f"{count} of {expected} records became visible")
            count += len(batch)
    return time.perf_counter() - start


@figure("log.read_records_per_s", unit="records/s", goal=">= 1500000", peer="sqlite3, rows by the thousand")
def read_committed() -> Pair:
    work = batches(RECORDS, BATCH)
    with tempfile.TemporaryDirectory() as directory:
        address, peer = f"file:{directory}/log", str(Path(directory, "peer.sqlite"))
        write_committed(address, work)
        sqlite_peer.append_seconds(peer, work)
        ours = float(fresh("bench.figures_log", "read_committed_seconds", address, RECORDS))
        theirs = float(fresh("bench.sqlite_peer", "read_seconds", peer, BATCH))
    return Pair(RECORDS / ours, RECORDS / theirs)


@figure("log.append_single_per_s", unit="records/s")
def append_one_at_a_time() -> float:
    count = 20_000
    work = batches(count, 1)
    with tempfile.TemporaryDirectory() as directory, open_broker(f"file:{directory}/log") as broker:
        return count / append_seconds(broker, work)
