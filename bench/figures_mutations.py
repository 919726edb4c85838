"""Mutation snapshots as keyed entries: bytes, recovery, and a backfill from the middle of a million of them."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import tempfile
import time
from dataclasses import replace

import numpy as np

from bench.fresh import fresh
from bench.harness import figure
from bench.log_owner import LogOwner
from bench.workload import records
from broker_io import open_broker
from broker_io.batch import Batch
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from snapshots.format import MUTATIONS, SNAPSHOT_TOPIC
from snapshots.scan import scan
from txnbuffer import ChangeBatch, ChangeStream, Client, ResumeToken, connect
from txnbuffer.follow import read_existing
from txnbuffer.mutations.index import SnapshotIndex, SnapshotIndexEntry

TOPIC = "bench"
SNAPSHOTS = 1_000_000
BATCH = 20_000
CHANGED = 10
"""Mutation snapshots that are new when a buffer snapshot is measured."""


def lengths() -> list[int]:
    """The number of mutations in each of a million mutation snapshots: one to three."""
    found: list[int] = np.random.default_rng(17).integers(1, 4, SNAPSHOTS).tolist()
    return found


def add(index: SnapshotIndex, positions: list[Position], sizes: list[int]) -> None:
    start = index.end + 1
    for size in sizes:
        end = start + size - 1
        index.add(SnapshotIndexEntry(start, end, positions[start - 1], positions[end - 1], size))
        start = end + 1


@functools.cache
def directory() -> str:
    """A log with a topic of about two million records and its mutation snapshots, made once."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    sizes = lengths()
    count = sum(sizes) + CHANGED
    with open_broker(f"file:{made.name}/log") as broker, LogOwner(broker) as manager:
        manager.recover()
        manager.register(TOPIC)
        with broker.writer(TOPIC) as writer:
            for first in range(0, count, BATCH):
                batch = records(min(BATCH, count - first), first)
                writer.append(Batch(batch.keys, batch.keys)).result()
        manager.pump()
        positions: list[Position] = []
        for placed in read_existing(broker, TOPIC, EARLIEST, end_of(broker)):
            positions += placed.positions
        index = SnapshotIndex()
        add(index, positions, sizes)
        manager.followed(TOPIC).index = index.state()
        manager.snapshot(TOPIC)
    return made.name


def end_of(broker: Broker) -> Position:
    end = broker.last_position(TOPIC)
    if end is None:
        raise RuntimeError("the topic has no records")
    return end


def recover(address: str) -> float:
    """The monotonic time at which the owner of the log is ready."""
    with open_broker(address) as broker, LogOwner(broker) as manager:
        manager.recover()
        ready = time.monotonic()
        if (found := len(SnapshotIndex(manager.followed(TOPIC).index))) != SNAPSHOTS:
            raise RuntimeError(f"{found} of {SNAPSHOTS} mutation snapshots were recovered")
    return ready


@figure("mutations.recovery_seconds.1m", unit="s", goal="<= 1")
def recovery_of_a_million() -> float:
    address = f"file:{directory()}/log"
    start = time.monotonic()
    return float(fresh("bench.figures_mutations", "recover", address)) - start


@figure("mutations.stored_bytes_each.1m", unit="bytes")
def bytes_of_each() -> float:
    with open_broker(f"file:{directory()}/log") as broker:
        stored = scan(broker, only=TOPIC).topics[TOPIC].numbered[MUTATIONS]
    return sum(len(entry.value or b"") for entry in stored.values()) / SNAPSHOTS


@figure("mutations.snapshot_bytes.1m", unit="bytes")
def bytes_of_a_buffer_snapshot() -> float:
    """Bytes written by a buffer snapshot after ten more mutation snapshots."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(directory(), place, dirs_exist_ok=True)
        with open_broker(f"file:{place}/log") as broker, LogOwner(broker) as manager:
            manager.recover()
            followed = manager.followed(TOPIC)
            index = SnapshotIndex(followed.index)
            ledger, last = broker.ledgers(TOPIC)[-1].ledger, end_of(broker)
            places = [Position(ledger, last.entry - CHANGED + 1 + row) for row in range(CHANGED)]
            for place_of in places:
                seqno = index.end + 1
                index.add(SnapshotIndexEntry(seqno, seqno, place_of, place_of, 1))
            followed.index = index.state()
            before = broker.last_position(SNAPSHOT_TOPIC)
            manager.snapshot(TOPIC)
            written = read_existing(broker, SNAPSHOT_TOPIC, before or EARLIEST, last_of_snapshots(broker))
            return float(sum(int(placed.messages.sizes().sum()) for placed in written))


def last_of_snapshots(broker: Broker) -> Position:
    end = broker.last_position(SNAPSHOT_TOPIC)
    if end is None:
        raise RuntimeError("no snapshot was written")
    return end


async def first_mutation(address: str, seqno: int) -> float:
    """Seconds from the request of a stream after `seqno` until its first mutation."""
    async with connect(address) as client:
        token = await newest_token(client)
        start = time.perf_counter()
        stream = client.stream(TOPIC, from_=replace(token, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno))
        first = next(iter(await some(stream))).seqno
        elapsed = time.perf_counter() - start
        if first != seqno + 1:
            raise RuntimeError(f"the stream began with another mutation than {seqno + 1}")
        return elapsed


async def newest_token(client: Client) -> ResumeToken:
    stream = client.stream(TOPIC)
    token = (await some(stream)).token
    await stream.close()
    return token


async def some(stream: ChangeStream) -> ChangeBatch:
    """The next batch with mutations."""
    while isinstance(batch := await stream.next(timeout=60.0), ChangeBatch):
        if len(batch):
            return batch
    raise RuntimeError(f"the stream gave {batch} instead of mutations")


@figure("mutations.backfill_ms.1m", unit="ms", goal="<= 50")
def backfill_from_the_middle() -> float:
    middle = int(sum(lengths()[: SNAPSHOTS // 2])) + 1
    return 1000 * asyncio.run(first_mutation(f"file:{directory()}/log", middle))
