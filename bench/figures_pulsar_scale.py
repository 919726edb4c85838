"""Records on a real broker in record sets, written by one process and read back."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from typing import Any

from bench.fresh import fresh
from bench.harness import Pair, figure
from bench.pulsar_broker import MAX_WAIT, broker, home, once_per_broker, service
from broker_io import PulsarOptions

TOPIC, CHANGED = "records", "changed"
RECORDS = 1000
RECORD_BYTES = 100
IN_FLIGHT = 16
SECONDS = 5.0
WARM_UP = 1.0
PERF_INTERVAL = 5
PERF_SECONDS = 2 * PERF_INTERVAL + 2
IDLE = 0.5
"""Seconds without a record after which all count as processed; this time is not counted."""
LOSS_TIMEOUT = 60.0
"""Seconds without a record after which missing records count as lost."""


async def transactions(address: str, seconds: float, options: PulsarOptions) -> dict[str, float]:
    """Concurrent transactions of many records; records per second, and their number."""
    from txnbuffer import connect

    noise = os.urandom(RECORDS * RECORD_BYTES // 2).hex().encode()
    values = [noise[at : at + RECORD_BYTES] for at in range(0, len(noise), RECORD_BYTES)]
    done = measured = 0
    async with connect(address, broker_options=options, batching="records") as client:
        began = time.perf_counter() + WARM_UP

        async def lane() -> None:
            nonlocal done, measured
            while (now := time.perf_counter()) < began + seconds or not measured:  # at least one, however slow it is
                async with client.transaction() as txn:
                    await txn.send_many(TOPIC, values)
                done += RECORDS
                measured += RECORDS * (now >= began)

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        elapsed = time.perf_counter() - began
    return {"per_second": measured / elapsed, "records": done}


def run_transactions(address: str, seconds: float, options: PulsarOptions) -> dict[str, float]:
    return asyncio.run(transactions(address, seconds, options))


def read_all(address: str, records: int, options: PulsarOptions) -> float:
    """Records per second of reading this number of committed records from the beginning."""
    from broker_io import open_broker
    from txnbuffer import CommittedReader

    count, start = 0, time.perf_counter()
    with open_broker(address, **options) as log, CommittedReader(log, TOPIC) as reader:
        while count < records:
            batch = reader.read(timeout=LOSS_TIMEOUT)
            if batch is None:
                raise RuntimeError(f"{count} of {records} records were read")
            count += len(batch)
        return count / (time.perf_counter() - start)


async def process_all(address: str, options: PulsarOptions) -> float:
    """Records per second of consuming, changing and producing all records exactly once."""
    from txnbuffer import RecordBatch, Transaction, connect

    async def transform(txn: Transaction, records: RecordBatch) -> None:
        await txn.send_many(CHANGED, [(value or b"").swapcase() for value in records.messages.values.to_list()])

    async with connect(address, broker_options=options, batching="records") as client:
        start = time.perf_counter()
        group = f"changing-{os.getpid()}"  # each run consumes the whole topic
        done = await client.process_batches(TOPIC, group, transform, batch=RECORDS, idle_timeout=IDLE)
        return done.records / (time.perf_counter() - start - IDLE)


def run_process(address: str, options: PulsarOptions) -> float:
    return asyncio.run(process_all(address, options))


@once_per_broker
def written() -> tuple[str, float]:
    """The address of a namespace with records, and their number."""
    address = f"{broker().url}/{broker().namespace()}"
    with service(address):
        return address, write(address)["records"]


def write(address: str) -> dict[str, float]:
    options: PulsarOptions = {"admin_url": broker().admin}
    result: dict[str, float] = fresh("bench.figures_pulsar_scale", "run_transactions", address, SECONDS, options)
    return result


def perf(topic: str) -> float:
    """Messages per second of the distribution's own producer once it is warm, without transactions."""
    command: list[Any] = [f"{home()}/bin/pulsar-perf", "produce", "-u", broker().url, "-s", RECORD_BYTES, "-r", 10**7]
    command += ["-time", PERF_SECONDS, "-i", PERF_INTERVAL, topic]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=MAX_WAIT)
    return last_rate(done.stdout + done.stderr)


def last_rate(output: str) -> float:
    """The messages per second of the last interval in the output of pulsar-perf."""
    rates = re.findall(r"Throughput produced:.*?([\d.]+)\s+msg/s", output)
    if not rates:
        raise RuntimeError(f"pulsar-perf printed no rate:\n{output[-2000:]}")
    return float(rates[-1])


@figure(
    "pulsar_scale.records_per_s",
    unit="records/s",
    goal=">= 200000",
    peer="pulsar-perf produce, Java, no transactions",
)
def written_per_second() -> Pair:
    space = broker().namespace()
    address = f"{broker().url}/{space}"
    with service(address):
        ours = write(address)["per_second"]
    return Pair(ours, perf(f"persistent://{space}/perf"))


@figure("pulsar_scale.read_records_per_s", unit="records/s", goal=">= 300000")
def read_per_second() -> float:
    address, records = written()
    options: PulsarOptions = {"admin_url": broker().admin}
    result: float = fresh("bench.figures_pulsar_scale", "read_all", address, records, options)
    return result


@figure("pulsar_scale.process_records_per_s", unit="records/s", goal=">= 50000")
def processed_per_second() -> float:
    address, _ = written()
    options: PulsarOptions = {"admin_url": broker().admin}
    with service(address):
        result: float = fresh("bench.figures_pulsar_scale", "run_process", address, options)
    return result
