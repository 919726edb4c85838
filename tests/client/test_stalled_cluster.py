"""A cluster that is away while its service is there: who waits is told, and nothing passes for what it isn't."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from client.direct_world import DirectWorld, commit_one, ended, in_direct_world
from client_world import until, values

from broker_io.batch import Batch, Message
from broker_io.errors import EntryTooLarge, MessageTooLarge
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer import Outcome, OutcomeUnknown, SendUnknown, ServiceUnavailable, TransactionAborted
from txnbuffer.client.client import Client
from txnbuffer.client.path.writers import SLICE, TopicAppend
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS

STILL = "neither the cluster nor its service answered for 1 s"


@contextmanager
def impatient(client: Client, error: type[Exception]) -> Iterator[None]:
    """What is waited for within is not there for a second, and the client says so; else it waits as long as need be."""
    client.session.max_unavailable = 1.0
    with pytest.raises(error, match=STILL):
        yield
    client.session.max_unavailable = 60.0


@in_direct_world
async def test_commit_of_unacknowledged_records_becomes_an_abort(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    world.handles[0].faults.hold(topic="log")
    txn = await client.transaction().begin()
    await txn.send("log", b"never")
    with impatient(client, TransactionAborted):
        await txn.commit()
    assert not client.session.core.waited_for
    world.handles[0].faults.release()
    assert await ended(client, txn) is Outcome.ABORT
    await commit_one(client, "log", b"after")
    await until(lambda: values(world.broker, "log") == [b"before", b"after"])


@in_direct_world
async def test_commit_without_an_answer_is_unknown(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    txn = await client.transaction().begin()
    await txn.send("log", b"decided")
    world.broker.faults.hold(topic=DECISIONS)
    with impatient(client, OutcomeUnknown):
        await txn.commit()
    world.broker.faults.release()
    assert await ended(client, txn) is Outcome.COMMIT
    await until(lambda: values(world.broker, "log") == [b"before", b"decided"])


@in_direct_world
async def test_topic_that_is_not_registered_in_time_aborts_its_transactions(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    world.broker.faults.hold(topic=SNAPSHOT_TOPIC)
    with impatient(client, TransactionAborted):
        await commit_one(client, "new", b"never")
    world.broker.faults.release()
    await commit_one(client, "new", b"after")
    await until(lambda: values(world.broker, "new") == [b"after"])


@in_direct_world
async def test_transaction_cannot_begin_without_leased_ids(world: DirectWorld) -> None:
    world.broker.faults.hold(topic=DECISIONS)
    client = await world.client()
    with impatient(client, ServiceUnavailable):
        await client.transaction().begin()
    world.broker.faults.release()
    await commit_one(client, "log", b"after")


@in_direct_world
async def test_too_large_message_does_not_fail_the_others_of_its_entry(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    refused = MessageTooLarge("the cluster refuses a message")
    world.handles[0].faults.fail_append(refused, topic="log")
    with pytest.raises(TransactionAborted, match="one of 2 messages"):
        async with client.transaction() as txn:
            await txn.send_many("log", [b"small", b"large"])
    world.handles[0].faults.fail_append(refused, topic="log")
    with pytest.raises(SendUnknown, match="one of 2 messages"):
        await client.send_many("log", [b"small", b"large"])
    world.handles[0].faults.fail_append(refused, topic="log")
    with pytest.raises(MessageTooLarge):
        await client.send("log", b"large")


@in_direct_world
async def test_messages_that_may_be_too_large_are_sent_alone(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    world.handles[0].faults.fail_append(EntryTooLarge("an entry is too large"), topic="log")
    with pytest.raises(SendUnknown):
        await client.send_many("log", [b"small", b"l" * 100])
    world.handles[0].faults.hold(topic="log")
    sending = asyncio.create_task(client.send_many("log", [b"one", b"two", b"l" * 100, b"three"]))
    await until(lambda: len(world.handles[0].faults.held) == 3)
    assert [len(held.appends[0][1]) for held in world.handles[0].faults.held] == [2, 1, 1]
    world.handles[0].faults.release()
    await sending


@pytest.mark.parametrize(
    ("suspect", "slices"), [(None, [SLICE, 2]), (10, [1, 1, SLICE - 2, 1, 1]), (100, [SLICE, 1, 1])]
)
def test_slices_separate_suspect_messages(suspect: int | None, slices: list[int]) -> None:
    sizes = [10, 10, *[1] * (SLICE - 2), 100, 200]
    append = TopicAppend(Batch.of([Message(None, b"v" * size) for size in sizes]), lambda _: None, False)
    found = []
    while not append.passed_on:
        found.append(len(append.next_slice(suspect)))
    assert found == slices
