"""Change streams of a service in cluster mode on a real broker, with kills of the service and the broker."""

from __future__ import annotations

import asyncio
import contextlib

from service_process import ServiceProcess
from streamed import Follower, write

from broker_io import open_broker
from broker_io.standalone import Standalone
from snapshots.scan import scan
from txnbuffer import ChangeBatch, connect
from txnbuffer.client.streams.streams import ShardStreams
from txnbuffer.mutations.index import SnapshotIndex
from txnbuffer.recovery.restore import restore
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.streams.client import ClientConfig


async def test_stored_mutation_snapshots_survive_kills_of_service_and_broker(mortal: Standalone) -> None:
    """A stream that stopped inside a snapshot gets the rest of it, and the stored bounds agree with the log."""
    address, rows = f"{mortal.url}/{mortal.namespace()}", {str(number): "x" for number in range(60)}
    with contextlib.ExitStack() as stack:

        async def serve() -> ServiceProcess:
            process = ServiceProcess(address, "--admin-url", mortal.admin)
            stack.callback(process.__exit__)
            return await asyncio.to_thread(process.wait_serving)

        service = await serve()
        async with connect(address, broker_options={"admin_url": mortal.admin}) as client:
            config = ClientConfig(window_items=16, first_retry=0.05, last_retry=1.0)
            client.streams = ShardStreams(client.streams.connectors, 300.0, config)
            await write(client, "t", {"first": "1"})
            stream = client.stream("t")
            await Follower(stream).until(1)
            await write(client, "t", rows)
            complete = True
            while complete:  # what the service had read when a request came is a snapshot of its own
                batch = await stream.next(timeout=120.0)
                assert isinstance(batch, ChangeBatch)
                complete = batch.complete
            assert 1 < batch.token.seqno < batch.token.snapshot_end
            await asyncio.sleep(8.0)  # a buffer snapshot is due after 5 seconds
            mortal.kill()
            service.kill()
            await asyncio.to_thread(mortal.start)
            await serve()
            await write(client, "t", {"later": "2"})
            ends, seqnos = set(), []
            async for later in client.stream("t", from_=batch.token, to="now"):
                ends |= {later.token.snapshot_end for _ in later}
                seqnos += [row.seqno for row in later]
            assert seqnos == [*range(batch.token.seqno + 1, 63)]
            assert batch.token.snapshot_end in ends
    with open_broker(address, admin_url=mortal.admin) as broker:
        state = restore(broker, scan(broker, only="t"), "t").index.state
        assert [entry.end for entry in SnapshotIndex(state)]
        assert [one.what for one in verify(broker, "t") if one.level is Level.ERROR] == []
