"""Change streams of a service in cluster mode on a real broker, with a kill of the service."""

from __future__ import annotations

import asyncio
import contextlib

from pulsar_cluster import Cluster
from service_process import ServiceProcess
from service_setup import on_a_loop_for
from streamed import Follower, write

from txnbuffer import connect
from txnbuffer.client.streams import ShardStreams
from txnbuffer.streams.client import ClientConfig


@on_a_loop_for(300.0)
async def test_stream_survives_its_service_on_a_real_broker(cluster: Cluster, namespace: str) -> None:
    address = f"{cluster.url}/{namespace}"
    with contextlib.ExitStack() as stack:

        async def serve() -> ServiceProcess:
            process = ServiceProcess(address, "--admin-url", cluster.admin)
            stack.callback(process.__exit__)
            return await asyncio.to_thread(process.wait_serving)

        service = await serve()
        async with connect(address, broker_options={"admin_url": cluster.admin}) as client:
            config = ClientConfig(window_items=16, first_retry=0.05, last_retry=1.0)
            client.streams = ShardStreams(client.streams.connectors, 200.0, config)
            truth: dict[bytes, bytes] = {}
            for number in range(4):
                rows = {str((number * 7 + at) % 60): f"{number}" for at in range(40)}
                await write(client, "t", rows)
                truth |= {key.encode(): value.encode() for key, value in rows.items()}
            async with client.transaction() as txn:
                await txn.send("t", b"never", key="never")
                await txn.abort()
            follower = Follower(client.stream("t"))
            while not follower.table or follower.stream.token is None or follower.stream.token.complete:
                await follower.read()
            versions = follower.stream.token.versions
            await asyncio.to_thread(service.kill)
            await serve()
            await write(client, "t", {"after": "kill"})
            truth[b"after"] = b"kill"
            await follower.until(161)
            assert follower.table == truth
            assert (follower.rollbacks, follower.seqnos) == ([], sorted(set(follower.seqnos)))
            fresh = Follower(client.stream("t", to="now"))
            await fresh.to_end()
            assert fresh.table == truth
            assert fresh.stream.token is not None
            assert fresh.stream.token.versions == versions
