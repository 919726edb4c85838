"""What one piece of work costs, counted and not timed, so that the figures do not depend on the machine.

Each figure `calls.WORK.WHAT` is for one transaction, record or recovered transaction; those with `.64` are with 64 in
flight. `bench.counts` says what is counted; `modules` and `functions` are those of the product that the work enters,
without comprehensions. Work through a service counts the calls of both processes.

`calls.toml` has the accepted figures, and a test holds the tree to them: `make bench ONLY=calls ARGS=--accept` writes
the table, and the same table into docs/performance.md.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

from bench.calls_table import SPREAD, UNITS, accepted, allowance, write
from bench.counts import NAMES, PATH_NAMES, ROUNDS, Counts
from bench.fresh import fresh
from bench.harness import accepting, figure
from bench.service_process import service

ALL_ROUNDS = range(-2, ROUNDS + 2)
"""Three to warm up, those that count, and one to collect the functions."""
VALUE = b"v" * 100
TOPIC = "a"
RECORDS = 2_000
"""Records of a log that is read, each in a transaction of its own."""
RECOVERED = 900
"""Transactions of a log that is recovered: with 1,000 a snapshot might be written, or not yet."""
AT_A_TIME = 50

Work = Callable[[Any, int, int], Awaitable[None]]
"""One transaction of a client: by which worker, and which one of this worker."""


def transactions_of(flight: int) -> int:
    """Transactions of a round."""
    return 20 if flight == 1 else 4 * flight


async def one_record(client: Any, _: int, __: int) -> None:
    async with client.transaction() as txn:
        await txn.send(TOPIC, VALUE, key="key")


async def two_topics(client: Any, _: int, __: int) -> None:
    async with client.transaction() as txn:
        await txn.send(TOPIC, VALUE, key="key")
        await txn.send("b", VALUE, key="key")


async def named(client: Any, worker: int, number: int) -> None:
    async with client.transaction(name=f"worker-{worker}", number=number) as txn:
        await txn.send(TOPIC, VALUE, key="key")


async def transactions(counts: Counts, address: str, work: Work, flight: int) -> None:
    from txnbuffer import connect

    each = transactions_of(flight) // flight
    async with connect(address) as client:

        async def worker(name: int, numbers: range) -> None:
            for number in numbers:
                await work(client, name, number)

        for done, number in enumerate(ALL_ROUNDS):
            counts.round(number)
            numbers = range(1 + done * each, 1 + (done + 1) * each)
            await asyncio.gather(*(worker(name, numbers) for name in range(flight)))
        counts.end()


async def processed(counts: Counts, address: str, flight: int) -> None:
    """Consume a record, and produce one in the transaction that moves the group; from as many topics at a time."""
    from txnbuffer import connect

    sources = [f"source-{number}" for number in range(flight)]
    each, done, enough = transactions_of(flight), 0, asyncio.Event()
    async with connect(address) as client:
        for source in sources:
            await client.send_many(source, [VALUE] * (each * (len(ALL_ROUNDS) + 1) // flight))

        async def handle(txn: Any, _: Any) -> None:
            nonlocal done
            if done % each == 0 and done // each < len(ALL_ROUNDS):
                counts.round(ALL_ROUNDS[done // each])
            elif done == each * len(ALL_ROUNDS):
                counts.end()
                enough.set()
            done += 1
            await txn.send(TOPIC, VALUE, key="key")

        processing = asyncio.ensure_future(client.process(sources, "group", handle, batch=1))
        waiting = asyncio.ensure_future(enough.wait())
        await asyncio.wait([processing, waiting], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, processing):
            task.cancel()
        await asyncio.gather(waiting, processing, return_exceptions=True)


async def fill(client: Any, records: int) -> None:
    """Write transactions of one record, each of another key."""

    async def one(key: int) -> None:
        async with client.transaction() as txn:
            await txn.send(TOPIC, VALUE, key=str(key))

    for first in range(0, records, AT_A_TIME):  # all of these in one frame, so that every log has the same appends
        await asyncio.gather(*(one(key) for key in range(first, first + AT_A_TIME)))


async def filled(address: str) -> None:
    from txnbuffer import connect

    async with connect(address) as client:
        await fill(client, RECORDS)


async def read_by_one(counts: Counts, address: str) -> None:
    from txnbuffer import connect

    await filled(address)
    async with connect(address) as client:
        for number in ALL_ROUNDS:
            async with await client.reader(TOPIC) as reader:
                counts.round(number)
                found = [record async for record in reader.records(timeout=0.0)]
                counts.end()
            check(len(found))


async def read_in_batches(counts: Counts, address: str) -> None:
    from txnbuffer import connect

    await filled(address)
    async with connect(address) as client:
        for number in ALL_ROUNDS:
            async with await client.reader(TOPIC) as reader:
                found = 0
                counts.round(number)
                while (batch := await reader.read()) is not None:
                    found += len(batch)
                counts.end()
            check(found)


async def streamed(counts: Counts, address: str) -> None:
    from txnbuffer import ChangeBatch, connect

    await filled(address)
    async with connect(address) as client:
        for number in ALL_ROUNDS:
            counts.round(number)
            found = 0
            async for item in client.stream(TOPIC, to="now"):
                found += len(item) if isinstance(item, ChangeBatch) else 0
            counts.end()
            check(found)


async def recovered(counts: Counts, address: str) -> None:
    """Open copies of a log as a killed process leaves it."""
    from txnbuffer import connect

    directory = address.removeprefix("file:")
    async with connect(address) as client:
        counts.slow_timers()
        await fill(client, RECOVERED)
        for number in ALL_ROUNDS:
            shutil.copytree(directory, f"{directory}{number}")
    for number in ALL_ROUNDS:
        counts.round(number)
        async with connect(f"{address}{number}"):
            counts.end()


def check(found: int) -> None:
    if found != RECORDS:
        raise RuntimeError(f"{found} of {RECORDS} records were read")


class Kind(NamedTuple):
    """One kind of work: what does it, for how many pieces in a round, and how many of them at a time."""

    work: Callable[[Counts, str], Coroutine[Any, Any, None]]
    pieces: int
    in_flight: int = 1
    through_service: bool = False
    spread: float = SPREAD
    names: tuple[str, ...] = NAMES

    @property
    def counted(self) -> tuple[str, ...]:
        """What is counted. Functions are seen in this process only, and are the same with many in flight."""
        return self.names if self.through_service or self.in_flight > 1 else (*self.names, *PATH_NAMES)


def _of_transactions(flight: int, work: Work, *, through_service: bool = False) -> Kind:
    return Kind(partial(transactions, work=work, flight=flight), transactions_of(flight), flight, through_service)


KINDS = {
    "transaction": _of_transactions(1, one_record),
    "transaction.64": _of_transactions(64, one_record),
    "service": _of_transactions(1, one_record, through_service=True),
    "service.64": _of_transactions(64, one_record, through_service=True),
    "two_topics": _of_transactions(1, two_topics),
    "two_topics.64": _of_transactions(64, two_topics),
    "named": _of_transactions(1, named),
    "named.64": _of_transactions(64, named),
    "positions": Kind(partial(processed, flight=1), transactions_of(1)),
    # The threads of its 64 readers decide which transactions share a frame.
    "positions.64": Kind(partial(processed, flight=64), transactions_of(64), 64, spread=0.06, names=("python", "c")),
    "read_one": Kind(read_by_one, RECORDS),
    "read_batch": Kind(read_in_batches, RECORDS),
    "streamed": Kind(streamed, RECORDS),
    "recovered": Kind(recovered, 1),
}


def count(name: str) -> dict[str, float]:
    """The counts of one kind of work. Run it in a new process."""
    kind, counts = KINDS[name], Counts()
    with ExitStack() as stack:
        if kind.through_service:
            address = stack.enter_context(service(program=("-m", "bench.counts", counts.new_file())))
        else:
            address = f"file:{stack.enter_context(tempfile.TemporaryDirectory())}/log"
        asyncio.run(kind.work(counts, address))
    results = counts.results(kind.pieces)
    return {what: results[what] for what in kind.counted}


@cache
def counted(name: str, _: int) -> dict[str, float]:
    """The counts of a run, which all figures of this work share."""
    found: dict[str, float] = fresh("bench.figures_calls", "count", name)
    return found


def _register(name: str, what: str, goal: str | None) -> None:
    runs = itertools.count()

    @figure(f"calls.{name}.{what}", unit=UNITS[what], goal=goal)
    def measure() -> float:
        return counted(name, next(runs))[what]


def _goal(name: str, kind: Kind, what: str) -> str | None:
    value = _ACCEPTED.get(name, {}).get(what)
    return None if value is None else f"<= {value + allowance(what, value, kind.in_flight, kind.spread):.4g}"


_ACCEPTED = accepted()
for _name, _kind in KINDS.items():
    for _what in _kind.counted:
        _register(_name, _what, _goal(_name, _kind, _what))
accepting("calls.", partial(write, list(KINDS)))
