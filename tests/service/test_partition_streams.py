"""The change streams of all partitions of a topic as one."""

from __future__ import annotations

from typing import Any

import pytest
from service_setup import engine_on
from streamed import client_of, write

from broker_io.memory import MemoryBroker
from broker_io.partitions import partition_name
from txnbuffer import ChangeBatch, ChangeStream, MemoryTokens, ResumeToken, Rollback
from txnbuffer.client import partition_streams
from txnbuffer.client.client import Client
from txnbuffer.client.partition_streams import PartitionedStream, stream_partitions
from txnbuffer.errors import InvalidRequest, TokensFailed

Row = tuple[str, int, bytes | None]


def wide(count: int = 3) -> MemoryBroker:
    broker = MemoryBroker()
    broker.partition("t", count)
    return broker


async def fill(client: Client, count: int = 3, value: str = "x") -> None:
    """A record in each partition."""
    for number in range(count):
        await write(client, partition_name("t", number), {f"{value}{number}": value})


async def rows_of(stream: PartitionedStream, count: int) -> list[Row]:
    """The first `count` mutations, sorted; all batches but the last are acknowledged."""
    found: list[Row] = []
    while len(found) < count:
        batch = await stream.next(timeout=120.0)
        assert isinstance(batch, ChangeBatch)
        found += [(batch.topic, row.seqno, row.key) for row in batch]
    return sorted(found)


def due(value: str, seqno: int, count: int = 3) -> list[Row]:
    return [(partition_name("t", number), seqno, f"{value}{number}".encode()) for number in range(count)]


async def test_what_commits_in_any_partition_comes_once_and_continues_by_partition() -> None:
    broker = wide()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client)
        store = MemoryTokens()
        async with stream_partitions(client, "t", store=store) as stream:
            assert await rows_of(stream, 3) == due("x", 1)
            await stream.done()
            tokens = dict(stream.tokens)
        assert sorted(store.tokens) == sorted(tokens) == [partition_name("t", number) for number in range(3)]
        await fill(client, value="y")
        async with stream_partitions(client, "t", store=store, to="now") as stream:
            assert await rows_of(stream, 3) == due("y", 2)
            while await stream.next(timeout=120.0) is not None:
                pass
            assert stream.caught_up
        async with stream_partitions(client, "t", from_={name: str(token) for name, token in tokens.items()}) as stream:
            assert await rows_of(stream, 3) == due("y", 2)
        async with stream_partitions(client, "t", from_={}, cursor="cache") as stream:
            await rows_of(stream, 6)
            await stream.done()
        held = {row["topic"]: row["seqno"] for row in engine.cursors.rows()}
        assert held == {partition_name("t", number): 2 for number in range(3)}


async def test_partitions_that_come_later_come_from_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_streams, "REFRESH", 0.01)
    broker = wide(1)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, 1)
        async with stream_partitions(client, "t", from_="now") as stream:
            opened = await stream.next(timeout=120.0)  # later partitions are known to be new
            assert isinstance(opened, ChangeBatch)
            assert (len(opened), opened.token.seqno) == (0, 1)
            broker.partition("t", 3)
            await fill(client, 3, value="y")
            first, *others = due("y", 1)
            assert await rows_of(stream, 3) == [(first[0], 2, first[2]), *others]


async def test_an_error_of_one_partition_is_raised_once_and_all_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = wide(2)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, 2)
        made = client.stream

        def stream_of(topic: str, **options: Any) -> ChangeStream:
            stream = made(topic, **options)
            asked, raised = stream.next, [TokensFailed("no room")]

            async def fails_once(timeout: float | None = None) -> ChangeBatch | Rollback | None:
                if raised:
                    raise raised.pop()
                return await asked(timeout)

            if topic == partition_name("t", 0):
                monkeypatch.setattr(stream, "next", fails_once)
            return stream

        monkeypatch.setattr(client, "stream", stream_of)
        async with stream_partitions(client, "t") as stream:
            with pytest.raises(TokensFailed):
                await rows_of(stream, 3)
            found: set[str] = set()
            while partition_name("t", 0) not in found:
                item = await stream.next(timeout=120.0)
                assert item is not None
                found.add(item.topic)
            await fill(client, 2, value="y")
            while stream.tokens[partition_name("t", 1)].seqno < 2:
                await stream.next(timeout=120.0)


class Branched:
    """A stream of a partition whose history branched."""

    def __init__(self, topic: str) -> None:
        self.topic, self.caught_up, self.back = topic, False, 0

    async def next(self, timeout: float | None = None) -> Rollback:
        return Rollback(self.topic, 7, ResumeToken(self.topic))

    async def rolled_back(self, seqno: int) -> None:
        self.back = seqno

    async def close(self) -> None: ...


async def test_a_rollback_is_of_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = wide(2)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        streams: dict[str, Branched] = {}
        monkeypatch.setattr(client, "stream", lambda topic, **_: streams.setdefault(topic, Branched(topic)))
        async with stream_partitions(client, "t") as stream:
            for number in (5, 6):
                item = await stream.next(timeout=120.0)
                assert isinstance(item, Rollback)
                await stream.rolled_back(number)
                assert streams[item.topic].back == number


async def test_what_has_no_partitions_is_refused() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await client.send("narrow", b"x")
        with pytest.raises(InvalidRequest, match=r"no partitions: use client\.stream"):
            await stream_partitions(client, "narrow").next(timeout=120.0)
        with pytest.raises(InvalidRequest, match="each partition has its own seqnos"):
            stream_partitions(client, "narrow", to=5)  # type: ignore[arg-type]  # it is wrong
        with pytest.raises(InvalidRequest, match="nothing to confirm"):
            await stream_partitions(client, "narrow").rolled_back(0)
