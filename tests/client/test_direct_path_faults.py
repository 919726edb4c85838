"""Clients that write to a cluster themselves, on bad days: writers die, acknowledgements wait, links break."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from client.direct_world import DirectWorld, commit_one, ended, in_direct_world
from client_world import once, run_many, until, values

from broker_io.memory import MemoryBroker
from txnbuffer import (
    Fenced,
    InvalidTopicName,
    Outcome,
    OutcomeUnknown,
    SendUnknown,
    ServiceUnavailable,
    TransactionAborted,
)
from txnbuffer.client.client import Client
from txnbuffer.errors import Error
from txnbuffer.rpc.frames import ClientFrame

BROKEN = ServiceUnavailable("a broker went away: a fault was asked for")


def has_commit(frame: ClientFrame) -> bool:
    return bool(frame.commits)


def raw(broker: MemoryBroker, topic: str) -> list[bytes | None]:
    """Everything of a topic but its markers, visible or not."""
    found: list[bytes | None] = []
    if topic not in broker.topics():
        return found
    with broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            found += [message.value for message in placed.messages if "tb.marker" not in message.properties]
    return found


def linked(world: DirectWorld, client: Client, links: int) -> bool:
    return len(world.links) == links and client.session.core.welcomed


def holds(world: DirectWorld, appends: int) -> bool:
    return len(world.handles[0].faults.held) == appends


@pytest.mark.parametrize("written", [0, 1, 2], ids=["nothing", "a part", "all"])
@in_direct_world
async def test_transaction_can_only_abort_after_its_writer_failed(world: DirectWorld, written: int) -> None:
    client = await world.client()
    await commit_one(client, "log", b"before")
    world.handles[0].faults.fail_append(BROKEN, written=written, topic="log")
    txn = await client.transaction().begin()
    await txn.send_many("log", [b"never", b"never"])
    with pytest.raises(TransactionAborted, match="went away"):
        await txn.commit()
    assert await ended(client, txn) is Outcome.ABORT
    await commit_one(client, "log", b"after")
    await until(lambda: values(world.broker, "log") == [b"before", b"after"])
    assert raw(world.broker, "log").count(b"never") == written


@in_direct_world
async def test_transaction_of_two_topics_aborts_after_one_writer_failed(world: DirectWorld) -> None:
    client = await world.client()
    world.handles[0].faults.fail_append(BROKEN, topic="two")
    with pytest.raises(TransactionAborted):
        async with client.transaction() as txn:
            await txn.send("one", b"never")
            await txn.send("two", b"never")
    await client.run(lambda txn: txn.send("two", b"seen"))
    await until(lambda: values(world.broker, "two") == [b"seen"])
    assert values(world.broker, "one") == []


@in_direct_world
async def test_commit_waits_for_the_acknowledgement_of_each_record(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"first")
    faults = world.handles[0].faults
    faults.hold(topic="log")
    txn = await client.transaction().begin()
    await txn.send("log", b"second")
    committing = asyncio.create_task(txn.commit())
    await until(lambda: len(faults.held) == 1)
    other = await commit_one(client, "other", b"v")
    assert await client.outcome(other.id) is Outcome.COMMIT
    assert not committing.done()
    assert txn.id not in [commit.txn for frame in world.frames for commit in frame.commits]
    faults.release()
    await committing
    await until(lambda: values(world.broker, "log") == [b"first", b"second"])


@in_direct_world
async def test_append_in_flight_is_not_repeated_after_the_link_broke(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"0")
    faults = world.handles[0].faults
    faults.hold(topic="log", written=False)
    opened = [await client.transaction().begin() for _ in range(3)]
    for txn in opened:
        await txn.send("log", b"1")
    await until(lambda: len(faults.held) == 1)
    for links in (2, 3):
        world.cut()
        await until(partial(linked, world, client, links))
        await opened[0].send("log", b"2")
        await until(partial(holds, world, links))
    faults.release()
    await asyncio.gather(*(txn.commit() for txn in opened))
    await until(lambda: values(world.broker, "log") == [b"0", b"1", b"1", b"1", b"2", b"2"])
    assert raw(world.broker, "log") == [b"0", b"1", b"1", b"1", b"2", b"2"]


@in_direct_world
async def test_send_that_failed_without_a_link_fails_its_transaction(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"0")
    faults = world.handles[0].faults
    faults.hold(topic="log")
    txn = await client.transaction().begin()
    await txn.send("log", b"never")
    await until(lambda: len(faults.held) == 1)
    world.reachable = False
    world.cut()
    await until(lambda: not client.session.core.welcomed)
    faults.held[0].fail(BROKEN)
    faults.release()
    world.reachable = True
    with pytest.raises(TransactionAborted, match="went away"):
        await txn.commit()
    assert await ended(client, txn) is Outcome.ABORT
    assert values(world.broker, "log") == [b"0"]


@in_direct_world
async def test_new_writer_waits_for_appends_in_flight_of_a_failed_one(world: DirectWorld) -> None:
    """Records behind it would make it a repetition of what nobody has."""
    client = await world.client()
    await commit_one(client, "log", b"0")
    faults = world.handles[0].faults
    faults.hold(topic="log", written=False)
    late = await client.transaction().begin()
    for number in (1, 2):
        await late.send("log", b"late")
        await until(partial(holds, world, number))
    faults.held[0].fail(BROKEN)
    faults.holds.clear()
    next_one = asyncio.create_task(commit_one(client, "log", b"next"))
    done, _ = await asyncio.wait([next_one], timeout=0.3)
    assert not done
    faults.release()
    await next_one
    with pytest.raises(TransactionAborted):
        await late.commit()
    await until(lambda: values(world.broker, "log") == [b"0", b"next"])
    assert raw(world.broker, "log") == [b"0", b"late", b"next"]


@in_direct_world
async def test_ordinary_sends_continue_without_a_service(world: DirectWorld) -> None:
    world.reachable = False
    client = await world.client(max_unavailable=0.05)
    await client.send("log", b"1", key="k")
    with pytest.raises(ServiceUnavailable, match="no service for"):
        await client.transaction().begin()
    await client.send_many("log", [b"2", b"3"])
    await client.delete("log", "k")
    assert raw(world.broker, "log") == [b"1", b"2", b"3", None]
    async with await client.reader("log", isolation="read_uncommitted") as reader:
        batch = await reader.read(timeout=120)
        assert batch is not None
        assert len(batch) == 4
    client.session.max_unavailable = 60.0
    world.reachable = True
    await until(lambda: client.session.core.welcomed)
    await commit_one(client, "log", b"4")


@in_direct_world
async def test_commit_waits_for_the_service_and_ordinary_sends_do_not(world: DirectWorld) -> None:
    client = await world.client()
    txn = await client.transaction().begin()
    await txn.send("log", b"1")
    await until(lambda: raw(world.broker, "log") == [b"1"])
    world.reachable = False
    world.cut()
    await until(lambda: not client.session.core.welcomed)
    committing = asyncio.create_task(txn.commit())
    await client.send("log", b"2")
    assert not committing.done()
    world.reachable = True
    await committing
    await until(lambda: values(world.broker, "log") == [b"1", b"2"])


@in_direct_world
async def test_ordinary_send_whose_writer_failed_is_unknown(world: DirectWorld) -> None:
    client = await world.client()
    await client.send("log", b"1")
    world.handles[0].faults.lose_acknowledgement(BROKEN, topic="log")
    with pytest.raises(SendUnknown, match="may or may not be"):
        await client.send("log", b"2")
    await client.send("log", b"3")
    assert raw(world.broker, "log") == [b"1", b"2", b"3"]


@in_direct_world
async def test_error_names_the_topic_of_an_exclusive_writer(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"1")
    with world.broker.connect().writer("log", exclusive=True):
        for _ in range(2):
            with pytest.raises(Fenced, match="'log'"):
                await commit_one(client, "log", b"never")
            with pytest.raises(Fenced, match="'log'"):
                await client.send("log", b"never")
    await client.send("log", b"2")
    assert raw(world.broker, "log") == [b"1", b"2"]


@in_direct_world
async def test_error_names_a_deleted_topic_and_ordinary_sends_create_it_again(world: DirectWorld) -> None:
    client = await world.client()
    await client.send("log", b"1")
    world.broker.delete_topic("log")
    with pytest.raises(Error, match="'log' was deleted"):
        await client.send("log", b"never")
    await client.send("log", b"2")
    assert raw(world.broker, "log") == [b"2"]


@in_direct_world
async def test_records_for_internal_topics_are_rejected(world: DirectWorld) -> None:
    client = await world.client()
    with pytest.raises(InvalidTopicName, match="is internal"):
        await client.send("__txnbuffer_decisions", b"v")
    with pytest.raises(InvalidTopicName, match="is internal"):
        await commit_one(client, "__txnbuffer_decisions", b"v")


@in_direct_world
async def test_large_sends_keep_their_order_and_do_not_block_other_topics(world: DirectWorld) -> None:
    client = await world.client()
    many = [b"%d" % number for number in range(5000)]
    async with client.transaction() as txn:
        await txn.send_many("log", many)
        await txn.send("log", b"last")
    await until(lambda: values(world.broker, "log") == [*many, b"last"])
    await client.send_many("plain", many)
    assert raw(world.broker, "plain") == many


@in_direct_world
async def test_senders_wait_while_the_cluster_accepts_no_more(world: DirectWorld) -> None:
    client = await world.client()
    await client.send("log", b"first")
    faults = world.handles[0].faults
    faults.hold(topic="log")
    sends = [asyncio.create_task(client.send("log", bytes(1024 * 1024))) for _ in range(20)]
    await until(lambda: len(faults.held) > 0)
    await asyncio.sleep(0.05)
    assert len(raw(world.broker, "log")) < 12
    faults.release()
    await asyncio.gather(*sends)
    assert len(raw(world.broker, "log")) == 21


@in_direct_world
async def test_commit_in_flight_at_close_is_unknown(world: DirectWorld) -> None:
    client = await world.client()
    await commit_one(client, "log", b"1")
    client.session.max_unavailable = 0.1
    world.before = once(has_commit)
    txn = await client.transaction().begin()
    await txn.send("log", b"2")
    world.reachable = False
    committing = asyncio.create_task(txn.commit())
    await until(lambda: world.links[0]._cut)
    with pytest.raises(OutcomeUnknown):
        await committing
    client.session.max_unavailable = 60.0
    world.reachable = True
    await until(lambda: client.session.core.welcomed)
    assert await ended(client, txn) is Outcome.ABORT


@in_direct_world
async def test_many_transactions_while_links_break_writers_fail_and_owners_change(world: DirectWorld) -> None:
    async def disturb() -> None:
        for turn in range(12):
            await asyncio.sleep(0.03)
            if turn % 4 == 3:
                await world.restart()
            elif turn % 2:
                world.cut()
            else:
                world.handles[0].faults.fail_append(BROKEN, written=turn, topic="log")

    await run_many(world, disturb, attempts=100)
