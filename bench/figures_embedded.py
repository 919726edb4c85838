"""Transactions of the public client on an owned log; every commit is durable.

The log is that of a service in another process, or of the process of the client (`.in_process`). SQLite, the peer of
single transactions, has one writer in the same process as the client and in WAL mode with `synchronous=FULL`, and
inserts a row with the same key and value in each transaction. What two topics, a named producer, or the positions of a
group cost is compared with transactions of one record to one topic. `bench.rounds` measures both sides.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

from bench.disk import synced_write_ms
from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.service_process import service
from broker_io import PulsarOptions

SECONDS = 5.0
WARM_UP = 1.0
VALUE = b"v" * 100


async def lanes(
    address: str,
    topics: list[str],
    in_flight: int,
    records: int,
    seconds: float,
    options: PulsarOptions | None = None,
    token: str | None = None,
) -> dict[str, float]:
    """Concurrent lanes of consecutive transactions, each with `records` records to each topic."""
    from txnbuffer import connect

    done = 0
    began = time.perf_counter() + WARM_UP
    async with connect(address, broker_options=options, token=token) as client:

        async def lane() -> None:
            nonlocal done
            values = [VALUE] * records
            while (now := time.perf_counter()) < began + seconds or not done:  # at least one, however slow it is
                async with client.transaction() as txn:
                    for topic in topics:
                        if records == 1:
                            await txn.send(topic, VALUE, key="key")
                        else:
                            await txn.send_many(topic, values)
                done += now >= began

        await asyncio.gather(*(lane() for _ in range(in_flight)))
        elapsed = time.perf_counter() - began
    return {"per_second": done / elapsed}


async def paced(address: str, rate: float, seconds: float) -> dict[str, float]:
    """Begin transactions at a steady rate, without waiting for earlier ones; the time of each to commit."""
    from txnbuffer import connect

    times: list[float] = []
    async with connect(address) as client:

        async def one(due: float) -> None:
            async with client.transaction() as txn:
                await txn.send("a", VALUE, key="key")
            if due >= began:
                times.append(time.perf_counter() - due)

        began = time.perf_counter() + WARM_UP
        running = set()
        due = time.perf_counter()
        while due < began + seconds:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            task = asyncio.ensure_future(one(due))
            running.add(task)
            task.add_done_callback(running.discard)
            due += 1 / rate
        await asyncio.gather(*running)
    times.sort()
    return {"p99": times[int(len(times) * 0.99)], "count": len(times)}


def run_lanes(*arguments: Any) -> dict[str, float]:
    return asyncio.run(lanes(*arguments))


def run_paced(address: str, rate: float, seconds: float) -> dict[str, float]:
    return asyncio.run(paced(address, rate, seconds))


def per_second(topics: list[str], in_flight: int, records: int) -> float:
    with service() as address:
        result: dict[str, Any] = fresh(
            "bench.figures_embedded", "run_lanes", address, topics, in_flight, records, SECONDS
        )
    return float(result["per_second"])


WARM_UP_COMMITS = 2_000
ROUND_SECONDS = 1.0
SQLITE = "SQLite, one writer"


def to_peer(function: str, *arguments: Any, in_process: bool = False) -> Pair:
    """What a function of `bench.rounds` measures on a new log."""
    log = tempfile.TemporaryDirectory() if in_process else service()
    with log as opened:
        address = f"file:{opened}/log" if in_process else opened
        value, peer = fresh("bench.rounds", function, address, *arguments, ROUND_SECONDS, WARM_UP_COMMITS)
    return Pair(value, peer)


@figure("embedded.txn_per_s.512", unit="transactions/s", goal=">= 12 times the peer", peer=SQLITE)
def many_in_flight() -> Pair:
    return to_peer("to_sqlite", 512)


@figure("embedded.txn_per_s.64", unit="transactions/s", goal=">= 6 times the peer", peer=SQLITE)
def some_in_flight() -> Pair:
    return to_peer("to_sqlite", 64)


@figure("embedded.txn_per_s.1", unit="transactions/s", goal=">= 0.2 times the peer", peer=SQLITE)
def one_in_flight() -> Pair:
    return to_peer("to_sqlite", 1)


@figure("embedded.txn_per_s.1.in_process", unit="transactions/s", goal=">= 0.3 times the peer", peer=SQLITE)
def one_in_flight_in_process() -> Pair:
    """With the sync in a thread; 0.4 on a disk on which the event loop may sync."""
    return to_peer("to_sqlite", 1, in_process=True)


@figure("embedded.txn_per_s.1.in_process_sync", unit="transactions/s", goal=">= 0.3 times the peer", peer=SQLITE)
def one_of_the_sync_client_in_process() -> Pair:
    return to_peer("sync_to_sqlite", in_process=True)


ONE_TOPIC = "one record to one topic, 64 in flight"


@figure("embedded.txn_per_s.two_topics.64", unit="transactions/s", goal=">= 0.8 times the peer", peer=ONE_TOPIC)
def two_topics_of_some_in_flight() -> Pair:
    return to_peer("to_one_topic", "two_topics", 64)


@figure("embedded.txn_per_s.named.64", unit="transactions/s", goal=">= 0.8 times the peer", peer=ONE_TOPIC)
def named_of_some_in_flight() -> Pair:
    """64 named producers."""
    return to_peer("to_one_topic", "named", 64)


@figure("embedded.txn_per_s.positions.64", unit="transactions/s", goal=">= 0.8 times the peer", peer=ONE_TOPIC)
def positions_of_some_in_flight() -> Pair:
    """One member of a group, which consumes 64 topics with `process`, a transaction for each record."""
    return to_peer("to_one_topic", "positions", 64)


@figure("embedded.txn_per_s.two_topics", unit="transactions/s", goal=">= 10000")
def two_topics() -> float:
    return per_second(["a", "b"], 512, 1)


@figure("embedded.records_per_s", unit="records/s", goal=">= 250000")
def hundred_records() -> float:
    return 100 * per_second(["a"], 64, 100)


@figure("embedded.commit_ms_p99", unit="ms", goal="<= 10", peer="a synced write")
def commit_time() -> Pair:
    """Time from the scheduled begin of a transaction, at 1,000 per second, to its commit."""
    with service() as address:
        before = synced_write_ms()
        result: dict[str, Any] = fresh("bench.figures_embedded", "run_paced", address, 1000, SECONDS)
        return Pair(float(result["p99"]) * 1000, (before + synced_write_ms()) / 2)


@figure("embedded.commit_ms_p99.64", unit="ms", goal="<= 1 times the peer", peer="5 synced writes and 3 ms")
def commit_time_of_some_in_flight() -> Pair:
    """Time of a transaction while 64 are in flight."""
    p99, sync = to_peer("times", 64)
    return Pair(p99, 5 * sync + 3)


@figure("embedded.bytes_each.64", unit="bytes")
def bytes_of_a_transaction() -> float:
    """Bytes in the closed log for a transaction of a record of 100 bytes, with 64 in flight in process."""
    with tempfile.TemporaryDirectory() as directory:
        return float(fresh("bench.rounds", "bytes_each", directory, 64, WARM_UP_COMMITS, 3 * WARM_UP_COMMITS))


NEW_TOPICS = 200
MANY_TOPICS = 4_000


async def make_topics(address: str, prefix: str, count: int) -> float:
    """Topics per second, each created and registered by its own transaction, all concurrently."""
    from txnbuffer import connect

    async with connect(address) as client:

        async def one(topic: str) -> None:
            async with client.transaction() as txn:
                await txn.send(topic, VALUE)

        began = time.perf_counter()
        await asyncio.gather(*(one(f"{prefix}-{number}") for number in range(count)))
        return count / (time.perf_counter() - began)


def run_topics(address: str, prefix: str, count: int) -> float:
    return asyncio.run(make_topics(address, prefix, count))


def topics_per_second(before: int) -> float:
    with service() as address:
        for number in range(0, before, NEW_TOPICS):
            fresh("bench.figures_embedded", "run_topics", address, f"before-{number}", min(NEW_TOPICS, before - number))
        return float(fresh("bench.figures_embedded", "run_topics", address, "new", NEW_TOPICS))


@figure("embedded.topics_per_s.0", unit="topics/s")
def first_topics() -> float:
    return topics_per_second(0)


@figure("embedded.topics_per_s.4k", unit="topics/s")
def topics_with_many_existing() -> float:
    """As `first_topics`, with 4,000 existing topics in the log."""
    return topics_per_second(MANY_TOPICS)
