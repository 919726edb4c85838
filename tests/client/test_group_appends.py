"""Clients that write to a cluster: the records of many transactions share an append, and the next ones do not wait."""

from __future__ import annotations

import asyncio

from client.direct_world import DirectWorld, commit_one, in_direct_world
from client_world import until, values

from txnbuffer import Client, Transaction
from txnbuffer.client.path.record_path import GROUP, MAX_IN_FLIGHT


async def begun(client: Client, count: int) -> list[Transaction]:
    return [await client.transaction().begin() for _ in range(count)]


def appended(world: DirectWorld) -> list[int]:
    """The messages of each append that is not acknowledged."""
    return [sum(len(batch) for _, batch in held.appends) for held in world.handles[0].faults.held]


@in_direct_world
async def test_groups_are_appended_while_callers_send_more(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"first")
    transactions = await begun(client, (MAX_IN_FLIGHT + 1) * GROUP + 1)
    faults = world.handles[0].faults
    faults.hold(topic="log")
    for at, txn in enumerate(transactions):
        assert appended(world) == [GROUP] * min(at // GROUP, MAX_IN_FLIGHT)  # no iteration of the loop between
        await txn.send("log", str(at))
    faults.release()
    await asyncio.gather(*(txn.commit() for txn in transactions))
    expected = [b"first", *(str(at).encode() for at in range(len(transactions)))]
    await until(lambda: values(world.broker, "log") == expected)


@in_direct_world
async def test_a_few_records_are_one_append_at_the_end_of_the_iteration(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"first")
    transactions = await begun(client, GROUP - 1)
    faults = world.handles[0].faults
    faults.hold(topic="log")
    for txn in transactions:
        await txn.send("log", b"v")
    assert appended(world) == []
    await until(lambda: appended(world) == [GROUP - 1])
    faults.release()
    await asyncio.gather(*(txn.commit() for txn in transactions))


@in_direct_world
async def test_no_group_is_appended_before_the_session_is_back(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"first")
    transactions = await begun(client, GROUP)
    faults = world.handles[0].faults
    faults.hold(topic="log")
    world.reachable = False
    world.cut()
    await until(lambda: not client.session.core.welcomed)
    for txn in transactions:
        await txn.send("log", b"v")
    assert appended(world) == []
    world.reachable = True
    await until(lambda: appended(world) == [GROUP])
    faults.release()
    await asyncio.gather(*(txn.commit() for txn in transactions))
    await until(lambda: len(values(world.broker, "log")) == 1 + GROUP)
