"""Change streams of the public client from a service in another process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.harness import figure
from bench.service_process import service

RECORDS = 300_000
TXN_RECORDS = 5_000
VALUE = b"v" * 100
RATE, TXNS_PER_S = 5_000, 50
SECONDS = 5.0
STREAMS = 200
FAN_OUT_TXNS_PER_S, FAN_OUT_TXN_RECORDS = 20, 100


async def fill(client: Any, records: int) -> None:
    """Write records of 100 bytes with keys of their own, in transactions of 5,000."""
    for first in range(0, records, TXN_RECORDS):
        async with client.transaction() as txn:
            keys = [f"{number}" for number in range(first, first + TXN_RECORDS)]
            await txn.send_many("a", [VALUE] * TXN_RECORDS, keys=keys)
            await txn.commit(wait_visible=True)


async def filled(address: str, records: int) -> None:
    from txnbuffer import connect

    async with connect(address) as client:
        await fill(client, records)


async def delivered(address: str, *, in_memory: bool, records: int) -> dict[str, float]:
    """Mutations per second delivered to a reader that starts after the last commit.

    `in_memory`: an earlier stream that reads nothing keeps them in the memory of the service.
    """
    from txnbuffer import ChangeBatch, connect
    from txnbuffer.client.streams.streams import ShardStreams
    from txnbuffer.streams.client import ClientConfig

    async with connect(address) as holding, connect(address) as client:
        if in_memory:
            await holding.send("a", b"first")
            holding.streams = ShardStreams(holding.streams.connectors, 60.0, ClientConfig(window_items=1))
            token = (await anext(holding.stream("a", from_="now"))).token
            await filled(address, records)
            stream = client.stream("a", from_=token)
        else:
            await filled(address, records)
            stream = client.stream("a")
        count = 0
        start = time.perf_counter()
        while count < records:
            item = await anext(stream)
            count += len(item) if isinstance(item, ChangeBatch) else 0
        return {"per_second": count / (time.perf_counter() - start)}


async def latency(address: str, seconds: float) -> dict[str, float]:
    """Seconds from the commit request until a reader that keeps up has the last record, at 5,000 records per second."""
    from txnbuffer import ChangeBatch, connect

    asked: dict[bytes, float] = {}
    times: list[float] = []
    async with connect(address) as writing, connect(address) as client:
        await writing.send("a", b"first")
        stream = client.stream("a", from_="now")
        await anext(stream)

        async def one(number: int) -> None:
            last = b"last-%d" % number
            async with writing.transaction() as txn:
                await txn.send_many("a", [VALUE] * (RATE // TXNS_PER_S - 1) + [last])
                asked[last] = time.perf_counter()

        async def read(wanted: int) -> None:
            while len(times) < wanted:
                item = await anext(stream)
                now = time.perf_counter()
                values = [row.value for row in item] if isinstance(item, ChangeBatch) else []
                times.extend(now - asked[value] for value in values if value is not None and value in asked)

        count = int(seconds * TXNS_PER_S)
        reading = asyncio.ensure_future(read(count))
        began = time.perf_counter()
        sending = []
        for number in range(count):
            await asyncio.sleep(max(began + number / TXNS_PER_S - time.perf_counter(), 0))
            sending.append(asyncio.ensure_future(one(number)))
        await asyncio.gather(*sending, reading)
    times.sort()
    return {"p99": times[int(len(times) * 0.99)]}


async def keeps_up(address: str, streams: int, seconds: float) -> dict[str, float]:
    """Streams of one topic that have received all of 2,000 mutations per second one second after the last one."""
    from txnbuffer import ChangeBatch, connect

    counts = [0] * streams
    total = int(seconds * FAN_OUT_TXNS_PER_S) * FAN_OUT_TXN_RECORDS
    async with connect(address) as writing, connect(address) as client:
        await writing.send("a", b"first")

        async def follow(number: int) -> None:
            stream = client.stream("a", from_="now")
            await anext(stream)
            ready[number].set_result(None)
            while counts[number] < total:
                item = await anext(stream)
                counts[number] += len(item) if isinstance(item, ChangeBatch) else 0

        ready = [asyncio.get_running_loop().create_future() for _ in counts]
        following = [asyncio.ensure_future(follow(number)) for number in range(streams)]
        await asyncio.gather(*ready)
        began = time.perf_counter()
        for number in range(total // FAN_OUT_TXN_RECORDS):
            await asyncio.sleep(max(began + number / FAN_OUT_TXNS_PER_S - time.perf_counter(), 0))
            async with writing.transaction() as txn:
                await txn.send_many("a", [VALUE] * FAN_OUT_TXN_RECORDS)
        done, late = await asyncio.wait(following, timeout=1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return {"streams": len(done)}


@figure("streams.delivered_per_s.memory", unit="mutations/s", goal=">= 250000")
def from_memory() -> float:
    with service() as address:
        return asyncio.run(delivered(address, in_memory=True, records=RECORDS))["per_second"]


@figure("streams.delivered_per_s.backfill", unit="mutations/s", goal=">= 250000")
def from_the_log() -> float:
    with service() as address:
        return asyncio.run(delivered(address, in_memory=False, records=RECORDS))["per_second"]


@figure("streams.commit_to_delivery_ms_p99", unit="ms", goal="<= 20")
def commit_to_delivery() -> float:
    with service() as address:
        return 1000 * asyncio.run(latency(address, SECONDS))["p99"]


@figure("streams.fan_out", unit="streams", goal=">= 100")
def fan_out() -> float:
    with service() as address:
        return asyncio.run(keeps_up(address, STREAMS, SECONDS))["streams"]
