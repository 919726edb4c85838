"""A service that follows few and many topics of a real broker: time until commits are visible, takeover, resources."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.fresh import fresh
from bench.harness import figure
from bench.pulsar_broker import broker, once_per_broker, service
from broker_io import PulsarOptions

FEW, MANY = 10, 1_000
AT_ONCE = 50
COMMITS = 200
VALUE = b"v" * 100


def names(count: int) -> list[str]:
    return [f"topic-{number}" for number in range(count)]


async def commit_to(client: Any, topic: str) -> float:
    """Seconds until a transaction of one record is visible."""
    async with client.transaction() as txn:
        await txn.send(topic, VALUE)
        began = time.perf_counter()
        await txn.commit(wait_visible=True)
        return time.perf_counter() - began


async def visible(address: str, count: int, options: PulsarOptions) -> float:
    """The median seconds until a commit is visible, while the service follows `count` topics."""
    from txnbuffer import connect

    topics = names(count)
    async with connect(address, broker_options=options) as client:
        for first in range(0, count, AT_ONCE):
            await asyncio.gather(*(commit_to(client, topic) for topic in topics[first : first + AT_ONCE]))
        return statistics.median([await commit_to(client, topics[number % count]) for number in range(COMMITS)])


def run_visible(address: str, count: int, options: PulsarOptions) -> float:
    return asyncio.run(visible(address, count, options))


class Followed(NamedTuple):
    """A namespace of topics, and what its service took while it followed all of them."""

    address: str
    visible_seconds: float
    resident_bytes: float
    threads: float


@once_per_broker
def followed(count: int) -> Followed:
    address = f"{broker().url}/{broker().namespace()}"
    with service(address) as (process, _):
        seconds = fresh("bench.figures_pulsar_followed", "run_visible", address, count, {"admin_url": broker().admin})
        return Followed(address, float(seconds), status(process.pid, "VmRSS") * 1024, status(process.pid, "Threads"))


def status(pid: int, name: str) -> float:
    """A number of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


@figure("pulsar.visible_ms.10", unit="ms")
def visible_of_few() -> float:
    return 1000 * followed(FEW).visible_seconds


@figure("pulsar.visible_ms.1000", unit="ms")
def visible_of_many() -> float:
    return 1000 * followed(MANY).visible_seconds


@figure("pulsar.service_bytes.1000", unit="bytes")
def resident_of_many() -> float:
    return followed(MANY).resident_bytes


@figure("pulsar.service_threads.1000", unit="threads", goal="<= 40")
def threads_of_many() -> float:
    return followed(MANY).threads


@figure("pulsar.takeover_seconds.1000", unit="s", goal="<= 1")
def takeover_of_many() -> float:
    """With a standby that keeps all topics warm."""
    address = followed(MANY).address
    with service(address) as (active, _), service(address, "--standby", event="warm"):
        options: PulsarOptions = {"admin_url": broker().admin}
        result: float = fresh("bench.figures_pulsar_recovery", "run_takeover", address, active.pid, options, "topic-0")
    return result
