"""A commit whose task is cancelled, and what waits for it: an abort, and the next number of its producer."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from client_world import World, in_world, values

from txnbuffer import InvalidRequest, Outcome, Transaction, TransactionAborted, TransactionCommitted
from txnbuffer.client.client import Client

STEPS = range(9)
"""Iterations of the event loop after which the commit is cancelled: before it was sent, until after its answer."""


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(client: Client) -> Transaction:
    txn = await client.transaction().begin()
    await txn.send("orders", b"one")
    return txn


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("count", STEPS)
@in_world
async def test_an_abort_after_a_cancelled_commit_says_what_became_of_it(world: World, count: int, waits: bool) -> None:
    client = await world.client()
    await client.send("orders", b"first")
    txn = await begun(client)
    commit = asyncio.create_task(txn.commit())
    await steps(count)
    abort = None
    if waits and count:
        abort = asyncio.create_task(txn.abort())
        await steps(1)
    commit.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await commit
    try:
        await (txn.abort() if abort is None else abort)
    except TransactionCommitted:
        assert await client.outcome(txn.id) is Outcome.COMMIT
    else:
        assert await client.outcome(txn.id) is Outcome.ABORT
    committed = await client.outcome(txn.id) is Outcome.COMMIT
    assert values(world.broker, "orders") == [b"first", *[b"one"] * committed]


@in_world
async def test_an_abort_ends_when_a_commit_that_waits_for_a_send_is_cancelled(world: World) -> None:
    client = await world.client()
    txn = await begun(client)
    sending = asyncio.create_task(txn.send_many("orders", [b"x" * 1000] * 40_000))
    await steps(3)
    assert not sending.done()
    commit = asyncio.create_task(txn.commit())
    await steps(1)
    abort = asyncio.create_task(txn.abort())
    await steps(1)
    commit.cancel()
    sent, ended, aborted = await asyncio.gather(sending, commit, abort, return_exceptions=True)
    assert isinstance(sent, InvalidRequest)
    assert isinstance(ended, asyncio.CancelledError)
    assert aborted is None
    assert await client.outcome(txn.id) is Outcome.ABORT


async def number(client: Client, which: int, go: asyncio.Event) -> None:
    async with client.transaction(name="import", number=which) as txn:
        await txn.send("orders", str(which))
        await go.wait()


@in_world
async def test_no_number_commits_after_one_whose_commit_was_cancelled_while_it_waited(world: World) -> None:
    client = await world.client()
    assert await client.committed_number("import") == 0
    go = asyncio.Event()
    tasks = []
    for which in (4, 5, 6):
        tasks.append(asyncio.create_task(number(client, which, go)))
        await steps(20)
    go.set()
    await steps(2)
    assert not any(task.done() for task in tasks)
    tasks[1].cancel()
    first, cancelled, after = await asyncio.gather(*tasks, return_exceptions=True)
    assert first is None
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(after, TransactionAborted)
    for which in (5, 6):
        await number(client, which, go)
    assert values(world.broker, "orders") == [b"4", b"5", b"6"]


@in_world
async def test_no_number_commits_before_one_that_waits_for_a_send(world: World) -> None:
    client = await world.client()
    txn = await client.transaction(name="import", number=1).begin()
    sending = asyncio.create_task(txn.send_many("orders", [b"1" * 1000] * 20_000))
    await steps(3)
    assert not sending.done()
    commit = asyncio.create_task(txn.commit())
    await steps(1)
    go = asyncio.Event()
    go.set()
    await number(client, 2, go)
    await asyncio.gather(sending, commit)
    assert len(values(world.broker, "orders")) == 20_001
