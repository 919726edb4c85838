"""Compaction of data topics of the embedded log: with transactions, and again and again under a steady load."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.service_process import service
from bench.workload import end_of
from broker_io.batch import Batch, Blobs
from broker_io.compaction import CompactionReport, CompactionRequest
from broker_io.filelog.log.broker import FileBroker
from broker_io.position import EARLIEST, Int64s
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.compaction import TransactionRules
from txnbuffer.cli.admin_client import ServiceAddress, call
from txnbuffer.config import Config
from txnbuffer.follow import LogFollower
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import transactional

TOPIC = "bench"
RECORDS, KEYS = 2_000_000, 400_000
TRANSACTION = 100
KEY_BYTES, VALUE_BYTES = 12, 100
CLEANS, STEADY_KEYS, STEADY_RECORDS = 20, 200_000, 100_000


class Topic:
    """A data topic with committed transactions of `TRANSACTION` records; one in ten aborts."""

    def __init__(self, broker: FileBroker) -> None:
        broker.create_topic(TOPIC)
        self._broker = broker
        self._writer = broker.writer(TOPIC)
        self._choose = np.random.default_rng(1)
        self._txn = 0
        self._log = LogFollower(broker, TOPIC, TransactionBuffer(), EARLIEST)

    def append(self, keys: Int64s) -> None:
        """Append records with these keys, and close the ledger."""
        for first in range(0, len(keys), 80 * TRANSACTION):
            parts: list[Batch] = []
            for start in range(first, min(first + 80 * TRANSACTION, len(keys)), TRANSACTION):
                self._txn += 1
                records = self._records(keys[start : start + TRANSACTION])
                outcome = Outcome.COMMIT if self._txn % 10 else Outcome.ABORT
                parts.append(transactional(records, TxnId(0, self._txn), 1))
                parts.append(end_of(range(self._txn, self._txn + 1), outcome, len(records)))
            self._writer.append(Batch.concat(parts)).result()
        self._broker.roll(TOPIC)

    def _records(self, keys: Int64s) -> Batch:
        names, values = (
            b"".join([b"key-%08d" % key for key in keys.tolist()]),
            self._choose.bytes(VALUE_BYTES * len(keys)),
        )
        return Batch(_column(names, KEY_BYTES, len(keys)), _column(values, VALUE_BYTES, len(keys)))

    def compact(self, least_dead: float) -> tuple[CompactionReport, float]:
        """The report and the seconds of a compaction of all closed ledgers."""
        self._log.replay()
        upto, rules = self._broker.ledgers(TOPIC)[-2].ledger, TransactionRules(self._log.buffer)
        request = CompactionRequest(upto, rules, least_dead=least_dead)
        start = time.perf_counter()
        report = self._broker.compact_records(TOPIC, request)
        return report, time.perf_counter() - start


def _column(data: bytes, width: int, count: int) -> Blobs:
    return Blobs(data, np.arange(0, (count + 1) * width, width, dtype=np.int32), None)


@contextmanager
def new_topic() -> Iterator[Topic]:
    with tempfile.TemporaryDirectory() as directory, FileBroker.open(f"{directory}/log", committer=False) as broker:
        yield Topic(broker)


@figure("compaction.transactions.records_per_s", unit="records/s", goal=">= 500000")
def transactions_per_s() -> float:
    """Of a topic with transactions of 100 records, a tenth of them aborted, five records a key."""
    with new_topic() as topic:
        topic.append(np.random.default_rng(2).integers(0, KEYS, RECORDS))
        _, seconds = topic.compact(0.0)
    return RECORDS / seconds


def written(least_dead: float) -> float:
    """Bytes written by compactions for each byte appended: nine records of ten have a key of the same tenth."""
    choose = np.random.default_rng(3)
    size = appended = 0
    with new_topic() as topic:
        topic.append(np.arange(STEADY_KEYS))
        for _ in range(CLEANS):
            hot = choose.integers(0, STEADY_KEYS // 10, STEADY_RECORDS)
            any_key = choose.integers(0, STEADY_KEYS, STEADY_RECORDS)
            topic.append(np.where(choose.random(STEADY_RECORDS) < 0.9, hot, any_key))
            report, _ = topic.compact(least_dead)
            size += report.bytes_written
            appended += STEADY_RECORDS * (KEY_BYTES + VALUE_BYTES)
    return size / appended


EVERYTHING = "cleaning everything each time"


@figure("compaction.write_amplification", unit="bytes per byte appended", goal="<= 0.5 times the peer", peer=EVERYTHING)
def write_amplification() -> Pair:
    return Pair(written(Config().compaction.least_dead), written(0.0))


COLD, COLD_RECORDS = 8, 500_000
SECONDS = 6.0


def fill_by_client(address: str, topic: str) -> None:
    """Five records a key, in transactions of 1,000 records."""
    from txnbuffer import connect

    with connect(address) as client:
        for first in range(0, COLD_RECORDS, 1000):
            keys = [b"key-%08d" % (number % (COLD_RECORDS // 5)) for number in range(first, first + 1000)]
            with client.transaction() as txn:
                txn.send_many(topic, [bytes(VALUE_BYTES)] * 1000, keys=keys)


def compacted(address: str, topics: list[str]) -> float:
    """Compact topics one after the other; the records looked at in a second."""
    service, records, start = ServiceAddress(address.removeprefix("txnbuf://")), 0, time.perf_counter()
    row: dict[str, Any]
    for topic in topics:
        call(service, "Compact", topic=topic)
        while (row := call(service, "Compactions", topic=topic)[0])["run"] is None or row["state"] in (
            "waiting",
            "running",
        ):
            time.sleep(0.02)
        records += row["run"]["statistics"]["records_in"]
    return records / (time.perf_counter() - start)


def while_compacting() -> tuple[float, float]:
    """Transactions per second without and with a compaction in the same service."""
    topics = [f"cold{number}" for number in range(COLD)]
    with service() as address:
        for topic in topics:
            fill_by_client(address, topic)
        alone = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 512, 1, SECONDS)
        with ThreadPoolExecutor(1) as thread:
            rate = thread.submit(compacted, address, topics)
            meanwhile = fresh("bench.figures_embedded", "run_lanes", address, ["a"], 512, 1, SECONDS)
            print(f"  {rate.result():.0f} records/s were compacted meanwhile", file=sys.stderr)
    return float(meanwhile["per_second"]), float(alone["per_second"])


@figure(
    "compaction.serving", unit="transactions/s", goal=">= 0.7 times the peer", peer="the service without a compaction"
)
def serving() -> Pair:
    return Pair(*while_compacting())
