"""Fix 3: readers and groups that wait for topics which do not exist yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from writing import TopicWriter

from broker_io.errors import PositionTrimmed, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from txnbuffer import Client, SyncClient, connect
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import InvalidRequest
from txnbuffer.testing import ServiceProcess


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = ServiceProcess(str(tmp_path_factory.mktemp("waiting") / "log"))
    process.start()
    yield process.address
    process.kill()


@pytest.fixture(params=["memory", "file", "service"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "service":
        return str(request.getfixturevalue("service"))
    return "memory:" if request.param == "memory" else f"file:{tmp_path / 'log'}"


def read_values(reader: CommittedReader, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    while len(found) < count and (batch := reader.read(timeout=30)) is not None:
        found += [record.value for record in batch]
    return found


def unique(name: str) -> str:
    return f"{name}-{time.monotonic_ns()}"


def test_a_reader_waits_for_a_topic_if_told_so(address: str) -> None:
    topic = unique("later")
    with connect(address) as client:
        with pytest.raises(TopicNotFound, match="wait=True"):
            client.reader(topic)
        with client.reader(topic, wait=True) as reader:
            assert reader.read(timeout=0.1) is None
            with client.transaction() as txn:
                txn.send_many(topic, [b"1", b"2"])
            assert read_values(reader, 2) == [b"1", b"2"]


@pytest.mark.parametrize("start", ["end", datetime.now(UTC) - timedelta(days=1), "beginning"])
def test_whatever_the_start_a_topic_that_came_later_is_read_from_its_beginning(start: Any) -> None:
    with connect("memory:") as client, client.reader("later", start=start, wait=True) as reader:
        client.send_many("later", [b"1", b"2"])
        assert read_values(reader, 2) == [b"1", b"2"]


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_one_of_several_topics_may_be_missing(isolation: str) -> None:
    with connect("memory:") as client:
        client.send("now", b"1")
        with client.reader(["now", "later"], isolation=isolation, start={"later": "end"}, wait=True) as reader:
            assert read_values(reader, 1) == [b"1"]
            client.send("later", b"2")
            client.send("now", b"3")
            assert sorted(value or b"" for value in read_values(reader, 2)) == [b"2", b"3"]


def test_a_long_read_notices_the_topic_soon() -> None:
    with connect("memory:") as client:
        client.send("now", b"1")
        with client.reader(["now", "later"], wait=True) as reader:
            assert read_values(reader, 1) == [b"1"]
            timer = threading.Timer(0.2, client.send, ("later", b"2"))
            timer.start()
            began = time.monotonic()
            assert read_values(reader, 1) == [b"2"]
            assert time.monotonic() - began < 15
            timer.join()


async def test_an_asyncio_reader_waits_too(address: str) -> None:
    topic = unique("later")
    async with connect(address) as client:
        with pytest.raises(TopicNotFound):
            await client.reader(topic)
        async with await client.reader(topic, wait=True) as reader:
            reading = asyncio.ensure_future(reader.read(timeout=30))
            await asyncio.sleep(0.1)
            await client.send(topic, b"1")
            batch = await reading
            assert batch is not None
            assert [record.value for record in batch] == [b"1"]


def test_a_partitioned_topic_may_come_later() -> None:
    with MemoryBroker() as broker, CommittedReader(broker, "later", wait=True) as reader:
        broker.partition("later", 2)
        TopicWriter(broker, "later-partition-0").plain("1")
        TopicWriter(broker, "later-partition-1").plain("2")
        assert sorted(value or b"" for value in read_values(reader, 2)) == [b"1", b"2"]


def test_wrong_arguments() -> None:
    with connect("memory:") as client:
        with pytest.raises(InvalidRequest, match="wait must be True or False, got 'yes'"):
            client.reader("later", wait="yes")  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidRequest, match="wait must be True or False, got 1"):
            client.process("later", "g", lambda txn, record: None, wait=1)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidRequest, match="start has other"):
            client.reader("later", start={"other": "end"}, wait=True)


@pytest.mark.parametrize("start", ["beginning", "end"])
async def test_a_group_waits_for_its_topic(address: str, start: str) -> None:
    topic, group = unique("later"), unique("g")
    seen: list[bytes | None] = []

    async def consume(client: Client) -> None:
        async def handle(txn: Any, record: Any) -> None:
            seen.append(record.value)

        await client.process(topic, group, handle, start=start, wait=True)

    async with connect(address) as client:
        with pytest.raises(TopicNotFound):
            await client.process(topic, group, lambda txn, record: asyncio.sleep(0), idle_timeout=1)
        consuming = asyncio.ensure_future(consume(client))
        await asyncio.sleep(0.3)
        assert not consuming.done()
        async with client.transaction() as txn:
            await txn.send_many(topic, [b"1", b"2"])
        while len(seen) < 2:
            assert not consuming.done()
            await asyncio.sleep(0.05)
        consuming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await consuming
        await client.process(topic, group, lambda txn, record: asyncio.sleep(0), wait=True, idle_timeout=1)
    assert seen == [b"1", b"2"]


def test_waiting_counts_as_idle() -> None:
    with connect("memory:") as client:
        done = client.process("never", "g", lambda txn, record: None, wait=True, idle_timeout=0.5)
        assert done.records == 0
        done = client.process_batches("never", "g", lambda txn, records: None, wait=True, idle_timeout=0.5)
        assert done.transactions == 0


def test_a_sync_client_processes_topics_that_come_later() -> None:
    seen: list[bytes | None] = []
    with connect("memory:") as client:
        timer = threading.Timer(0.3, client.send, ("later", b"1"))
        timer.start()

        def handle(txn: Any, record: Any) -> None:
            seen.append(record.value)

        def process(client: SyncClient) -> None:
            client.process(["later", "other"], "g", handle, wait=True, idle_timeout=4)

        process(client)
        timer.join()
    assert seen == [b"1"]


def test_a_position_that_a_later_topic_does_not_have_is_an_error() -> None:
    with connect("memory:") as client, client.reader("later", start=Position(1, 1), wait=True) as reader:
        assert reader.read() is None
        client.send_many("later", [b"0", b"1"])
        with pytest.raises(PositionTrimmed):
            reader.read(timeout=30)
