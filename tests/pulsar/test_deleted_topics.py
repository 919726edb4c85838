"""Data topics that are deleted on the cluster while a service and clients have them open."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import Error, TopicPartitioned
from broker_io.partitions import partition_of
from broker_io.port import Broker
from broker_io.pulsar import cluster as pulsar_cluster
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually
from txnbuffer import CommittedReader, connect
from txnbuffer.client.path import routing

pytestmark = pytest.mark.timeout(300)


def test_later_transactions_re_create_a_deleted_topic(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin),
        connect(address, broker_options=options) as client,
    ):
        with client.transaction() as txn:
            txn.send("orders", b"old")
        ask(cluster.admin, f"persistent/{namespace}/orders?force=true", "DELETE")

        def commits(value: bytes) -> bool:
            """Whether a transaction committed; none does while the deleted topic still counts as registered."""
            try:
                with client.transaction() as txn:
                    txn.send("orders", value)
                    txn.commit(wait_visible=True)
            except Error:
                return False
            return True

        eventually(lambda: commits(b"new"))
        eventually(lambda: commits(b"newer"))
        with open_broker(address, admin_url=cluster.admin) as broker, CommittedReader(broker, "orders") as reader:
            values: list[bytes | None] = []

            def seen() -> bool:
                if (batch := reader.read(timeout=1.0)) is not None:
                    values.extend(record.value for record in batch)
                return len(values) == 2

            eventually(seen)
            assert values == [b"new", b"newer"]


def test_deleted_topic_is_re_created_with_partitions(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "REFRESH", 0.0)
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin),
        connect(address, broker_options=options) as client,
    ):
        with client.transaction() as txn:
            txn.send("orders", b"old")

        def partitioned() -> bool:
            """Re-create the topic with partitions; a client that had it open may re-create it before."""
            with suppress(urllib.error.HTTPError):
                ask(cluster.admin, f"persistent/{namespace}/orders?force=true", "DELETE")
            with suppress(urllib.error.HTTPError):
                ask(cluster.admin, f"persistent/{namespace}/orders/partitions", "PUT", 2)
                return True
            return False

        eventually(partitioned)

        def commits() -> bool:
            """Whether a transaction committed; a client that had the old topic open may re-create it for a while."""
            try:
                with client.transaction() as txn:
                    txn.send("orders", b"new")
            except Error:
                return False
            return True

        eventually(commits)
        with client.reader("orders") as reader:
            batch = reader.read(timeout=60.0)
            assert batch is not None
            assert [record.value for record in batch] == [b"new"]
            assert partition_of(batch.topic) is not None


def test_no_writer_of_a_topic_writes_to_its_later_partitions(
    cluster: Cluster, namespace: str, opening: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library would divide the messages among the partitions, each with a log of its own."""
    broker = opening()
    broker.create_topic("orders")
    opened = pulsar_cluster.Cluster.opened

    def replace_and_open(itself: Any, *arguments: Any, **options: Any) -> Any:
        ask(cluster.admin, f"persistent/{namespace}/orders?force=true", "DELETE")
        ask(cluster.admin, f"persistent/{namespace}/orders/partitions", "PUT", 2)
        return opened(itself, *arguments, **options)

    monkeypatch.setattr(pulsar_cluster.Cluster, "opened", replace_and_open)
    with pytest.raises(TopicPartitioned, match="name one of its partitions, such as 'orders-partition-0'"):
        broker.writer("orders")
