"""Streams that can never return anything fail at once."""

from __future__ import annotations

import pytest
from service_setup import engine_on, eventually
from streamed import client_of, write

from broker_io.errors import InvalidTopicName, ServiceUnavailable
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer import ResumeToken
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import ClientBroken
from txnbuffer.mutations.cursor import Cursor
from txnbuffer.streams.client import ClientConfig, StreamClient


async def test_a_topic_of_the_service_itself_is_not_streamed(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        for name in (SNAPSHOT_TOPIC, DECISIONS, "__txnbuffer_none"):
            with pytest.raises(InvalidTopicName, match=f"topic '{name}' is internal: use a name that"):
                await client.stream(name).next()
        assert await client.stream("t", to="now").next() is not None


async def test_a_stream_that_is_asked_to_end_before_its_beginning_ends_at_once(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1", "b": "2"})
        client.streams = ShardStreams(client.streams.connectors, 60.0, ClientConfig(noop_interval=1e4))
        token = ResumeToken("t", seqno=2, snapshot_start=2, snapshot_end=2)
        assert await client.stream("t", from_=token, to=1).next() is None
        assert await client.stream("t", from_=token, to=1).next() is None, "nor on a connection that stands"


async def test_streams_that_wait_cost_nothing_while_another_topic_is_written(broker, monkeypatch):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "still", {"a": "1"})
        await write(client, "busy", {"a": "0"})
        waiting = [client.stream("still") for _ in range(20)]
        busy = client.stream("busy")
        for stream in (*waiting, busy):
            assert await stream.next() is not None
        asked: list[Cursor] = []
        take = Cursor.take
        monkeypatch.setattr(Cursor, "take", lambda cursor, *limits: asked.append(cursor) or take(cursor, *limits))
        for number in range(10):
            await write(client, "busy", {"a": str(number)})
            assert await busy.next() is not None
        assert 10 <= len(asked) < 5 * len(waiting), "at most once for what was sent before"
        await write(client, "still", {"a": "2"})
        for stream in waiting:
            assert await stream.next() is not None
        await eventually(lambda: all(not cursor._handed for cursor in asked))


async def test_a_stream_of_a_closed_client_is_an_error(broker):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        await write(client, "t", {"a": "1"})
        open_one, late = client.stream("t"), client.stream("t")
        assert await open_one.next() is not None
        await client.streams.close()
        assert await open_one.next() is None
        for _ in range(2):
            with pytest.raises(ServiceUnavailable, match="was closed"):
                await late.next()


async def test_a_stream_that_a_defect_ended_says_so_each_time(broker, monkeypatch):
    async with engine_on(broker) as engine, client_of(engine, broker) as client:
        stream = client.stream("t")

        def broken(*_: object) -> None:
            raise OverflowError("some defect")

        monkeypatch.setattr(StreamClient, "connected", broken)
        for _ in range(2):
            with pytest.raises(ClientBroken, match="some defect"):
                await stream.next()
