"""Buffer snapshots: bytes written for many aborts, and the time to recover them."""

from __future__ import annotations

import atexit
import functools
import tempfile
import time

from bench.fresh import fresh
from bench.harness import figure
from bench.log_owner import LogOwner
from bench.workload import end_of, one_record_each
from broker_io import open_broker
from broker_io.port import Broker, Writer
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.model import Outcome

TOPIC = "bench"
GROUP = 1_000
"""Aborts in one marker, and changes between two snapshots."""

MILLION = 1_000_000
RECORD_BYTES = 8


def abort(writer: Writer, first: int, count: int) -> None:
    """Append a record of each of `count` transactions, and the marker that aborts them."""
    least = range(first, first + count)
    writer.append(one_record_each(least, size=RECORD_BYTES))
    writer.append(end_of(least, Outcome.ABORT)).result()


def abort_many(broker: Broker, aborts: int, *, snapshot_every: int) -> None:
    """Write `aborts` aborted transactions to a topic whose owner takes a snapshot every `snapshot_every` of them."""
    with LogOwner(broker) as manager:
        manager.recover()
        manager.register(TOPIC)
        with broker.writer(TOPIC) as writer:
            for done in range(0, aborts, snapshot_every):
                for first in range(done + 1, done + snapshot_every, GROUP):
                    abort(writer, first, GROUP)
                manager.pump()


def recover(address: str, aborts: int) -> float:
    """The monotonic time at which the owner of the log is ready."""
    with open_broker(address) as broker, LogOwner(broker) as manager:
        manager.recover()
        ready = time.monotonic()
        if len(manager.buffer(TOPIC).aborted) != aborts:
            raise RuntimeError(f"{len(manager.buffer(TOPIC).aborted)} of {aborts} aborts were recovered")
    return ready


@functools.cache
def address_with(aborts: int) -> str:
    """The address of a log with this number of aborts, created once."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    address = f"file:{directory.name}/log"
    with open_broker(address) as broker:
        abort_many(broker, aborts, snapshot_every=100 * GROUP)
    return address


def recovery_seconds(aborts: int) -> float:
    address = address_with(aborts)
    start = time.monotonic()
    return float(fresh("bench.figures_snapshots", "recover", address, aborts)) - start


@figure("recovery.seconds.1m", unit="s", goal="<= 1")
def recovery_of_a_million() -> float:
    return recovery_seconds(MILLION)


@figure("recovery.seconds.10m", unit="s", goal="<= 4")
def recovery_of_ten_million() -> float:
    return recovery_seconds(10 * MILLION)


@figure("snapshot.bytes.800k", unit="bytes", goal="<= 20000000")
def snapshot_bytes() -> float:
    """All bytes written to the snapshot topic, headers and end entries included."""
    with tempfile.TemporaryDirectory() as directory, open_broker(f"file:{directory}/log") as broker:
        abort_many(broker, 800_000, snapshot_every=GROUP)
        return float(sum(ledger.bytes for ledger in broker.ledgers(SNAPSHOT_TOPIC)))
