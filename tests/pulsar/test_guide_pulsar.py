"""The guide's section on clusters works on a real cluster."""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest
from pulsar_cluster import Cluster
from source_tree import ROOT

import txnbuffer
from broker_io import open_broker
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer

ADDRESS = "pulsar://localhost:6650/public/default"


def snippet() -> str:
    """The Python of the guide's section on clusters."""
    section = (ROOT / "docs" / "guide.md").read_text().partition("## On a Pulsar cluster\n")[2].partition("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_snippet_of_the_guide(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    source = snippet()
    assert source.count(ADDRESS) == 1
    monkeypatch.setattr(txnbuffer, "connect", partial(txnbuffer.connect, broker_options=options), raising=False)

    async def run() -> None:
        broker = await asyncio.to_thread(partial(open_broker, address, **options))
        server = GrpcServer(Limits(), max_clients=10)
        await server.start("127.0.0.1:0")
        engine = await Engine.start(broker, cluster_mode=True, address=f"127.0.0.1:{server.port}")
        await server.serve(engine, ServiceAdmin(engine))
        assert ServiceDiscovery(broker, namespace).newest_address() == f"127.0.0.1:{server.port}"
        code = compile(source.replace(ADDRESS, address), "guide.md", "exec")
        await asyncio.wait_for(asyncio.to_thread(exec, code, {}), 300)
        await server.stop()
        await engine.stop()
        await asyncio.to_thread(broker.close)

    asyncio.run(run())
    assert capsys.readouterr().out == "1 b'order-1' b'3 apples'\n"
