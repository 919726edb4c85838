"""Registered topics without messages, whose ledgers the cluster replaces when it loads them."""

from __future__ import annotations

import asyncio

import pytest
from pulsar_cluster import Cluster
from raw_session import OverGrpc, RawSession
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually
from txnbuffer import CommittedReader, connect

pytestmark = pytest.mark.timeout(300)


async def register(port: int, topic: str) -> None:
    link = OverGrpc(port)
    session = RawSession(link)
    await session.hello()
    await session.register(topic)
    await link.cut()


def test_empty_topic_works_after_a_reload(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with ServiceProcess(address, "--admin-url", cluster.admin) as service:
        asyncio.run(register(service.port, "orders"))
        service.terminate()
        service.finish(120.0)
    with open_broker(address, **options) as broker:
        before = broker.ledgers("orders")
        ask(cluster.admin, f"persistent/{namespace}/orders/unload", "PUT")
        eventually(lambda: broker.ledgers("orders")[-1] != before[-1])
        assert broker.ledgers("orders")[0].ledger == before[0].ledger
    with ServiceProcess(address, "--admin-url", cluster.admin) as service:
        with connect(address, broker_options=options) as client, client.transaction() as txn:
            txn.send("orders", b"first")
            txn.commit(wait_visible=True)
        assert service.event("topic stopped") is None, service.lines
    with open_broker(address, **options) as broker, CommittedReader(broker, "orders") as reader:
        batch = reader.read(timeout=60.0)
        assert batch is not None
        assert [(record.value, record.seqno) for record in batch] == [(b"first", 1)]
