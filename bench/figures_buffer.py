"""The transaction buffer: applying a log, and filtering the visible records."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from bench.harness import figure
from bench.workload import end_of, one_record_each, records
from broker_io.batch import Batch, PlacedBatch
from broker_io.position import Positions
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import visible_counts
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import transactional

BATCH = 1_000
BATCHES = 400


def placed(batches: Sequence[Batch]) -> list[PlacedBatch]:
    """Consecutive batches of one ledger."""
    found: list[PlacedBatch] = []
    entry = 0
    for batch in batches:
        found.append(PlacedBatch(Positions.consecutive(1, entry, len(batch)), np.zeros(len(batch), np.int64), batch))
        entry += len(batch)
    return found


def long_transactions() -> list[PlacedBatch]:
    """Transactions of 1,000 records, each in a batch of its own, each with a marker; one in ten aborts."""
    log: list[Batch] = []
    for number in range(1, BATCHES + 1):
        outcome = Outcome.COMMIT if number % 10 else Outcome.ABORT
        log.append(transactional(records(BATCH), TxnId(0, number), 1))
        log.append(end_of(range(number, number + 1), outcome, BATCH))
    return placed(log)


def short_transactions() -> list[PlacedBatch]:
    """Transactions of one record, 1,000 in a batch, 1,000 in a marker."""
    log: list[Batch] = []
    for first in range(1, BATCHES * BATCH + 1, BATCH):
        least = range(first, first + BATCH)
        log += [one_record_each(least), end_of(least, Outcome.COMMIT)]
    return placed(log)


def fold_rate(log: list[PlacedBatch]) -> float:
    """Records per second."""
    buffer = TransactionBuffer()
    start = time.perf_counter()
    for batch in log:
        buffer.apply_batch(batch)
    return BATCHES * BATCH / (time.perf_counter() - start)


@figure("buffer.fold_records_per_s.1000", unit="records/s", goal=">= 2000000")
def fold_long() -> float:
    return fold_rate(long_transactions())


@figure("buffer.fold_records_per_s.1", unit="records/s", goal=">= 400000")
def fold_short() -> float:
    return fold_rate(short_transactions())


@figure("buffer.visible_records_per_s", unit="records/s", goal=">= 10000000")
def visible() -> float:
    log = long_transactions()
    buffer = TransactionBuffer()
    for batch in log:
        buffer.apply_batch(batch)
    start = time.perf_counter()
    for batch in log:
        visible_counts(batch, buffer)
    return BATCHES * BATCH / (time.perf_counter() - start)
