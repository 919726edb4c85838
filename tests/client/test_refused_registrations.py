"""Topics that the service refuses for good: whoever writes there is told at once, and nothing is done again."""

from __future__ import annotations

import pytest
from client.direct_world import DirectWorld, in_direct_world
from client_world import World, in_world, until, values

from txnbuffer import TransactionAborted, dead_letter
from txnbuffer.client.client import Client
from txnbuffer.client.groups.handling import OnError
from txnbuffer.client.reading.records import Record
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import Error, RegistrationRefused, TopicNotCreated

NONE_MADE = "topic 'nope' does not exist, and this service creates no topics: create it first$"
EVERYWHERE: list[OnError] = ["stop", "skip", dead_letter("bad")]


class Calls:
    """A handler, or the work of a transaction, that sends to a topic that is not there, or fails."""

    def __init__(self, topic: str = "nope") -> None:
        self.count = 0
        self._topic = topic

    async def handle(self, txn: Transaction, record: Record) -> None:
        await self.work(txn)

    async def work(self, txn: Transaction) -> None:
        self.count += 1
        await txn.send(self._topic, b"never")


async def refused(client: Client, on_error: OnError, kind: type[Error]) -> None:
    await client.send("source", b"1")
    calls = Calls()
    with pytest.raises(kind, match=NONE_MADE):
        await client.process("source", "g", calls.handle, on_error=on_error, retries=5)
    with pytest.raises(kind, match=NONE_MADE):
        await client.run(calls.work)
    assert calls.count == 2
    txn = await client.transaction().begin()
    await txn.send("nope", b"never")
    with pytest.raises(kind, match=NONE_MADE):
        await txn.commit()
    processed = await client.process("source", "g", Calls("source-copy").handle, idle_timeout=0.05)
    assert processed.records == 1  # the group had not moved


@pytest.mark.parametrize("on_error", EVERYWHERE)
@in_direct_world
async def test_topic_that_may_not_be_created_is_an_error_on_a_cluster(world: DirectWorld, on_error: OnError) -> None:
    for topic in ("source", "source-copy"):
        world.broker.create_topic(topic)
    world.engine.topics._create = False
    await refused(await world.client(), on_error, RegistrationRefused)


@pytest.mark.parametrize("on_error", EVERYWHERE)
@in_world
async def test_topic_that_may_not_be_created_is_an_error_on_an_embedded_log(world: World, on_error: OnError) -> None:
    client = await world.client()
    await client.send_many("source", [])
    world.broker.create_topic("source-copy")
    limits = world.engine.limits
    await client.send("source", b"0")
    object.__setattr__(limits, "create_topics", False)
    world.engine.topics._create = False
    await client.process("source", "g", Calls("source-copy").handle, idle_timeout=0.05)
    await refused(client, on_error, TopicNotCreated)


@in_direct_world
async def test_error_names_a_dead_letter_topic_that_may_not_be_created(world: DirectWorld) -> None:
    async def fails(txn: Transaction, record: Record) -> None:
        raise ValueError

    world.broker.create_topic("source")
    world.engine.topics._create = False
    client = await world.client()
    await client.send("source", b"1")
    with pytest.raises(RegistrationRefused, match=NONE_MADE):
        await client.process("source", "g", fails, on_error=dead_letter("nope"))


@in_direct_world
async def test_retryable_registration_error_is_an_abort_with_one_advice(
    world: DirectWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no luck")

    client = await world.client()
    with monkeypatch.context() as patched:
        patched.setattr(world.engine.topics.manager, "prepare", fails)
        with pytest.raises(TransactionAborted) as told:
            async with client.transaction() as txn:
                await txn.send("log", b"never")
    assert str(told.value) == (
        f"transaction {txn.id} was aborted: topic 'log' could not be registered: unexpected: OSError('no luck'); "
        "begin a new transaction to retry"
    )
    async with client.transaction() as txn:
        await txn.send("log", b"1")
    await until(lambda: values(world.broker, "log") == [b"1"])
