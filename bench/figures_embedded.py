"""Transactions of the public client with a service in another process; every commit is durable."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.fresh import fresh
from bench.harness import figure
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


@figure("embedded.txn_per_s.512", unit="transactions/s", goal=">= 20000")
def many_in_flight() -> float:
    return per_second(["a"], 512, 1)


@figure("embedded.txn_per_s.64", unit="transactions/s")
def some_in_flight() -> float:
    return per_second(["a"], 64, 1)


@figure("embedded.txn_per_s.1", unit="transactions/s")
def one_in_flight() -> float:
    return per_second(["a"], 1, 1)


@figure("embedded.txn_per_s.two_topics", unit="transactions/s", goal=">= 10000")
def two_topics() -> float:
    return per_second(["a", "b"], 512, 1)


@figure("embedded.records_per_s", unit="records/s", goal=">= 250000")
def hundred_records() -> float:
    return 100 * per_second(["a"], 64, 100)


@figure("embedded.commit_ms_p99", unit="ms", goal="<= 20")
def commit_time() -> float:
    """Time from the scheduled begin of a transaction, at 1,000 per second, to its commit."""
    with service() as address:
        result: dict[str, Any] = fresh("bench.figures_embedded", "run_paced", address, 1000, SECONDS)
    return float(result["p99"]) * 1000


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
