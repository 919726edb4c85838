"""Records that expired despite the subscription, as by a message TTL: service and readers report the gap."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import Error, PositionTrimmed
from broker_io.port import Broker
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually, put
from txnbuffer import CommittedReader, connect

SECONDS = 120.0


def expire(cluster: Cluster, namespace: str, broker: Broker) -> None:
    """Expire messages as a TTL does; the broker itself checks only every few minutes."""
    path = f"persistent/{namespace}/orders"
    first = broker.ledgers("orders")[0].ledger
    ask(cluster.admin, f"{path}/subscription/__txnbuffer/skip_all", "POST")
    ask(cluster.admin, f"{path}/unload", "PUT")
    with broker.writer("orders") as writer:
        put(writer, [Message(None, b"behind")])

    def gone() -> bool:
        with contextlib.suppress(OSError):  # refused while the topic is being loaded
            ask(cluster.admin, f"{path}/trim", "POST")
        return broker.ledgers("orders")[0].ledger > first

    eventually(gone)


def test_service_and_reader_report_expired_messages(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with ServiceProcess(address, "--admin-url", cluster.admin) as service:
        with connect(address, broker_options=options) as client, client.transaction() as txn:
            txn.send("orders", b"first")
            txn.commit(wait_visible=True)
        service.terminate()
        service.finish(SECONDS)
    with open_broker(address, **options) as broker:
        with CommittedReader(broker, "orders") as reader:
            batch = reader.read(timeout=SECONDS)
            assert batch is not None
            at = batch.positions.last
        with broker.writer("orders") as writer:
            writer.append(Batch.of([Message(None, b"never read")])).result(SECONDS)
        expire(cluster, namespace, broker)
        with pytest.raises(PositionTrimmed, match="was trimmed"), CommittedReader(broker, "orders", start=at) as reader:
            reader.read(timeout=SECONDS)
    with ServiceProcess(address, "--admin-url", cluster.admin) as service:
        stopped = service.event("topic stopped")
        assert stopped is not None, service.lines
        assert stopped["topic"] == "orders"
        assert "messages between may be missing" in stopped["error"]
        with pytest.raises(Error, match="messages between may be missing"):
            send(address, options)


def send(address: str, options: dict[str, Any]) -> None:
    with connect(address, broker_options=options) as client, client.transaction() as txn:
        txn.send("orders", b"more")
