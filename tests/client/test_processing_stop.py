"""Processing that ends when it is told to: everything that was handled is committed, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

from client_world import World, in_world

from txnbuffer.client.client import Client
from txnbuffer.client.groups.handling import HandlerTask, Processed
from txnbuffer.client.groups.processing import GroupSource, process
from txnbuffer.client.reading.records import RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import TransactionAborted


class Taker:
    """A handler that takes `count` records in all, and then tells processing to end."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.taken: list[tuple[str, bytes | None]] = []
        self.calls = 0
        self.task = HandlerTask(None, None, "stop", 0, work=self.work)

    async def work(self, _: Transaction, records: RecordBatch) -> int:
        self.calls += 1
        taken = records.take(slice(self.left))
        self.taken += [(records.topic, row.value) for row in taken]
        self.left -= len(taken)
        if not self.left:
            self.task.stop.set()
        return len(taken)

    async def run(self, client: Client, topics: list[str], batch: int = 10) -> Processed:
        return await process(client, GroupSource(topics, "g", batch=batch), self.task)


async def fill(client: Client, topic: str, count: int) -> None:
    async with client.transaction() as txn:
        for number in range(count):
            await txn.send(topic, str(number))


async def rest(client: Client, topics: list[str]) -> int:
    async def handle(_: Transaction, records: RecordBatch) -> None:
        pass

    return (await client.process_batches(topics, "g", handle, idle_timeout=0.05)).records


@in_world
async def test_a_batch_is_committed_up_to_where_the_handler_stops(world: World) -> None:
    client = await world.client()
    await fill(client, "a", 25)
    taker = Taker(13)
    assert (await taker.run(client, ["a"])).records == 13
    assert [int(value or b"") for _, value in taker.taken] == [*range(13)]
    assert await rest(client, ["a"]) == 12


@in_world
async def test_several_topics_end_together(world: World) -> None:
    client = await world.client()
    topics = ["a", "b", "c"]
    for topic in topics:
        await fill(client, topic, 20)
    taker = Taker(23)
    assert (await taker.run(client, topics)).records == 23
    assert len(taker.taken) == 23
    assert await rest(client, topics) == 60 - 23


@in_world
async def test_a_stop_ends_a_wait_for_records(world: World) -> None:
    client = await world.client()
    await fill(client, "a", 3)
    taker = Taker(100)
    running = asyncio.create_task(taker.run(client, ["a"]))
    while taker.left > 97:
        await asyncio.sleep(0.01)
    taker.task.stop.set()
    assert (await running).records == 3
    assert await rest(client, ["a"]) == 0


@in_world
async def test_a_handler_that_takes_nothing_is_called_again(world: World) -> None:
    client = await world.client()
    await fill(client, "a", 5)
    taker, calls = Taker(5), 0

    async def reluctant(txn: Transaction, records: RecordBatch) -> int:
        nonlocal calls
        calls += 1
        return 0 if calls < 4 else await taker.work(txn, records)

    taker.task.work = reluctant
    done = await taker.run(client, ["a"])
    assert (done.records, done.transactions, done.retries, calls) == (5, 1, 0, 4)


@in_world
async def test_the_last_commit_is_repeated_if_its_transaction_aborts_after_the_stop(world: World) -> None:
    client = await world.client()
    await fill(client, "a", 5)
    taker, commit, aborted = Taker(5), Transaction.commit, False

    async def handle(txn: Transaction, records: RecordBatch) -> int:
        return len(records) if not taker.left else await taker.work(txn, records)

    async def abort_once(txn: Transaction, **named: Any) -> None:
        nonlocal aborted
        if not aborted:
            aborted = True
            raise TransactionAborted(txn.id, "the test aborts it")
        await commit(txn, **named)

    taker.task.work = handle
    with mock.patch.object(Transaction, "commit", abort_once):
        assert (await taker.run(client, ["a"])).records == 5
    assert await rest(client, ["a"]) == 0
