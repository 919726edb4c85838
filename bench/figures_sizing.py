"""What the page docs/sizing.md says: rates, times, syncs and bytes by load, memory of each thing, times of recovery.

Figures `sizing.load.WAY.IN_FLIGHT.BYTES.WHAT` are for transactions of one record, by a client whose process owns the
log (`file`) or through a service (`service`), and `sizing.disk.…` for the bytes in the closed log. Both are of values
that cannot be compressed. `sizing.memory.THING` are bytes of a service, and `sizing.recovery.RECORDS` are seconds from
the start of a process until it has opened a log that a killed process has left.

`sizing.toml` has the accepted figures: `make bench ONLY=sizing ARGS=--accept` writes the table, and that of the page.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench import sizing_table
from bench.counts import SyncCounts
from bench.figures_aborts import MILLION
from bench.figures_delivery import fill
from bench.fresh import fresh, resident_bytes
from bench.harness import accepting, figure
from bench.rounds import Workers, bytes_each, incompressible
from bench.service_process import serving
from bench.sizing_table import BYTES, IN_FLIGHT, LENGTHS, LOAD, MANY, WAYS

SECONDS = 0.7
WARM_UP = 500
DISK_TXNS = 400
"""Transactions whose bytes in the log are measured, at least, and before them as many that are not."""
TOPIC = "a"
TXNS, SESSIONS, TOPICS, STREAMS, GROUPS = 2_000, 100, 200, 200, 4_000
"""Things whose memory is measured."""
QUIET = 1.0
"""Seconds in which a service has written its snapshots and freed the memory for them."""
ANNOUNCED = 3.0
"""Seconds after which a client has sent the records of an open transaction, and the service knows it."""


@contextmanager
def opened(way: str) -> Iterator[tuple[str, SyncCounts]]:
    """The address of a new log, and the syncs of the process that owns it."""
    syncs = SyncCounts()
    if way == "file":
        syncs.install()
        with tempfile.TemporaryDirectory() as directory:
            yield f"file:{directory}/log", syncs
    else:
        with serving(program=("-m", "bench.counts", "--syncs", syncs.path)) as (_, address):
            yield address, syncs


def loads(way: str, seconds: float = SECONDS) -> dict[str, dict[str, float]]:
    """Rate, times and syncs of transactions of one record, one load after the other. Run it in a new process."""
    found = {}
    with opened(way) as (address, syncs):
        for in_flight in IN_FLIGHT:
            for size in BYTES:
                found[f"{in_flight}.{size}"] = load(address, syncs, in_flight, size, seconds)
    return found


def load(address: str, syncs: SyncCounts, in_flight: int, size: int, seconds: float) -> dict[str, float]:
    with Workers(address, in_flight) as workers:
        commit = workers.doing(partial(incompressible, size=size))
        commit(0.0, WARM_UP)
        before = syncs.count
        rate = commit(seconds, 1)
        times, synced = sorted(workers.times), syncs.count - before
    return {
        "per_s": rate,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * times[int(len(times) * 0.99)],
        "syncs": synced / len(times),
    }


@cache
def loaded(way: str, _: int) -> dict[str, dict[str, float]]:
    """What a run measures, which all figures of this way share."""
    found: dict[str, dict[str, float]] = fresh("bench.figures_sizing", "loads", way)
    return found


@cache  # a count, which is the same each time
def disk_bytes(in_flight: int, records: int, size: int) -> float:
    """Bytes in the closed log for each transaction of so many records."""
    count = max(DISK_TXNS, 4 * in_flight)
    with tempfile.TemporaryDirectory() as directory:
        return bytes_each(directory, in_flight, count, count, size, records)


# Memory of a service: what is made is open, and used no more, when it is measured.

Made = Callable[[str, AsyncExitStack], Awaitable[int]]
"""Makes things, which stay until the stack ends, and returns their number."""


async def open_transactions(address: str, stack: AsyncExitStack) -> int:
    client = await connected(address, stack)
    for _ in range(TXNS):
        txn = await client.transaction().begin()
        await txn.send(TOPIC, os.urandom(100), key="key")
    await asyncio.sleep(ANNOUNCED)
    return TXNS


async def sessions(address: str, stack: AsyncExitStack) -> int:
    for _ in range(SESSIONS):
        await (await connected(address, stack)).send(TOPIC, b"1")
    return SESSIONS


async def topics(address: str, stack: AsyncExitStack) -> int:
    client, names = await connected(address, stack), [os.urandom(8).hex() for _ in range(TOPICS)]
    for first in range(0, len(names), 50):
        async with client.transaction() as txn:
            for name in names[first : first + 50]:
                await txn.send(name, b"1")
    return len(names)


async def streams(address: str, stack: AsyncExitStack) -> int:
    client = await connected(address, stack)
    await client.send(TOPIC, b"1")
    for _ in range(STREAMS):
        stream = client.stream(TOPIC, from_="now")
        await anext(stream)
        stack.push_async_callback(stream.close)
    return STREAMS


async def groups(address: str, stack: AsyncExitStack) -> int:
    """Groups with a position on one topic."""
    from broker_io.position import EARLIEST
    from txnbuffer.coordinator.messages import ConsumerPosition

    client, prefix = await connected(address, stack), os.urandom(4).hex()
    await client.send(TOPIC, b"1")
    end = await client.last_visible(TOPIC)

    async def one(group: str) -> None:
        joined = await client.join(group)
        async with client.transaction() as txn:
            txn.consumed(ConsumerPosition(group, TOPIC, joined.generation, EARLIEST, end))

    for first in range(0, GROUPS, 100):
        await asyncio.gather(*(one(f"{prefix}-{number}") for number in range(first, first + 100)))
    return GROUPS


async def connected(address: str, stack: AsyncExitStack) -> Any:
    from txnbuffer import connect

    return await stack.enter_async_context(connect(address))


async def grown(address: str, process: int, make: Made) -> tuple[float, float]:
    """Bytes and descriptors of the process for each thing that is made after as many others."""
    async with AsyncExitStack() as stack:
        await make(address, stack)
        await asyncio.sleep(QUIET)
        before = used(process)
        count = await make(address, stack)
        await asyncio.sleep(QUIET)
        after = used(process)
    if after[0] < before[0]:
        raise RuntimeError(f"the service frees memory while {count} things are made: measure more of them")
    return (after[0] - before[0]) / count, round((after[1] - before[1]) / count)


def used(process: int) -> tuple[int, int]:
    return resident_bytes(process), len(os.listdir(f"/proc/{process}/fd"))


THINGS: dict[str, Made] = {
    "transaction": open_transactions,
    "session": sessions,
    "topic": topics,
    "stream": streams,
    "group": groups,
}


def memory(thing: str) -> tuple[float, float]:
    """Bytes and descriptors of each thing. Run it in a new process."""
    with serving() as (process, address):
        return asyncio.run(grown(address, process, THINGS[thing]))


@cache  # counts, which are nearly the same each time
def remembered(thing: str) -> tuple[float, float]:
    found, descriptors = fresh("bench.figures_sizing", "memory", thing)
    return float(found), float(descriptors)


def _memory_of(thing: str) -> float:
    return remembered(thing)[0]


def _descriptors_of(thing: str) -> float:
    return remembered(thing)[1]


def of_a_service() -> float:
    with serving() as (process, _):
        return float(resident_bytes(process))


def of_a_program() -> float:
    with tempfile.TemporaryDirectory() as directory:
        return float(fresh("bench.figures_sizing", "program_bytes", f"file:{directory}/log"))


def program_bytes(address: str) -> float:
    from txnbuffer import connect

    with connect(address) as client:
        client.send(TOPIC, b"1")
        return float(resident_bytes())


def of_aborted_transactions() -> float:
    return float(fresh("bench.figures_aborts", "bytes_each", 10 * MILLION, 10))


# Recovery


def leave_log(directory: str, records: int) -> None:
    """Make a log as a killed process leaves it, which is a copy while it is open."""

    async def filled() -> None:
        from txnbuffer import connect

        with tempfile.TemporaryDirectory() as scratch:
            async with connect(f"file:{scratch}/log") as client:
                await fill(client, records)
                shutil.copytree(f"{scratch}/log", f"{directory}/log")

    asyncio.run(filled())


@cache
def left_log(records: int) -> Any:
    """A temporary directory with such a log, made once."""
    directory = tempfile.TemporaryDirectory()
    fresh("bench.figures_sizing", "leave_log", directory.name, records)
    return directory


def open_log(address: str) -> float:
    """The monotonic time at which a client has opened a log."""
    from txnbuffer import connect

    with connect(address):
        return time.monotonic()


def recovery_seconds(records: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(Path(left_log(records).name, "log"), Path(directory, "log"))
        began = time.monotonic()
        return float(fresh("bench.figures_sizing", "open_log", f"file:{directory}/log")) - began


def _register_load(way: str, load: str, what: str) -> None:
    runs = itertools.count()

    @figure(f"sizing.load.{way}.{load}.{what}", unit=LOAD[what])
    def measure() -> float:
        return loaded(way, next(runs))[load][what]


for _way in WAYS:
    for _load in (f"{in_flight}.{size}" for in_flight in IN_FLIGHT for size in BYTES):
        for _what in LOAD:
            _register_load(_way, _load, _what)
for _size in BYTES:
    for _in_flight, _records in (*((number, 1) for number in IN_FLIGHT), (1, MANY)):
        figure(f"sizing.disk.{_in_flight}.{_records}.{_size}", unit="bytes")(
            partial(disk_bytes, _in_flight, _records, _size)
        )
for _thing in THINGS:
    figure(f"sizing.memory.{_thing}", unit="bytes")(partial(_memory_of, _thing))
    figure(f"sizing.descriptors.{_thing}", unit="descriptors")(partial(_descriptors_of, _thing))
figure("sizing.memory.service", unit="bytes")(of_a_service)
figure("sizing.memory.program", unit="bytes")(of_a_program)
figure("sizing.memory.aborted", unit="bytes")(of_aborted_transactions)
for _length in LENGTHS:
    figure(f"sizing.recovery.{_length}", unit="s")(partial(recovery_seconds, _length))
accepting("sizing.", sizing_table.write)
