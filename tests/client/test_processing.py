"""Consume, transform, produce: each record once, whoever is killed, fenced, slow or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_world import World, in_world, once, read_all, until, values

from broker_io.errors import TopicNotFound
from txnbuffer import ServiceUnavailable, TransactionAborted, connect, dead_letter
from txnbuffer.client.client import Client
from txnbuffer.client.groups.processing import position_after
from txnbuffer.client.reading.async_reader import AsyncReader
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.transaction import Transaction
from txnbuffer.model import Position
from txnbuffer.rpc.frames import ClientFrame
from txnbuffer.testing import ServiceProcess


async def fill(client: Client, *texts: str, topic: str = "source") -> None:
    async with client.transaction() as txn:
        for text in texts:
            await txn.send(topic, text, key=text, properties={"p": text})
        await txn.commit(wait_visible=True)


async def double(txn: Transaction, record: Record) -> None:
    number = int(record.value or b"")
    await txn.send("target", str(2 * number), key=record.key)


def numbers(world: World, topic: str = "target") -> list[int]:
    return [int(value or b"") for value in values(world.broker, topic)]


@in_world
async def test_each_record_is_handled_once_over_many_restarts(world: World) -> None:
    client = await world.client()
    await fill(client, *map(str, range(25)))
    first = await client.process("source", "g", double, batch=10, idle_timeout=0.05)
    assert (first.records, first.transactions) == (25, 3)
    second = await client.process("source", "g", double, idle_timeout=0.05)
    assert (second.records, second.transactions) == (0, 0)
    await fill(client, "100")
    other = await world.client()
    assert (await other.process("source", "g", double, idle_timeout=0.05)).records == 1
    assert numbers(world) == [*range(0, 50, 2), 200]
    assert (await other.process("source", "another group", double, idle_timeout=0.05)).records == 26


@in_world
async def test_several_topics_with_a_start(world: World) -> None:
    client = await world.client()
    await fill(client, "1", "2", topic="a")
    await fill(client, "3", topic="b")
    done = await client.process(["a", "b"], "g", double, idle_timeout=0.05)
    assert done.records == 3
    assert sorted(numbers(world)) == [2, 4, 6]
    assert (await client.process("a", "late", double, start="end", idle_timeout=0.05)).records == 0
    with pytest.raises(TopicNotFound):
        await client.process("nowhere", "g", double, idle_timeout=0.05)


@in_world
async def test_failed_handler_stops_processing_and_loses_nothing(world: World) -> None:
    async def committed(world: World) -> list[int]:
        """What is visible once everything that was aborted has its marker."""
        client = await world.client()
        await fill(client, "0", topic="target")
        await until(lambda: 0 in numbers(world))
        await client.close()
        return [number for number in numbers(world) if number]

    client = await world.client()
    await fill(client, "1", "2", "x", "4")
    with pytest.raises(ValueError, match="invalid literal"):
        await client.process("source", "g", double)
    assert await committed(world) == []
    with pytest.raises(ValueError, match="invalid literal"):
        await client.process("source", "g", double, batch=1)
    assert await committed(world) == [2, 4]
    done = await client.process("source", "g", double, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (1, 1)
    assert await committed(world) == [2, 4, 8]


@in_world
async def test_failed_record_becomes_a_dead_letter_with_its_content(world: World) -> None:
    client = await world.client()
    await fill(client, "1", "x", "3", "y", "z", "6")
    async with client.transaction() as txn:
        await txn.delete("source", "gone")
    done = await client.process("source", "g", double, on_error=dead_letter("bad"), idle_timeout=0.05)
    assert (done.records, done.dead_letters, done.skipped) == (3, 4, 0)
    await until(lambda: numbers(world) == [2, 6, 12])
    found = read_all(world.broker, "bad")
    assert [record.value for record in found] == [b"x", b"y", b"z", None]
    assert [record.key for record in found] == [b"x", b"y", b"z", b"gone"]
    assert found[0].properties["p"] == "x"
    assert found[0].properties["dead_letter_topic"] == "source"
    assert found[0].properties["dead_letter_error"].startswith("ValueError")
    assert Position.parse(found[0].properties["dead_letter_position"])


@in_world
async def test_package_error_caused_by_the_record_counts_as_handler_failure(world: World) -> None:
    async def handler(txn: Transaction, record: Record) -> None:
        await txn.send("target", bytes(int(record.value or b"")))

    client = await world.client()
    await fill(client, "5", str(10**8), "7")
    done = await client.process("source", "g", handler, on_error="skip", idle_timeout=0.05)
    assert (done.records, done.skipped) == (2, 1)
    await until(lambda: [len(value or b"") for value in values(world.broker, "target")] == [5, 7])


@in_world
async def test_removed_member_commits_nothing_and_joins_again(world: World) -> None:
    zombie, other = await world.client(), await world.client()
    await fill(zombie, "1", "2")
    paused, go_on = asyncio.Event(), asyncio.Event()
    calls = 0

    async def slow(txn: Transaction, record: Record) -> None:
        nonlocal calls
        calls += 1
        await double(txn, record)
        paused.set()
        await go_on.wait()

    working = asyncio.create_task(zombie.process("source", "g", slow, idle_timeout=0.05))
    await paused.wait()
    await other.join("g")  # gives up all members
    go_on.set()
    done = await working
    assert (done.records, calls) == (2, 4)
    await until(lambda: numbers(world) == [2, 4])


@in_world
async def test_same_records_are_not_committed_twice(world: World) -> None:
    """A lost answer: the group has moved though its client was not told."""
    client = await world.client()
    await fill(client, *map(str, range(10)))
    world.after = once(lambda frame: any(commit.positions for commit in frame.commits))
    done = await client.process("source", "g", double, batch=4, idle_timeout=0.1)
    assert done.records == 10
    assert len(world.links) == 2
    await until(lambda: numbers(world) == list(range(0, 20, 2)))


@in_world
async def test_slow_read_is_not_idle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = AsyncReader.read

    async def slowly(reader: AsyncReader, *, limit: int = 10_000, timeout: float = 0.0) -> RecordBatch | None:
        await asyncio.sleep(0.2)
        return await read(reader, limit=limit, timeout=timeout)

    client = await world.client()
    await fill(client, *map(str, range(30)))
    monkeypatch.setattr(AsyncReader, "read", slowly)
    assert (await client.process("source", "g", double, batch=10, idle_timeout=0.05)).records == 30


@in_world
async def test_aborted_batch_is_handled_again(world: World) -> None:
    calls = 0

    async def handler(txn: Transaction, record: Record) -> None:
        nonlocal calls
        calls += 1
        await double(txn, record)
        if calls == 2:
            raise TransactionAborted(txn.id, "somebody said so")

    client = await world.client()
    await fill(client, "1", "2", "3")
    done = await client.process("source", "g", handler, idle_timeout=0.05)
    assert (done.records, calls) == (3, 5)
    await until(lambda: numbers(world) == [2, 4, 6])


@in_world
async def test_processing_while_links_break_and_owners_change(world: World) -> None:
    client = await world.client()
    await fill(client, *map(str, range(300)))
    working = asyncio.create_task(client.process("source", "g", double, batch=5, idle_timeout=1.0))
    for turn in range(5):
        await asyncio.sleep(0.03)
        if turn % 2:
            await world.restart()
        else:
            world.cut()
    await working
    await until(lambda: numbers(world) == list(range(0, 600, 2)))


@in_world
async def test_cancelling_stops_between_commits(world: World) -> None:
    client = await world.client()
    await fill(client, *map(str, range(50)))
    frames: list[ClientFrame] = []
    world.before = lambda frame: bool(frames.append(frame)) and False
    working = asyncio.create_task(client.process("source", "g", double, batch=1))
    await until(lambda: sum(len(frame.commits) for frame in frames) > 5)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await client.process("source", "g", double, idle_timeout=0.2)
    await until(lambda: numbers(world) == list(range(0, 100, 2)))


def test_position_after() -> None:
    assert position_after(Position(3, 4)) == Position(3, 5)
    assert position_after(Position(3, 4, 0)) == Position(3, 4, 1)


WORKER = """
import sys
from txnbuffer import connect
def handle(txn, record):
    txn.send("target", record.value)
with connect(sys.argv[1]) as client:
    client.process("source", "g", handle, batch=7)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """One that soon gives up clients that were killed, so that what they had open holds nobody back for long."""
    process = ServiceProcess(str(tmp_path / "log"), "--set", "transactions.session_timeout=0.5")
    process.start()
    yield process
    process.kill()


def test_killed_workers_and_services_lose_and_duplicate_nothing(service: ServiceProcess) -> None:
    """Two workers take over from each other; both, and the service, are killed again and again."""
    count = 1000
    with connect(service.address) as client:
        client.send_many("source", [str(index) for index in range(count)])
        client.send("target", b"begin")

        def worker() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", WORKER, service.address]
            return subprocess.Popen(command, stderr=subprocess.DEVNULL)

        for turn in range(3):
            workers = [worker(), worker()]
            time.sleep(0.7 + 0.1 * turn)
            if turn % 2:
                service.restart()
                time.sleep(0.3)
            for process in workers:
                process.send_signal(signal.SIGKILL)
                process.wait()

        def handle(txn: object, record: Record) -> None:
            txn.send("target", record.value)  # type: ignore[attr-defined]  # a SyncTransaction

        client.process("source", "g", handle, idle_timeout=0.5)
        found: list[bytes | None] = []
        with client.reader("target") as reader:
            while len(found) < count + 1 and (batch := reader.read(timeout=120)) is not None:
                found += [record.value for record in batch]
        assert [int(value or b"") for value in found[1:]] == list(range(count))


@in_world
async def test_outcome_is_queried_after_an_unknown_commit(world: World) -> None:
    client = await world.client(max_unavailable=0.05)
    await fill(client, "1", "2")

    def lose(frame: ClientFrame) -> bool:
        if any(commit.positions for commit in frame.commits):
            world.reachable = False
            asyncio.get_running_loop().call_later(0.3, setattr, world, "reachable", True)
            return True
        return False

    world.after = once(lose)
    world.late = 0.0
    with contextlib.suppress(ServiceUnavailable):  # it may not even be possible to ask
        await client.process("source", "g", double, idle_timeout=0.1)
    await until(lambda: world.reachable)
    other = await world.client()
    await other.process("source", "g", double, idle_timeout=0.1)
    await until(lambda: numbers(world) == [2, 4])
