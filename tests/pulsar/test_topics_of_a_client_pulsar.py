"""A client that lists, waits for, only reads and deletes topics of a real cluster."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pulsar_cluster import Cluster
from reading import read_values
from service_process import ServiceProcess

from broker_io.errors import NotSupported, ReadOnly, TopicNotFound
from broker_io.partitions import partition_name
from broker_io.standalone import ask
from txnbuffer import connect
from txnbuffer.errors import TopicInUse

LONG = 60.0


def test_topics_are_listed_awaited_and_read_without_a_service(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "PUT", 3)
    address: str = f"{cluster.url}/{namespace}"
    options: Any = {"admin_url": cluster.admin}
    service = ServiceProcess(address, "--admin-url", cluster.admin)
    with service.wait_serving(), connect(address, broker_options=options) as client:
        assert client.topics() == ["wide"]
        with pytest.raises(TopicNotFound):
            client.reader("orders")

        def send() -> None:
            with client.transaction() as txn:
                txn.send_many("orders", [b"1", b"2"])
                txn.send("wide", b"3")

        timer = threading.Timer(1.0, send)
        timer.start()
        assert read_values(client, "orders", 2, wait=True) == [b"1", b"2"]
        timer.join()
        with client.transaction() as aborted:
            aborted.send("orders", b"never")
            aborted.abort()
        seen: list[Any] = []
        client.process("orders", "g", lambda txn, record: seen.append(record.value), wait=True, idle_timeout=3)
        assert seen == [b"1", b"2"]
    with connect(address, broker_options=options, read_only=True) as reading:
        assert reading.topics() == ["orders", "wide"]
        assert read_values(reading, "orders", 2) == [b"1", b"2"]
        assert read_values(reading, "wide", 1) == [b"3"]
        with reading.reader("orders") as reader:
            batch = reader.read(timeout=LONG)
            assert batch is not None
            assert reading.last_visible("orders") == batch.positions.last
        with pytest.raises(TopicNotFound, match="is partitioned"):
            reading.last_visible("wide")
        parts = [reading.last_visible(partition_name("wide", number)) for number in range(3)]
        assert sum(part is not None for part in parts) == 1
        with pytest.raises(ReadOnly):
            reading.send("orders", b"never")


def test_a_topic_is_deleted_and_its_name_is_free(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "PUT", 2)
    address: str = f"{cluster.url}/{namespace}"
    options: Any = {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options=options) as client,
    ):
        client.send("plain", b"1")
        with client.transaction() as txn:
            txn.send("orders", b"1", key=b"k")
            assert txn.id
            with pytest.raises(TopicInUse, match=f"transaction {txn.id} is open"):
                client.delete_topic("orders")
        assert read_values(client, "orders", 1) == [b"1"]
        with client.stream("orders") as stream:
            assert stream.next(timeout=LONG) is not None
            with pytest.raises(TopicInUse, match=r"a change stream of .* reads it"):
                client.delete_topic("orders")
        for _ in range(3):  # whatever is in progress
            client.delete_topic("orders")
            client.run(lambda txn: txn.send("orders", b"again"))
        client.delete_topic("orders")
        client.delete_topic("plain")
        assert client.topics() == ["wide"]
        with pytest.raises(TopicNotFound):
            client.delete_topic("orders")
        for name in ("wide", "wide-partition-0"):
            with pytest.raises(NotSupported, match="'wide' is partitioned"):
                client.delete_topic(name)

        def again(txn: Any) -> None:
            txn.send("orders", b"2")
            txn.send("plain", b"2")

        client.run(again)
        assert read_values(client, "orders", 1) == [b"2"]
        assert read_values(client, "plain", 1) == [b"2"]
