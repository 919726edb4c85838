"""Mutation snapshots over restarts of a service: their bounds are stored, and streams and backfills use them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from service_setup import engine_on, eventually
from streamed import Follower, client_of, write

from broker_io.memory import MemoryBroker
from broker_io.position import Position
from txnbuffer import ResumeToken
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.mutations.index import SnapshotIndex
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.streams.streams import TICK
from txnbuffer.streams.client import ClientConfig


def bounds_of(engine: Engine, topic: str = "t") -> list[tuple[int, int]]:
    found = engine.topics.get(topic)
    assert found is not None
    assert found.followed is not None
    return [(entry.start, entry.end) for entry in SnapshotIndex(found.followed.index)]


async def test_a_clean_close_stores_the_latest_mutation_snapshots(broker: Any) -> None:
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        await Follower(client.stream("t")).until(1)
        await write(client, "t", {"b": "2", "c": "3"})
    async with engine_on(broker) as engine:
        assert bounds_of(engine) == [(2, 3)]


async def test_a_topic_with_a_durable_cursor_needs_no_stream(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txnbuffer.service.streams.streams.LINGER", 0.0)
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        await engine.cursors.add("t", "mine", 1)
        await eventually(lambda: "t" in engine.streams.feeds)
        feed = engine.streams.feeds["t"]
        await write(client, "t", {"b": "2"})
        await asyncio.sleep(3 * TICK)
        assert engine.streams.feeds["t"] is feed
        await engine.snapshots.snapshot(["t"])
        assert bounds_of(engine) == [(2, 2)]
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        assert bounds_of(engine) == [(2, 2)]
        await eventually(lambda: "t" in engine.streams.feeds)
        await write(client, "t", {"c": "3"})
        await engine.cursors.remove("t", "mine")
        await eventually(lambda: "t" not in engine.streams.feeds)
    async with engine_on(broker) as engine:
        assert bounds_of(engine) == [(2, 2), (3, 3)]


async def test_a_stream_resumes_inside_the_same_snapshot_after_a_restart(broker: Any) -> None:
    rows = {str(number): "x" for number in range(20)}
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(window_items=6))
        await write(client, "t", {"first": "1"})
        stream = client.stream("t")
        await Follower(stream).until(1)
        await write(client, "t", rows)
        batch = await stream.next(timeout=120.0)
        assert batch is not None
        token: ResumeToken = batch.token
        assert (token.snapshot_start, token.snapshot_end) == (1, 21)
        assert 1 < token.seqno < 21
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"later": "2"})
        await engine.snapshots.snapshot(["t"])  # which numbers it: all is to be read from the log
        seqnos, ends = [], set()
        async for batch in client.stream("t", from_=token, to="now"):
            seqnos += [row.seqno for row in batch]
            ends |= {batch.token.snapshot_end for _ in batch}
        assert seqnos == [*range(token.seqno + 1, 23)]
        assert ends == {21, 22}


async def test_a_backfill_begins_at_the_snapshot_of_its_seqno() -> None:
    broker = Recording()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        await Follower(client.stream("t")).until(1)
        for number in range(30):
            await write(client, "t", {str(number): "x"})
            await engine.snapshots.snapshot(["t"])
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        assert bounds_of(engine) == [(n, n) for n in range(2, 32)]
        places = {entry.start: entry.first for entry in SnapshotIndex(engine.topics.get("t").followed.index)}
        reader = Follower(client.stream("t", to="now"))
        await reader.until(1)
        for seqno in (9, 20, 28):
            low = _token_at(reader, seqno - 1)
            broker.starts.clear()
            resumed = Follower(client.stream("t", from_=low))
            await resumed.until(seqno)
            assert resumed.seqnos[0] == seqno
            assert min(broker.starts)[:2] >= places[seqno - 1][:2]


def _token_at(reader: Follower, seqno: int) -> ResumeToken:
    token = reader.stream.token
    return ResumeToken("t", token.cluster, token.incarnation, token.versions, seqno, seqno, seqno)


class Recording(MemoryBroker):
    """Remembers where readers of the topic were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[Position] = []

    def reader(self, topic: str, *rest: Any, **options: Any) -> Any:
        if topic == "t":
            self.starts.append(rest[0])
        return super().reader(topic, *rest, **options)


async def test_more_mutation_snapshots_than_a_segment_holds_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txnbuffer.mutations.index.SEGMENT_ENTRIES", 4)
    broker = MemoryBroker()
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        await Follower(client.stream("t")).until(1)
        for number in range(10):
            await write(client, "t", {str(number): "x"})
            await engine.snapshots.snapshot(["t"])
    with broker.reader("__txnbuffer_snapshots", Position(-1, -1)) as reader:
        keys = [key for placed in iter(lambda: reader.read(), None) for key in placed.messages.keys.to_list()]
    assert sorted(key for key in keys if key.startswith(b"t-m")) == [b"t-m1", b"t-m2"]
    async with engine_on(broker) as engine:
        assert bounds_of(engine) == [(n, n) for n in range(2, 12)]
