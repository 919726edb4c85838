"""Transactions on owned logs in rounds, each followed by a round of a peer on the same disk.

Machines and disks change from minute to minute, so a rate is compared with one that is measured between its rounds.
Run each function that measures in a new process: it opens the public client, and first warms up both sides. The event
loop of an asyncio client does not run while the peer does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import sqlite_peer
from bench.disk import synced_write_ms
from bench.figures_calls import TOPIC, VALUE, Work, named, one_record, two_topics

Round = Callable[[float, int], float]
"""Commit for so many seconds, and at least so many transactions; transactions per second."""

ROUNDS = 3
KEY = "key"
IDLE_SECONDS = 10.0
WORK = {"two_topics": two_topics, "named": named}
CONSUMED = 200_000
"""Records of the topics of a group: more than it consumes in all rounds."""


def alternated(one: Round, peer: Round, seconds: float, warm_up: int) -> tuple[float, float]:
    """The median rates of two sides in alternating rounds."""
    for side in (one, peer):
        side(0.0, warm_up)
    rates = [(one(seconds, 1), peer(seconds, 1)) for _ in range(ROUNDS)]
    return statistics.median(rate for rate, _ in rates), statistics.median(rate for _, rate in rates)


@contextmanager
def sqlite() -> Iterator[Round]:
    """A database in the directory of temporary files, which has the log too."""
    with (
        tempfile.TemporaryDirectory() as directory,
        sqlite_peer.committing(str(Path(directory, "peer.sqlite")), KEY.encode(), VALUE) as commit,
    ):
        yield commit


class Workers:
    """An asyncio client with `in_flight` workers, each of which commits one transaction after the other."""

    def __init__(self, address: str, in_flight: int) -> None:
        self.in_flight = in_flight
        self.times: list[float] = []
        """Seconds of each transaction of the last round."""
        self._runner = asyncio.Runner()
        self._client: Any = self._runner.run(_connected(address))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def doing(self, work: Work) -> Round:
        """Rounds of one kind of transaction. Each worker has a number, and numbers its transactions."""
        numbers = [itertools.count(1) for _ in range(self.in_flight)]
        return lambda seconds, least: self._runner.run(self._round(work, numbers, seconds, least))

    def processing(self) -> Round:
        """Rounds of `process` with one record a transaction, on as many topics, which are filled first."""
        sources = [f"source-{number}" for number in range(self.in_flight)]
        for source in sources:
            self._runner.run(self._client.send_many(source, [VALUE] * (CONSUMED // self.in_flight)))
        return lambda seconds, least: self._runner.run(self._processed(sources, seconds, least))

    async def _round(self, work: Work, numbers: Sequence[Iterator[int]], seconds: float, least: int) -> float:
        self.times, clock = [], time.perf_counter
        began = clock()

        async def worker(name: int) -> None:
            while (start := clock()) < began + seconds or len(self.times) < least:
                await work(self._client, name, next(numbers[name]))
                self.times.append(clock() - start)

        await asyncio.gather(*(worker(name) for name in range(self.in_flight)))
        return len(self.times) / (clock() - began)

    async def _processed(self, sources: list[str], seconds: float, least: int) -> float:
        """Transactions that a member of the group begins in a second, without the first of each topic."""
        done, began, end, enough = 0, 0.0, 0.0, asyncio.Event()

        async def handle(txn: Any, _: Any) -> None:
            nonlocal done, began, end
            if not enough.is_set():
                done, end = done + 1, time.perf_counter()
                if done == self.in_flight:
                    began = end
                elif done > self.in_flight + least and end > began + seconds:
                    enough.set()
            await txn.send(TOPIC, VALUE, key=KEY)

        processing = asyncio.ensure_future(
            self._client.process(sources, "group", handle, batch=1, idle_timeout=IDLE_SECONDS)
        )
        waiting = asyncio.ensure_future(enough.wait())
        await asyncio.wait([processing, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, processing):
            task.cancel()
        await asyncio.gather(waiting, processing, return_exceptions=True)
        if not enough.is_set():
            processing.result()
            raise RuntimeError(f"the group stopped after {done} records: fill its topics with more")
        return (done - self.in_flight) / (end - began)


async def _connected(address: str) -> Any:
    from txnbuffer import connect

    return await connect(address)


def to_sqlite(address: str, in_flight: int, seconds: float, warm_up: int) -> tuple[float, float]:
    """Transactions of one record, and SQLite with one writer."""
    with Workers(address, in_flight) as workers, sqlite() as peer:
        return alternated(workers.doing(one_record), peer, seconds, warm_up)


def sync_to_sqlite(address: str, seconds: float, warm_up: int) -> tuple[float, float]:
    """Consecutive transactions of the blocking client, and SQLite."""
    from txnbuffer import connect

    def commit(seconds: float, least: int) -> float:
        done, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds or done < least:
            with client.transaction() as txn:
                txn.send(TOPIC, VALUE, key=KEY)
            done += 1
        return done / elapsed

    with connect(address) as client, sqlite() as peer:
        return alternated(commit, peer, seconds, warm_up)


def to_one_topic(address: str, kind: str, in_flight: int, seconds: float, warm_up: int) -> tuple[float, float]:
    """Transactions of a kind of WORK, or "positions", and those of one record to one topic."""
    with Workers(address, in_flight) as workers:
        work = workers.processing() if kind == "positions" else workers.doing(WORK[kind])
        return alternated(work, workers.doing(one_record), seconds, warm_up)


def times(address: str, in_flight: int, seconds: float, warm_up: int) -> tuple[float, float]:
    """Milliseconds that 99 % of the transactions take at most, and those of a synced write between the rounds."""
    with Workers(address, in_flight) as workers:
        commit = workers.doing(one_record)
        commit(0.0, warm_up)
        took, syncs = list[float](), list[float]()
        for _ in range(ROUNDS):
            commit(seconds, 1)
            took += workers.times
            syncs.append(synced_write_ms())
    return sorted(took)[int(len(took) * 0.99)] * 1000, statistics.median(syncs)


async def incompressible(client: Any, _: int, __: int, *, size: int = len(VALUE), records: int = 1) -> None:
    """A transaction of records that cannot be compressed."""
    async with client.transaction() as txn:
        if records == 1:
            await txn.send(TOPIC, os.urandom(size), key=KEY)
        else:
            await txn.send_many(TOPIC, [os.urandom(size) for _ in range(records)], keys=[KEY] * records)


def bytes_each(
    directory: str, in_flight: int, warm_up: int, count: int, size: int = len(VALUE), records: int = 1
) -> float:
    """Bytes by which a closed log grows for each transaction of records that cannot be compressed."""
    work = partial(incompressible, size=size, records=records)

    def grown_to(least: int) -> tuple[int, int]:
        with Workers(f"file:{directory}/log", in_flight) as workers:
            workers.doing(work)(0.0, least)
        return len(workers.times), sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())

    _, before = grown_to(warm_up)
    done, after = grown_to(count)
    return (after - before) / done
