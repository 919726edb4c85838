"""The public client in other ways than over a service with asyncio: blocking, in one process, and reading."""

from __future__ import annotations

import asyncio
import tempfile
import time

from bench.figures_delivery import filled
from bench.figures_embedded import SECONDS, VALUE, WARM_UP
from bench.fresh import fresh
from bench.harness import figure
from bench.service_process import service

RECORDS = 300_000


def sync_transactions(address: str, seconds: float, records: int) -> float:
    """Consecutive transactions of one thread, each with `records` records sent one by one; records per second."""
    from txnbuffer import connect

    done = 0
    began = time.perf_counter() + WARM_UP
    with connect(address) as client:
        while (now := time.perf_counter()) < began + seconds or not done:
            with client.transaction() as txn:
                for _ in range(records):
                    txn.send("a", VALUE, key="key")
            done += records * (now >= began)
        return done / (time.perf_counter() - began)


def read_records(address: str, records: int) -> float:
    """Records per second of a reader of the client, which begins at the first record after all were committed."""
    return asyncio.run(_read_records(address, records))


async def _read_records(address: str, records: int) -> float:
    from txnbuffer import connect

    await filled(address, records)
    async with connect(address) as client:
        reader = await client.reader("a")
        count, began = 0, time.perf_counter()
        while count < records:
            batch = await reader.read(timeout=60.0)
            if batch is None:
                raise RuntimeError(f"{count} of {records} records were read")
            count += len(batch)
        return count / (time.perf_counter() - began)


@figure("client.sync_txn_per_s", unit="transactions/s")
def sync_transactions_of_one_record() -> float:
    with service() as address:
        return float(fresh("bench.figures_client", "sync_transactions", address, SECONDS, 1))


@figure("client.sync_records_per_s", unit="records/s")
def sync_transactions_of_many_records() -> float:
    with service() as address:
        return float(fresh("bench.figures_client", "sync_transactions", address, SECONDS, 1000))


@figure("client.read_records_per_s", unit="records/s")
def records_read() -> float:
    with service() as address:
        return float(fresh("bench.figures_client", "read_records", address, RECORDS))


@figure("client.file_txn_per_s.64", unit="transactions/s")
def some_in_flight_in_process() -> float:
    """Transactions of one record on a log that the process of the client owns."""
    with tempfile.TemporaryDirectory() as directory:
        result = fresh("bench.figures_embedded", "run_lanes", f"file:{directory}/log", ["a"], 64, 1, SECONDS)
    return float(result["per_second"])
