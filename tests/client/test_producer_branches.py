"""Shares of one number: written by clients that come and go, committed by another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from client.direct_world import DirectWorld, in_direct_world
from client_world import World, in_world, until, values

from broker_io.batch import Batch, Message
from broker_io.errors import MessageTooLarge
from txnbuffer import Outcome
from txnbuffer.client.branches import Participant, commit_branches
from txnbuffer.client.client import Client
from txnbuffer.client.path.send_columns import split
from txnbuffer.coordinator.messages import Branch
from txnbuffer.errors import AlreadyCommitted, InvalidRequest, ProducerFenced, TransactionAborted
from txnbuffer.rpc.frames import SEND_BYTES


def records(*texts: str) -> Batch:
    return Batch.of([Message(text.encode(), text.encode(), {"p": text}, 7) for text in texts])


async def written(client: Client, *texts: str, number: int = 1, topic: str = "orders") -> Branch:
    """A share by a client that goes when it is finished."""
    share = Participant(client, "query", number)
    await share.begin()
    for text in texts:
        await share.send_batch(topic, records(text))
    branch = await share.finish()
    await client.close()
    return branch


async def a_number(world: World | DirectWorld, new_client: Callable[[], Awaitable[Client]]) -> None:
    winners = [await written(await new_client(), "one", "two"), await written(await new_client(), "three")]
    await written(await new_client(), "never")
    unfinished = Participant(await new_client(), "query", 1)
    await unfinished.begin()
    await unfinished.send_batch("orders", records("never"))
    driver = await new_client()
    assert await commit_branches(driver, "query", 1, winners)
    await until(lambda: values(world.broker, "orders") == [b"one", b"two", b"three"])
    assert not await commit_branches(await new_client(), "query", 1, winners)
    with pytest.raises(TransactionAborted):
        await unfinished.send_batch("orders", records("late"))
        await unfinished.finish()
    late = Participant(driver, "query", 1)
    with pytest.raises(AlreadyCommitted):
        await late.begin()
    assert await driver.outcome(late.id) is Outcome.ABORT
    second = await written(await new_client(), "four", number=2)
    assert await commit_branches(await new_client(), "query", 2, [second])
    await until(lambda: values(world.broker, "orders") == [b"one", b"two", b"three", b"four"])


@in_world
async def test_only_branches_named_by_the_commit_are_visible(world: World) -> None:
    await a_number(world, world.client)


@in_direct_world
async def test_only_branches_named_by_the_commit_are_visible_on_a_cluster(world: DirectWorld) -> None:
    await a_number(world, world.client)


@in_direct_world
async def test_branch_keeps_all_fields_of_records_and_can_use_record_sets(world: DirectWorld) -> None:
    client = await world.client()
    for number, batching in enumerate(("messages", "records"), 1):
        share = Participant(client, "query", number)
        await share.begin()
        await share.send_batch("log", records("a", "b"), batching)  # type: ignore[arg-type]  # a literal of a loop
        await share.send_batch("log", records("c"), batching)  # type: ignore[arg-type]  # as above
        branch = await share.finish()
        assert branch == Branch(share.id, ("log",), (3,))
        with pytest.raises(InvalidRequest, match="has ended"):
            await share.send_batch("log", records("d"))
        assert await commit_branches(await world.client(), "query", number, [branch])
    await until(lambda: values(world.broker, "log") == [b"a", b"b", b"c"] * 2)
    with world.broker.reader("log") as reader:
        placed = reader.read()
    assert placed is not None
    plain = [dict(message.properties) for message in placed.messages if "tb.records" not in message.properties]
    assert [row.get("p") for row in plain[:3]] == ["a", "b", "c"]
    assert [row.get("tb.seq") for row in plain[:3]] == ["1", "2", "3"]


@in_world
async def test_unfinished_branch_ends_with_its_client(world: World) -> None:
    kept = await written(await world.client(), "kept")
    going = await world.client()
    share = Participant(going, "query", 1)
    await share.begin()
    await share.send_batch("orders", records("gone"))
    await going.close()
    driver = await world.client()
    await until(lambda: world.engine.coordinator.has_ended(share.id.least))
    assert await driver.outcome(share.id) is Outcome.ABORT
    assert await driver.outcome(kept.txn) is None
    assert await commit_branches(driver, "query", 1, [kept])
    assert values(world.broker, "orders") == [b"kept"]


@in_world
async def test_committed_number_rejects_branches(world: World) -> None:
    driver = await world.client()
    await commit_branches(driver, "query", 1, [await written(await world.client(), "one")])
    await driver.delete_name("query", last_number=1)
    with pytest.raises(ProducerFenced, match="has already ended"):
        await Participant(driver, "query", 1).begin()
    assert values(world.broker, "orders") == [b"one"]


@in_world
async def test_broken_connection_loses_and_duplicates_nothing(world: World) -> None:
    client = await world.client()
    share = Participant(client, "query", 1)
    await share.begin()
    await share.send_batch("orders", records("a", "b"))
    world.cut()
    await share.send_batch("orders", records("c"))
    world.cut()
    branch = await share.finish()
    world.cut()
    assert await commit_branches(await world.client(), "query", 1, [branch])
    assert values(world.broker, "orders") == [b"a", b"b", b"c"]


@in_world
async def test_branch_ends_by_abort_or_timeout(world: World) -> None:
    client = await world.client()
    share = Participant(client, "query", 1)
    with pytest.raises(InvalidRequest, match="not begun"):
        await share.finish()
    await share.begin()
    await share.send_batch("orders", records("a"))
    await share.abort()
    await share.abort()
    assert await client.outcome(share.id) is Outcome.ABORT
    short = Participant(client, "query", 1, timeout=0.05)
    await short.begin()
    await until(lambda: world.engine.coordinator.has_ended(short.id.least))
    with pytest.raises(TransactionAborted):
        await short.finish()
    with pytest.raises(TransactionAborted):
        await commit_branches(client, "query", 1, [Branch(short.id, (), ())])
    with pytest.raises(InvalidRequest, match="must be above 0 and at most"):
        await Participant(client, "query", 1, timeout=1e6).begin()


@in_world
async def test_records_are_cut_into_sends_and_too_large_ones_are_rejected(world: World) -> None:
    large = Batch.of([Message(None, bytes(SEND_BYTES // 3))] * 7)
    assert [len(piece) for piece in split(large)] == [2, 2, 2, 1]
    assert [len(piece) for piece in split(records("a", "b"))] == [2]
    client = await world.client()
    share = Participant(client, "query", 1)
    await share.begin()
    with pytest.raises(MessageTooLarge):
        await share.send_batch("orders", Batch.of([Message(None, bytes(client.max_message_bytes + 1))]))
    await share.send_batch("orders", large)
    assert (await share.finish()).records == (7,)
