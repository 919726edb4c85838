"""A group gets other positions: all of them or none, and only while no member has any of its partitions."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from client_world import World, in_world, read_all

from broker_io.errors import TopicNotFound
from txnbuffer.client import seeking
from txnbuffer.client.client import Client
from txnbuffer.client.groups.processing import position_after
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.reading.starts import Seqno
from txnbuffer.client.seeking import position_before, seek
from txnbuffer.client.transaction import Transaction
from txnbuffer.errors import InvalidRequest, StaleGeneration
from txnbuffer.model import Position
from txnbuffer.service.servers.admin import ServiceAdmin


async def seeker(world: World) -> Client:
    """A client that reaches the admin calls of the world's service."""
    client = await world.client()

    async def ask(owned: str, method: str, arguments: dict[str, Any], max_unavailable: float = 0.0) -> Any:
        return await ServiceAdmin(world.engine).methods()[method](arguments)

    client.admin.ask = ask  # type: ignore[method-assign]  # there is no connector
    return client


async def fill(client: Client, count: int = 10) -> None:
    for number in range(count):
        async with client.transaction() as txn:
            await txn.send("a", str(number))


async def consume(client: Client, *topics: str) -> list[int]:
    handled: list[int] = []

    async def handle(_: Transaction, records: RecordBatch) -> None:
        handled.extend(int(record.value or b"") for record in records)

    await client.process_batches(topics or "a", "g", handle, idle_timeout=0.05)
    return handled


@in_world
async def test_a_group_continues_where_it_was_sent(world: World) -> None:
    client = await seeker(world)
    await fill(client)
    assert await consume(client) == [*range(10)]
    place = read_all(world.broker, "a")[2].position
    for start, expected in ((Seqno(8), [7, 8, 9]), ("beginning", [*range(10)]), ("end", []), (place, [*range(2, 10)])):
        (moved,) = await seek(client, "g", "a", start)
        assert moved.topic == "a"
        assert moved.old is not None
        assert await consume(client) == expected


@in_world
async def test_a_new_group_begins_there_and_nothing_changes_on_a_dry_run(world: World) -> None:
    client = await seeker(world)
    await fill(client)
    (dry,) = await seek(client, "g", "a", Seqno(9), dry_run=True)
    assert [*world.engine.coordinator.consumer_groups.all_groups()] == []
    assert await seek(client, "g", "a", Seqno(9)) == [dry]
    assert dry.old is None
    assert await consume(client) == [8, 9]


@in_world
async def test_only_the_topic_moves(world: World) -> None:
    client = await seeker(world)
    await fill(client)
    async with client.transaction() as txn:
        await txn.send("b", "100")
    assert sorted(await consume(client, "a", "b")) == [*range(10), 100]
    await seek(client, "g", "a", Seqno(10))
    assert await consume(client, "a", "b") == [9]


@in_world
async def test_a_group_with_members_is_refused(world: World) -> None:
    client, other = await seeker(world), await world.client()
    await fill(client)
    handled: list[Record] = []

    async def handle(_: Transaction, record: Record) -> None:
        handled.append(record)

    running = asyncio.create_task(other.process("a", "g", handle))
    while len(handled) < 10:
        await asyncio.sleep(0.01)
    for dry_run in (True, False):
        with pytest.raises(InvalidRequest, match=r"group 'g' has 1 member \(.*\), and can be moved without members"):
            await seek(client, "g", "a", "beginning", dry_run=dry_run)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await consume(client) == []


@in_world
async def test_a_member_that_joins_before_the_commit_refuses_it(world: World) -> None:
    client, other = await seeker(world), await world.client()
    await fill(client)
    places, members = seeking._places, []

    async def handle(_: Transaction, record: Record) -> None:
        await asyncio.sleep(0)

    async def joined() -> None:
        members.append(asyncio.create_task(other.process("a", "g", handle)))
        while not world.engine.coordinator.consumer_groups.members("g").by_name:
            await asyncio.sleep(0.01)

    loop = asyncio.get_running_loop()

    def meanwhile(*arguments: Any) -> Any:
        asyncio.run_coroutine_threadsafe(joined(), loop).result()
        return places(*arguments)

    with (
        mock.patch.object(seeking, "_places", meanwhile),
        pytest.raises(InvalidRequest, match="group 'g' has 1 member"),
    ):
        await seek(client, "g", "a", Seqno(5))
    members[0].cancel()
    await asyncio.gather(*members, return_exceptions=True)


@in_world
async def test_a_member_that_gets_the_partition_before_the_commit_refuses_it(world: World) -> None:
    client, other = await seeker(world), await world.client()
    await fill(client)
    assert await consume(client) == [*range(10)]
    begin = Transaction.__aenter__

    async def fenced(txn: Transaction) -> Transaction:
        await other.join("g")
        return await begin(txn)

    with (
        mock.patch.object(Transaction, "__aenter__", fenced),
        pytest.raises(InvalidRequest, match="joined group 'g' meanwhile"),
    ):
        await seek(client, "g", "a", "beginning")
    assert await consume(client) == []


@in_world
async def test_a_member_that_joins_later_continues_at_the_new_position(world: World) -> None:
    client, other = await seeker(world), await world.client()
    await fill(client)
    assert await consume(client) == [*range(10)]
    begin, others = Transaction.__aenter__, []

    async def joined(txn: Transaction) -> Transaction:
        with mock.patch.object(Transaction, "__aenter__", begin):
            others.append(asyncio.create_task(consume(other)))
            while len(world.engine.coordinator.consumer_groups.members("g").by_name) < 2:
                await asyncio.sleep(0.01)
        return await begin(txn)

    with mock.patch.object(Transaction, "__aenter__", joined):
        await seek(client, "g", "a", Seqno(7))
    (handled,) = await asyncio.gather(*others)
    assert handled + await consume(client) == [6, 7, 8, 9]


@in_world
async def test_another_owner_before_the_commit_changes_all_or_nothing(world: World) -> None:
    client = await seeker(world)
    await fill(client)
    assert await consume(client) == [*range(10)]
    begin = Transaction.__aenter__

    async def restarted(txn: Transaction) -> Transaction:
        begun = await begin(txn)
        await world.restart()
        return begun

    with mock.patch.object(Transaction, "__aenter__", restarted):
        try:
            await seek(client, "g", "a", "beginning")
            expected = [*range(10)]
        except (InvalidRequest, StaleGeneration):
            expected = []
    assert await consume(client) == expected


@in_world
async def test_places_that_do_not_exist_are_refused(world: World) -> None:
    client = await seeker(world)
    await fill(client)
    for topic, start, kind, sentence in (
        ("a", Seqno(11), InvalidRequest, "no visible record with seqno 11 or a later one"),
        ("a", Position(7, 0), InvalidRequest, "position 7:0 is after the end of topic 'a'"),
        ("b", "end", TopicNotFound, "there is no topic 'b'"),
    ):
        with pytest.raises(kind, match=sentence):
            await seek(client, "g", topic, start)  # type: ignore[arg-type]  # of several kinds
    assert [*world.engine.coordinator.consumer_groups.all_groups()] == []


@pytest.mark.parametrize("place", [Position(3, 0), Position(3, 5), Position(3, 5, 2), Position(3, 5, 1)])
def test_the_position_before_a_place_leads_to_it(place: Position) -> None:
    assert position_after(position_before(place)) == place


def test_the_first_record_of_an_entry_is_read_with_the_entry() -> None:
    assert position_after(position_before(Position(3, 5, 0))) == Position(3, 5)
