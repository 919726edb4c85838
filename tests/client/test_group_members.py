"""Members of a group: they share what there is, take over from one another, and each record counts once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from client_world import World, in_world, until, values

from broker_io.errors import InvalidTopicName, ServiceUnavailable, TopicNotFound
from broker_io.port import Broker
from txnbuffer import connect, dead_letter
from txnbuffer.client.client import Client
from txnbuffer.client.groups import membership
from txnbuffer.client.groups.membership import Membership
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.coordinator.messages import ConsumerPosition, GroupHeartbeat, MemberAssignments
from txnbuffer.errors import InvalidRequest, StaleGeneration
from txnbuffer.model import Position
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.http_server import metrics

TOPICS = [f"source-{number}" for number in range(4)]


async def fill(client: Client, numbers: range) -> None:
    """So many numbers, one topic after the other."""
    async with client.transaction() as txn:
        for number in numbers:
            await txn.send(TOPICS[number % len(TOPICS)], str(number))
        await txn.commit(wait_visible=True)


async def copy(txn: Transaction, record: Record) -> None:
    await txn.send("target", record.value or b"")


def copied(world: World) -> list[int]:
    if "target" not in world.broker.topics():
        return []
    return sorted(int(value or b"") for value in values(world.broker, "target"))


def holders(world: World) -> Counter[str]:
    """How many topics each member holds."""
    return Counter(world.engine.coordinator.consumer_groups.members("g").holders.values())


@in_world
async def test_members_share_the_topics_and_handle_each_record_once(world: World) -> None:
    clients = [await world.client() for _ in range(3)]
    await fill(clients[0], range(100))
    working = [asyncio.create_task(client.process(TOPICS, "g", copy)) for client in clients]
    await until(lambda: sorted(holders(world).values()) == [1, 1, 2])
    await until(lambda: copied(world) == list(range(100)))
    working.pop().cancel()
    await until(lambda: sorted(holders(world).values()) == [2, 2])
    await fill(clients[0], range(100, 200))
    await until(lambda: copied(world) == list(range(200)))
    working.pop().cancel()
    await until(lambda: sorted(holders(world).values()) == [4])
    await fill(clients[0], range(200, 300))
    await until(lambda: copied(world) == list(range(300)))
    working.pop().cancel()
    await until(lambda: not holders(world))


@in_world
async def test_members_continue_after_a_change_of_owner(world: World) -> None:
    clients = [await world.client() for _ in range(2)]
    await fill(clients[0], range(200))
    tasks = [client.process(TOPICS, "g", copy, batch=3, idle_timeout=1.0) for client in clients]
    working = asyncio.gather(*tasks)
    for _ in range(2):
        await asyncio.sleep(0.05)
        await world.restart()
    assert sum(done.records for done in await working) >= 200
    await until(lambda: copied(world) == list(range(200)))


@in_world
async def test_other_member_takes_over_a_lost_one_before_it_is_idle(world: World) -> None:
    lost, other = await world.client(), await world.client()
    await fill(other, range(8))
    # A member that never says another word, whose connection breaks.
    member = Membership(lost, "g", TOPICS, from_end=False)
    await member.join()
    assert len(member.assignments) == 4
    assert member._heartbeats is not None
    member._heartbeats.cancel()
    session = lost.session.core.session.partition("x")[0]  # what is behind that says whom it was with
    world.engine.coordinator.session_disconnected(session, world.engine.now())
    done = await other.process(TOPICS, "g", copy, idle_timeout=0.05)
    assert done.records == 8
    assert copied(world) == list(range(8))


@in_world
async def test_member_removed_while_joining_is_not_idle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await world.client()
    await client.send("source", "1")
    heartbeat, asked = client.heartbeat, 0

    async def given_up(part: GroupHeartbeat) -> MemberAssignments:
        nonlocal asked
        asked += 1
        told = await heartbeat(part)
        return told if asked > 1 else told._replace(assignments=(), unsettled=True)

    monkeypatch.setattr(client, "heartbeat", given_up)
    assert (await client.process("source", "g", copy, idle_timeout=0.02)).records == 1


@in_world
async def test_member_sends_heartbeats_while_it_looks_for_partitions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_INTERVAL", 0.01)
    monkeypatch.setattr(membership, "PARTITION_CHECK_INTERVAL", 0.0)
    away, looks = threading.Event(), 0
    client = await world.client()
    await client.send("source", "1")
    member = Membership(client, "g", ["source"], from_end=False)

    def broker() -> Broker:
        nonlocal looks
        looks += 1
        if looks == 2:
            away.wait(60)  # the cluster takes its time
        if looks == 3:
            raise ServiceUnavailable("the cluster does not tell")
        return world.broker

    monkeypatch.setattr(client, "open_broker", broker)
    try:
        await member.join()
        (known,) = world.engine.coordinator.consumer_groups.members("g").by_name.values()
        await until(lambda: looks == 2)
        heard = known.heard
        await until(lambda: known.heard > heard)
        await client.send_many("later", ["1"])
        away.set()
        await until(lambda: looks > 3)
        assert member.failure is None
        assert [*member.assignments] == ["source"]
        await member.leave()
    finally:
        away.set()


@in_world
async def test_groups_command_shows_members_assignments_and_lag(world: World) -> None:
    client, spare = await world.client(), await world.client()
    await client.send_many("source", ["1", "2", "3"])
    assert (await client.process("source", "g", copy, idle_timeout=0.05)).records == 3
    await client.send_many("source", ["4", "5"])
    admin = ServiceAdmin(world.engine)
    gone = {"group": "g", "stage": "empty", "topic": "source", "member": None, "lag": 2}
    (row,) = await admin.groups({})
    assert {name: row[name] for name in gone} == gone
    members = [Membership(one, "g", ["source"], from_end=False) for one in (client, spare)]
    for member in members:
        await member.join()
    held, idle = await admin.groups({"group": "g"})
    assert (held["topic"], held["stage"], held["position"]) == ("source", "stable", row["position"])
    assert (idle["topic"], idle["position"], idle["lag"]) == (None, None, None)
    assert held["member"] != idle["member"]
    told = {metric.name: metric.value for metric in metrics(world.engine)}
    assert (told["groups"], told["group_members"], told["group_members_spare"]) == (1, 2, 1)
    assert held["generation"] > row["generation"]
    assert await admin.groups({"group": "another"}) == []
    for member in members:
        await member.leave()


@in_world
async def test_member_with_a_rejected_commit_continues_at_the_position_of_its_group(world: World) -> None:
    client = await world.client()
    await client.send("source", "1")
    member = Membership(client, "g", ["source"], from_end=False)
    await member.join()
    assignment = member.assignments["source"]
    async with client.transaction() as txn:
        generation = member.generation_of(assignment)
        txn.consumed(ConsumerPosition("g", "source", generation, assignment.end, Position(1, 0)))
    member.rejected(assignment)
    with pytest.raises(StaleGeneration):
        member.generation_of(assignment)
    await until(lambda: "source" in member.assignments)
    assert member.assignments["source"] == assignment._replace(end=Position(1, 0))
    await member.leave()


@in_world
async def test_group_that_starts_at_the_end_consumes_later_records_of_all_partitions(world: World) -> None:
    client, other = await world.client(), await world.client()
    await fill(client, range(40))
    assert (await client.process(TOPICS, "g", copy, start="end", idle_timeout=0.05)).records == 0
    await fill(client, range(40, 80))
    assert (await other.process(TOPICS, "g", copy, start="end", idle_timeout=0.05)).records == 40
    assert copied(world) == list(range(40, 80))


@in_world
async def test_failed_handler_is_retried_and_then_its_record_is_skipped(world: World) -> None:
    calls: Counter[bytes | None] = Counter()

    async def fails(txn: Transaction, record: Record) -> None:
        calls[record.value] += 1
        await copy(txn, record)
        if record.value == b"2" or (record.value == b"4" and calls[b"4"] == 1):
            raise ValueError("not this one")

    client = await world.client()
    await client.send_many("source-0", [str(number) for number in range(6)])
    done = await client.process("source-0", "g", fails, retries=2, on_error=dead_letter("bad"), idle_timeout=0.05)
    assert (done.records, done.dead_letters, done.retries) == (5, 1, 3)
    assert calls[b"2"] == 3
    await until(lambda: copied(world) == [0, 1, 3, 4, 5])
    with_reader = await client.reader("bad")
    found = await with_reader.read(timeout=120)
    await with_reader.close()
    assert found is not None
    (record,) = found
    assert record.value == b"2"
    assert record.properties["dead_letter_attempts"] == "3"
    assert record.properties["dead_letter_group"] == "g"
    assert record.properties["dead_letter_error"] == "ValueError: not this one"


@pytest.mark.parametrize("poison", [0, 3, 9])
@in_world
async def test_failed_batch_is_halved_until_the_record_is_found(world: World, poison: int) -> None:
    seen: list[int] = []

    async def handler(txn: Transaction, records: RecordBatch) -> None:
        texts = records.messages.values.to_list()
        seen.append(len(texts))
        await txn.send_many("target", texts)
        if str(poison).encode() in texts:
            raise ValueError("one of these")

    client = await world.client()
    await client.send_many("source-0", [str(number) for number in range(10)])
    done = await client.process_batches("source-0", "g", handler, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (9, 1)
    assert seen[0] == 10
    await until(lambda: copied(world) == [number for number in range(10) if number != poison])
    again = await client.process_batches("source-0", "g", handler, idle_timeout=0.05)
    assert again.records == 0


@in_world
async def test_failed_batch_stops_processing_and_loses_nothing(world: World) -> None:
    calls = 0

    async def fails(txn: Transaction, records: RecordBatch) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("not these")

    client = await world.client()
    await client.send_many("source-0", ["1", "2"])
    with pytest.raises(ValueError, match="not these"):
        await client.process_batches("source-0", "g", fails, retries=1)
    assert calls == 2
    assert (await client.process("source-0", "g", copy, idle_timeout=0.05)).records == 2


@in_world
async def test_handlers_of_several_topics_do_not_overlap(world: World) -> None:
    inside = most = 0

    async def counts(txn: Transaction, record: Record) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1

    client = await world.client()
    await fill(client, range(40))
    assert (await client.process(TOPICS, "g", counts, batch=3, idle_timeout=0.05)).records == 40
    assert most == 1


def test_sync_client_processes_batches() -> None:
    with connect("memory:") as client:
        client.send_many("source", ["a", "b"])
        done = client.process_batches(
            "source",
            "g",
            lambda txn, records: txn.send_many("target", records.messages.values.to_list()),
            idle_timeout=0.05,
        )
        assert (done.records, done.transactions) == (2, 1)


@in_world
async def test_invalid_argument_of_process_is_named(world: World) -> None:
    client = await world.client()
    await client.send("source", "1")
    refused: list[dict[str, Any]] = [
        *({"retries": -1}, {"retries": 1.5}, {"batch": 0}, {"on_error": "else"}),
        *({"idle_timeout": idle} for idle in (-1, 0, True, "1", float("nan"))),
        *({"on_error": dead_letter(topic)} for topic in ("source", "source-partition-3")),
    ]
    for options in refused:
        with pytest.raises(InvalidRequest):
            await client.process("source", "g", copy, **options)
    with pytest.raises(InvalidRequest, match="which the group reads"):
        await client.process("source-partition-0", "g", copy, on_error=dead_letter("source"))
    for name in ("", " bad", "__txnbuffer_bad"):
        with pytest.raises(InvalidTopicName):
            await client.process("source", "g", copy, on_error=dead_letter(name))
    with pytest.raises(InvalidRequest):
        await client.process([], "g", copy)
    with pytest.raises(TopicNotFound):
        await client.process("nowhere", "g", copy, idle_timeout=0.05)
    assert not world.engine.coordinator.consumer_groups.members("g").by_name
