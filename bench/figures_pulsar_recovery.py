"""Time until transactions continue on a real broker: after a start with many aborts, and after a takeover."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from typing import Any, NamedTuple

from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.pulsar_broker import broker, native, native_buffer, once_per_broker, service
from broker_io import PulsarOptions
from broker_io.standalone import ask

ABORTS = 800_000
IN_FLIGHT = 512
MAX_WAIT = 300.0
POLL = 0.01
VALUE = b"v" * 100
KEEP = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


class Aborted(NamedTuple):
    """Topics with the same number of aborts: `native`, TENANT/NAMESPACE/TOPIC, has Pulsar's own transactions."""

    address: str
    native: str


@once_per_broker
def aborted(count: int) -> Aborted:
    """Create the topics with transactions that abort. All data is retained, because aborts end with their ledgers."""
    space = broker().namespace()
    ask(broker().admin, f"namespaces/{space}/retention", "POST", KEEP)
    made = Aborted(f"{broker().url}/{space}", f"{space}/native")
    with service(made.address) as (_, facts):
        fresh("bench.figures_pulsar_recovery", "run_aborting", made.address, count, {"admin_url": broker().admin})
        wait_until(lambda: metric(facts["http"], "txnbuffer_aborts") == count, "all aborts are applied")
    native("abort", IN_FLIGHT, count, f"persistent://{made.native}")
    return made


async def aborting(address: str, count: int, options: PulsarOptions) -> None:
    """Abort `count` transactions of one record."""
    from txnbuffer import connect

    async with connect(address, broker_options=options) as client:

        async def lane(number: int) -> None:
            for _ in range(number, count, IN_FLIGHT):
                txn = client.transaction()
                await txn.begin()
                await txn.send("a", VALUE)
                await txn.abort()

        await asyncio.gather(*map(lane, range(IN_FLIGHT)))


def run_aborting(address: str, count: int, options: PulsarOptions) -> None:
    asyncio.run(aborting(address, count, options))


def metric(http: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise RuntimeError(f"the service has no metric {name}")


def wait_until(true: Any, what: str) -> None:
    deadline = time.monotonic() + MAX_WAIT
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {MAX_WAIT:g} s: expected that {what}")
        time.sleep(POLL)


def load(count: int) -> Pair:
    """Seconds from the start of the service process until it is ready; of the native topic, from unload to ready."""
    topics = aborted(count)
    start = time.perf_counter()
    with service(topics.address) as (_, facts):
        wait_until(lambda: metric(facts["http"], "txnbuffer_ready") == 1, "the service is ready")
        ours = time.perf_counter() - start
        if (found := metric(facts["http"], "txnbuffer_aborts")) != count:
            raise RuntimeError(f"{found:.0f} of {count} aborts were recovered")
    start = time.perf_counter()
    ask(broker().admin, f"persistent/{topics.native}/unload", "PUT")
    wait_until(lambda: native_buffer(topics.native).get("state") == "Ready", "the native topic is ready")
    theirs = time.perf_counter() - start
    if (found := native_buffer(topics.native)["totalAbortedTransactions"]) != count:
        raise RuntimeError(f"the native topic recovered {found} of {count} aborts")
    return Pair(ours, theirs)


@figure("pulsar.load_seconds.800k", unit="s", goal="<= 1", peer="unload and load of a native topic")
def load_many_aborts() -> Pair:
    return load(ABORTS)


async def takeover(address: str, pid: int, options: PulsarOptions, topic: str) -> float:
    """Seconds from the kill of the active service to the commit of a transaction in a topic, begun then."""
    from txnbuffer import Transaction, connect

    async def write(txn: Transaction) -> None:
        await txn.send(topic, VALUE)

    async with connect(address, broker_options=options) as client:
        await client.run(write)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await client.run(write)
        return time.perf_counter() - start


def run_takeover(address: str, pid: int, options: PulsarOptions, topic: str) -> float:
    return asyncio.run(takeover(address, pid, options, topic))


@figure("pulsar.takeover_seconds", unit="s", goal="<= 5")
def take_over() -> float:
    address = f"{broker().url}/{broker().namespace()}"
    with service(address) as (active, _), service(address, "--standby", event="standing by"):
        options: PulsarOptions = {"admin_url": broker().admin}
        result: float = fresh("bench.figures_pulsar_recovery", "run_takeover", address, active.pid, options, "a")
    return result
