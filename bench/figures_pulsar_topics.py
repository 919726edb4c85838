"""Many topics of a real broker: the rate of registrations, and the cost of following them."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.pulsar_broker import broker, once_per_broker
from broker_io import PulsarOptions
from broker_io.standalone import ask

TOPICS = 200
AT_ONCE = 8
"""Topics that the peer creates concurrently; a service registers as many."""


async def registering(address: str, count: int, options: PulsarOptions) -> dict[str, float]:
    """Register `count` new topics together; topics per second, and the number of threads of the process."""
    from broker_io import open_broker
    from txnbuffer.service.engine.engine import Engine

    names = [f"topic-{number}" for number in range(count)]
    with open_broker(address, **options) as log:
        engine = await Engine.start(log, cluster_mode=True)
        try:
            began = time.perf_counter()
            await asyncio.gather(*map(engine.topics.register, names))
            elapsed = time.perf_counter() - began
            followed = [topic for topic in map(engine.topics.get, names) if topic is not None and topic.reader]
            if len(followed) < count:
                raise RuntimeError(f"{len(followed)} of {count} topics were registered")
            return {"per_second": count / elapsed, "threads": threading.active_count()}
        finally:
            await engine.stop()


def run_registering(address: str, count: int, options: PulsarOptions) -> dict[str, float]:
    return asyncio.run(registering(address, count, options))


def registered() -> dict[str, Any]:
    """Register topics in a new namespace; the measurements."""
    address = f"{broker().url}/{broker().namespace()}"
    options: PulsarOptions = {"admin_url": broker().admin}
    result: dict[str, Any] = fresh("bench.figures_pulsar_topics", "run_registering", address, TOPICS, options)
    return result


@once_per_broker
def threads() -> float:
    return float(registered()["threads"])


def made() -> float:
    """Topics per second created by the admin interface alone."""
    space = broker().namespace()
    paths = [f"persistent/{space}/bare-{number}" for number in range(TOPICS)]
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda path: ask(broker().admin, path, "PUT"), paths))
    return TOPICS / (time.perf_counter() - began)


@figure(
    "pulsar.topics_per_s", unit="topics/s", goal=">= 0.1 times the peer", peer="creating topics by the admin interface"
)
def topics_per_second() -> Pair:
    return Pair(float(registered()["per_second"]), made())


@figure("pulsar.topics_threads", unit="threads", goal="<= 64")
def topics_threads() -> float:
    return threads()
