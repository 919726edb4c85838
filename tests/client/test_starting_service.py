"""A client that connects while its service is being started."""

from __future__ import annotations

import asyncio

import pytest
from client_world import run

from broker_io.memory import MemoryBroker
from txnbuffer import ServiceUnavailable, connect
from txnbuffer.client.grpc_link import GrpcLink
from txnbuffer.service.admin import Admin
from txnbuffer.service.engine import Engine
from txnbuffer.service.grpc_server import GrpcServer


def test_a_service_that_is_being_started_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = await Engine.start(MemoryBroker())
        server = GrpcServer(engine.limits, max_clients=10)
        await server.start("127.0.0.1:0")
        address, turned_away = f"txnbuf://127.0.0.1:{server.port}", asyncio.Event()
        opening = GrpcLink.open

        async def watched(*arguments: object) -> GrpcLink:
            try:
                return await opening(*arguments)  # type: ignore[arg-type]  # as they came
            except ServiceUnavailable:
                turned_away.set()
                raise

        monkeypatch.setattr(GrpcLink, "open", watched)
        try:
            with pytest.raises(ServiceUnavailable, match="nothing is served yet"):
                await connect(address, patience=0.0).open()
            turned_away.clear()
            connecting = asyncio.ensure_future(connect(address, patience=60.0).open())
            await asyncio.wait_for(turned_away.wait(), 60.0)
            await server.serve(engine, Admin(engine))
            client = await asyncio.wait_for(connecting, 60.0)
            await client.send("t", b"x")
            await client.close()
        finally:
            await server.stop()
            await engine.stop()

    run(test())
