"""Change streams of a service in a process of its own, which is killed in the middle of them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from service_process import ServiceProcess, kept_port
from streamed import Follower, write

from txnbuffer import ResumeToken, ServiceUnavailable, connect
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.streams.client import ClientConfig

SMALL_WINDOW = ClientConfig(window_items=16, first_retry=0.01, last_retry=0.1)


async def test_a_killed_service_continues_in_the_middle_of_a_snapshot(tmp_path):
    port = kept_port()
    service = ServiceProcess(tmp_path, port=port).wait_serving()
    try:
        async with connect(f"txnbuf://127.0.0.1:{port}") as client:
            client.streams = ShardStreams(client.streams.connectors, 60.0, SMALL_WINDOW)
            truth: dict[bytes, bytes] = {}
            for number in range(10):
                rows = {str((number * 7 + at) % 90): f"{number}" for at in range(50)}
                await write(client, "t", rows)
                truth |= {key.encode(): value.encode() for key, value in rows.items()}
            follower = Follower(client.stream("t"))
            for _ in range(2):
                while not follower.table or follower.stream.token.complete:
                    await follower.read()
                middle = follower.stream.token
                service.kill()
                service = await asyncio.to_thread(ServiceProcess(tmp_path, port=port).wait_serving)
                await write(client, "t", {"after": "kill"})
            truth[b"after"] = b"kill"
            await follower.until(502)
            assert follower.table == truth
            assert follower.rollbacks == []
            assert follower.seqnos == sorted(set(follower.seqnos))
            fresh = Follower(client.stream("t", to="now"))
            await fresh.to_end()
            assert fresh.table == truth
            assert isinstance(middle, ResumeToken)
            assert fresh.stream.token.versions[-len(middle.versions) :] == middle.versions
    finally:
        service.kill()


async def test_a_stream_without_a_service_gets_an_error_and_continues_later(tmp_path):
    port = kept_port()
    service = ServiceProcess(tmp_path, port=port).wait_serving()
    try:
        async with connect(f"txnbuf://127.0.0.1:{port}", timeout=1.0, max_unavailable=120.0) as client:
            await write(client, "t", {"a": "1"})
            client.streams = ShardStreams(client.streams.connectors, 0.0, SMALL_WINDOW)
            follower = Follower(client.stream("t"))
            await follower.until(1)
            service.kill()
            with pytest.raises(ServiceUnavailable, match="no service"):
                while True:
                    await follower.read()
            service = await asyncio.to_thread(ServiceProcess(tmp_path, port=port).wait_serving)
            client.streams.of("t")._max_unavailable = 120.0
            await write(client, "t", {"b": "2"})
            while 2 not in follower.history:
                with contextlib.suppress(ServiceUnavailable):  # it may not be connected again yet
                    await follower.until(2)
            assert follower.table == {b"a": b"1", b"b": b"2"}
    finally:
        service.kill()
