"""Durable cursors of a service: what they keep from retention, that they outlive it, and their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from service_setup import engine_on
from streamed import Follower, client_of, write

from broker_io.memory import MemoryBroker
from txnbuffer.client.client import Client
from txnbuffer.config import RetentionConfig, StreamsConfig
from txnbuffer.errors import CoordinatorStopped, InvalidRequest, StreamTrimmed, TooManyCursors, UnknownCursor
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.topics.retention import LogRetention


async def fill(client: Client, broker: MemoryBroker, first: int, last: int) -> None:
    """A ledger for each record."""
    for number in range(first, last + 1):
        await write(client, "t", {str(number): "x" * 100})
        broker.roll("t")


async def trim(engine: Engine) -> None:
    """Trim as much as possible."""
    keep = LogRetention(engine.topics, engine.snapshots, RetentionConfig(bytes=1), engine.clock, engine.trim_floors)
    for _ in range(3):
        await keep.check(engine.topics.get("t"))


def ask(engine: Engine, question: str, **named: Any) -> Any:
    return ServiceAdmin(engine).methods()[question](named)


async def seqnos(client: Client) -> list[int]:
    reader = Follower(client.stream("t", to="now"))
    await reader.to_end()
    return reader.seqnos


async def test_ledgers_after_a_cursor_are_kept() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 4)
        assert await ask(engine, "AddCursor", topic="t", cursor="cache", at=2) == {
            "topic": "t",
            "cursor": "cache",
            "seqno": 2,
        }
        await fill(client, broker, 5, 8)
        await trim(engine)
        assert await seqnos(client) == [3, 4, 5, 6, 7, 8]
        (row,) = await ask(engine, "Cursors")
        assert (row["seqno"], row["items_remaining"]) == (2, 6)
        assert row["first_ledger"] == broker.ledgers("t")[0].ledger
        reader = Follower(client.stream("t"))
        await reader.until(8)
        token = str(reader.stream.token)
        assert (await ask(engine, "AdvanceCursor", topic="t", cursor="cache", at=token))["seqno"] == 8
        assert (await ask(engine, "AdvanceCursor", topic="t", cursor="cache", at="5"))["seqno"] == 8
        await trim(engine)
        assert (await seqnos(client))[0] > 4


async def test_a_cursor_outlives_a_crash_and_a_removed_one_does_not() -> None:
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await fill(client, broker, 1, 6)
        await ask(engine, "AddCursor", topic="t", cursor="kept", at="beginning")
        await ask(engine, "AddCursor", topic="t", cursor="gone", at="now")
        await ask(engine, "RemoveCursor", topic="t", cursor="gone")
        await ask(engine, "AdvanceCursor", topic="t", cursor="kept", at=3)
        await engine.snapshots.snapshot(["t"])
        await ask(engine, "AdvanceCursor", topic="t", cursor="kept", at=4)
        engine.topics.manager._ownership.lost = True  # so that nothing more is written, as after a crash
        engine.fail(CoordinatorStopped("as if it had crashed"))
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        (row,) = await ask(engine, "Cursors")
        assert (row["cursor"], row["seqno"]) == ("kept", 3)
        await trim(engine)
        assert await seqnos(client) == [4, 5, 6]
        assert (await ask(engine, "AddCursor", topic="t", cursor="kept", at="now"))["seqno"] == 3
        await ask(engine, "RemoveCursor", topic="t", cursor="kept")
        await write(client, "t", {"last": "x"})
        await trim(engine)
        assert (await seqnos(client))[0] > 4
        with pytest.raises(StreamTrimmed):
            await ask(engine, "AddCursor", topic="t", cursor="late", at=1)
        oldest = await ask(engine, "AddCursor", topic="t", cursor="oldest")
        assert oldest["seqno"] == (await seqnos(client))[0] - 1


async def test_a_cursor_that_keeps_too_much_is_dropped_alone() -> None:
    broker = MemoryBroker()
    async with (
        engine_on(broker, streams=StreamsConfig(cursor_bytes=1000)) as engine,
        client_of(engine, broker) as client,
    ):
        await fill(client, broker, 1, 1)
        await ask(engine, "AddCursor", topic="t", cursor="slow", at=0)
        await fill(client, broker, 2, 20)
        await ask(engine, "AddCursor", topic="t", cursor="quick", at=19)
        await trim(engine)
        assert [row["cursor"] for row in await ask(engine, "Cursors")] == ["quick"]
        assert (await ask(engine, "Streams"))["cursors_dropped"] == 1
        assert (await seqnos(client))[0] > 15
        with pytest.raises(UnknownCursor, match="dropped"):
            await ask(engine, "AdvanceCursor", topic="t", cursor="slow", at=5)


async def test_bounds_and_bad_questions() -> None:
    broker = MemoryBroker()
    async with engine_on(broker, streams=StreamsConfig(max_cursors=2)) as engine, client_of(engine, broker) as client:
        await client.send("t", b"ordinary")
        for name in ("a", "b", "a"):
            await ask(engine, "AddCursor", topic="t", cursor=name)
        with pytest.raises(TooManyCursors, match="2 cursors"):
            await ask(engine, "AddCursor", topic="t", cursor="c")
        for question in ("AdvanceCursor", "RemoveCursor"):
            at = {"at": 1} if question == "AdvanceCursor" else {}
            with pytest.raises(UnknownCursor):
                await ask(engine, question, topic="t", cursor="missing", **at)
        for wrong in ({"topic": 5}, {"cursor": ""}, {"at": None}, {"at": True}, {"at": 1.5}, {"strange": 1}):
            with pytest.raises(InvalidRequest):
                await ask(engine, "AddCursor", **{"topic": "t", "cursor": "c", "at": 1, **wrong})
