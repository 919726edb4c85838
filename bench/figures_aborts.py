"""The set of aborted transactions: memory of ten million, and the time of a lookup."""

from __future__ import annotations

import time

import numpy as np

from bench.fresh import fresh, resident_bytes
from bench.harness import figure
from broker_io.position import Int64s
from txnbuffer.buffer.buffer import SEGMENT_SIZE
from txnbuffer.buffer.state import AbortedSet
from txnbuffer.model import TxnId

MILLION = 1_000_000
LOOKUPS = 200_000
BULK = 1_000


def aborted_ids(count: int, one_in: int) -> Int64s:
    """int64[count]: ids of aborted transactions, ascending, if one in `one_in` transactions aborts, at random."""
    steps = np.random.default_rng(7).geometric(1 / one_in, count) if one_in > 1 else np.ones(count)
    return np.cumsum(steps, dtype=np.int64)


def filled(ids: Int64s) -> AbortedSet:
    """A set filled segment by segment, as recovery fills it."""
    aborted = AbortedSet()
    most = np.zeros(SEGMENT_SIZE, np.int64)
    for start in range(0, len(ids), SEGMENT_SIZE):
        part = ids[start : start + SEGMENT_SIZE]
        aborted.update(most[: len(part)], part)
    return aborted


def bytes_each(count: int, one_in: int) -> float:
    ids = aborted_ids(count, one_in)
    filled(ids[:SEGMENT_SIZE])
    before = resident_bytes()
    aborted = filled(ids)
    return (resident_bytes() - before) / len(aborted)


def lookup_ns(count: int, one_in: int, bulk: bool, together: int = BULK) -> float:
    aborted = filled(aborted_ids(count, one_in))
    asked = np.random.default_rng(8).integers(1, count * one_in, LOOKUPS)
    most = np.zeros(together, np.int64)
    txns = [TxnId(0, least) for least in asked.tolist()]
    start = time.perf_counter_ns()
    if bulk:
        for at in range(0, LOOKUPS, together):
            aborted.mask(most, asked[at : at + together])
    else:
        for txn in txns:
            txn in aborted  # noqa: B015  # the lookup is measured
    return (time.perf_counter_ns() - start) / LOOKUPS


@figure("aborts.bytes_each.10m", unit="bytes", goal="<= 4")
def one_in_ten_aborted() -> float:
    return float(fresh("bench.figures_aborts", "bytes_each", 10 * MILLION, 10))


@figure("aborts.bytes_each.10m.sparse", unit="bytes", goal="<= 4")
def one_in_a_thousand_aborted() -> float:
    return float(fresh("bench.figures_aborts", "bytes_each", 10 * MILLION, 1000))


@figure("aborts.lookup_ns", unit="ns", goal="<= 1000")
def asked_one_by_one() -> float:
    return float(fresh("bench.figures_aborts", "lookup_ns", 10 * MILLION, 10, False))


@figure("aborts.lookup_ns.bulk", unit="ns", goal="<= 250")
def asked_by_the_thousand() -> float:
    return float(fresh("bench.figures_aborts", "lookup_ns", 10 * MILLION, 10, True))


FETCHED = 100


@figure("compaction.aborted_lookup_us", unit="us", goal="<= 100")
def asked_by_a_read() -> float:
    """Which of the 100 transactions of a read are aborted, of a million that are."""
    return lookup_ns(MILLION, 10, True, FETCHED) * FETCHED / 1000
