"""A pair against one service, what lanes cost, and a promotion with much that is not applied."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.disk import synced_write_ms
from bench.figures_embedded import SECONDS, VALUE
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.pair_process import free_port, pair, round_trip_ms
from bench.service_process import service
from bench.workload import batches
from broker_io.filelog.pair.broker import PairBroker, PairOptions

TOPICS = tuple(f"topic-{number}" for number in range(16))
APPENDS, RECORDS_EACH = 2_000, 50
"""100,000 records."""
TIMES = 5
"""How often the same is applied: the machine may do other work meanwhile."""
CLIENT_MS = 1.0
"""Milliseconds that a commit may take besides its two synced writes and the round trip."""
BEFORE, COMMITS = 50, 500
LANES = PairOptions("", "", "").lanes
WAIT = 60.0
SYNCED_WRITES = 200


def per_second(address: str, in_flight: int) -> float:
    result = fresh("bench.figures_embedded", "run_lanes", address, ["a"], in_flight, 1, SECONDS)
    return float(result["per_second"])


def against_one(in_flight: int) -> Pair:
    """Transactions per second that are durable on both, and those of one service right after."""
    with pair() as both:
        replicated = per_second(both, in_flight)
    with service() as alone:
        return Pair(replicated, per_second(alone, in_flight))


@figure("replication.txn_per_s.1", unit="transactions/s", peer="one service")
def one_in_flight() -> Pair:
    return against_one(1)


@figure("replication.txn_per_s.64", unit="transactions/s", goal=">= 0.4 times the peer", peer="one service")
def some_in_flight() -> Pair:
    return against_one(64)


@figure("replication.txn_per_s.512", unit="transactions/s", peer="one service")
def many_in_flight() -> Pair:
    return against_one(512)


async def _commit_ms(address: str) -> float:
    from txnbuffer import connect

    times: list[float] = []
    async with connect(address) as client:
        for _ in range(BEFORE + COMMITS):
            txn = await client.transaction().begin()
            await txn.send("a", VALUE, key="key")
            began = time.perf_counter()
            await txn.commit()
            times.append(time.perf_counter() - began)
    return sorted(times[BEFORE:])[COMMITS // 2] * 1000


def commit_ms(address: str) -> float:
    """Median milliseconds from the request to commit a transaction of one record to the answer, one after the other."""
    return asyncio.run(_commit_ms(address))


@figure(
    "replication.commit_ms_p50",
    unit="ms",
    goal="<= 1 times the peer",
    peer="two synced writes, a round trip between processes and 1 ms",
)
def one_commit() -> Pair:
    with pair() as both:
        synced = [synced_write_ms(SYNCED_WRITES)]
        took = float(fresh("bench.figures_replication", "commit_ms", both))
        synced.append(synced_write_ms(SYNCED_WRITES))  # the speed of a disk changes
        return Pair(took, sum(synced) + round_trip_ms() + CLIENT_MS)


class Members(NamedTuple):
    """Two brokers of a pair in this process; the backup applies nothing until `apply` is set."""

    live: PairBroker
    backup: PairBroker
    apply: threading.Event


@contextmanager
def members(lanes: int) -> Iterator[Members]:
    """Members in sync, with topics."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        ports, opened = [free_port(), free_port()], []
        for number in (0, 1):
            options = PairOptions(
                f"file:{directory}/lock", f"127.0.0.1:{ports[number]}", f"127.0.0.1:{ports[1 - number]}",
                found=not number, lanes=lanes,
            )  # fmt: skip
            opened.append(stack.enter_context(PairBroker.open_member(f"{directory}/log{number}", pair=options)))
        live, backup = opened
        wait_for(lambda: live.live and len(live.status()["in_sync"]) == 2, "the backup is not in sync")
        live.create_topics(TOPICS)
        wait_for(lambda: len(backup.topics()) == len(TOPICS), "the backup has not all topics")
        applying, store = threading.Event(), backup._store
        apply = store.apply

        def held(lsn: int) -> None:
            applying.wait(WAIT)
            apply(lsn)

        setattr(store, "apply", held)  # noqa: B010  a method
        yield Members(live, backup, applying)


def write_backlog(live: PairBroker, appends: int) -> int:
    """Append what the backup does not apply yet, to each topic in turn, durable on both; how many records.

    All topics together are one record of the pair, so nearly each append is an operation of its own.
    """
    work = batches(appends * RECORDS_EACH, RECORDS_EACH)
    writers = [live.writer(topic) for topic in TOPICS]
    for first in range(0, appends, len(writers)):
        futures = [writer.append(batch) for writer, batch in zip(writers, work[first:], strict=False)]
        for future in futures:
            future.result(WAIT)
    return len(work) * RECORDS_EACH


def wait_for(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{failure} within {WAIT:g} s")
        time.sleep(0.001)


def applied_per_second(lanes: int) -> float:
    """Records per second that a backup applies which has all of them in its journal; the best of several times."""
    best = 0.0
    with members(lanes) as (live, backup, apply):
        for _ in range(TIMES):
            apply.clear()
            records = write_backlog(live, APPENDS)
            end = live.status()["end"]
            began = time.perf_counter()
            apply.set()
            while backup.status()["applied"] < end:
                time.sleep(0.001)
            best = max(best, records / (time.perf_counter() - began))
    return best


def promotion_seconds(lanes: int) -> float:
    """Seconds from the end of the lease until a backup serves that had applied none of the records."""
    with members(lanes) as (live, backup, apply):
        records = write_backlog(live, APPENDS)
        live.close()
        wait_for(lambda: backup.status()["role"] != "backup", "the backup does not become live")
        began = time.perf_counter()
        apply.set()
        wait_for(lambda: backup.live, "the backup does not serve")
        took = time.perf_counter() - began
        found = sum(ledger.entries for topic in TOPICS for ledger in backup.ledgers(topic))
        if found != records:
            raise RuntimeError(f"{found} of {records} records are there")
        return took


@figure("replication.applied_per_s", unit="records/s", goal=">= 0.9 times the peer", peer="one lane")
def lanes() -> Pair:
    rates = [float(fresh("bench.figures_replication", "applied_per_second", count)) for count in (LANES, 1)]
    return Pair(*rates)


@figure("replication.promotion_seconds", unit="s", goal="<= 1")
def promotion() -> float:
    """With 100,000 records in 2,000 appends that the backup has and has not applied."""
    return float(fresh("bench.figures_replication", "promotion_seconds", LANES))
