"""Clients that write to a cluster themselves: all or nothing over topics, whatever breaks meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from client.direct_world import DirectWorld, in_direct_world
from client_world import until, values

from txnbuffer import Outcome


@in_direct_world
async def test_client_writes_a_transaction_over_several_topics(world: DirectWorld) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        await txn.send_many("log", [b"one", b"two"])
        await txn.send("other", b"three", key="k", properties={"p": "q"}, event_time=7)
    assert await client.outcome(txn.id) is Outcome.COMMIT
    await until(lambda: values(world.broker, "log") == [b"one", b"two"])
    await until(lambda: values(world.broker, "other") == [b"three"])
    assert not any(frame.sends for frame in world.frames)


@in_direct_world
async def test_an_exception_aborts(world: DirectWorld) -> None:
    client = await world.client()
    with pytest.raises(KeyError):
        async with client.transaction() as txn:
            await txn.send("log", b"never")
            raise KeyError
    while (outcome := await client.outcome(txn.id)) is None:
        await asyncio.sleep(0.01)
    assert outcome is Outcome.ABORT
    async with client.transaction() as txn:
        await txn.send("log", b"seen")
    await until(lambda: values(world.broker, "log") == [b"seen"])


@in_direct_world
async def test_committed_reader_and_ordinary_consumer_in_another_process(world: DirectWorld) -> None:
    client = await world.client()
    async with client.transaction() as txn:
        await txn.send("log", b"v", key="k", properties={"p": "q"}, event_time=7)
    with world.broker.connect() as other:
        await until(lambda: values(other, "log") == [b"v"])
        with other.reader("log") as plain:
            placed = plain.read()
        assert placed is not None
        message = placed.messages[0]
    assert (message.key, message.value, message.event_time) == (b"k", b"v", 7)
    assert message.properties == {"p": "q", "tb.v": "1", "tb.txn": str(txn.id), "tb.seq": "1"}
