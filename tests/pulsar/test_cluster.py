"""The cluster that tests run on is there, is one for all, and can be killed where a test has its own."""

from __future__ import annotations

import os
import uuid

import pulsar
import pytest
from pulsar_cluster import WAYS, Cluster

from broker_io.testing.standalone import ask


def write_and_read(url: str, topic: str) -> bytes:
    """Write a message, and read the topic's first one."""
    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    try:
        client.create_producer(topic).send(uuid.uuid4().bytes)
        return client.create_reader(topic, pulsar.MessageId.earliest).read_next(30_000).data()
    finally:
        client.close()


def test_a_message_comes_back(cluster: Cluster, namespace: str) -> None:
    assert len(write_and_read(cluster.url, f"persistent://{namespace}/orders")) == 16
    assert ask(cluster.admin, f"persistent/{namespace}") == [f"persistent://{namespace}/orders"]


def test_the_way_that_is_required_was_taken(cluster: Cluster) -> None:
    assert cluster.way in WAYS
    assert os.environ.get("TXNBUFFER_PULSAR_REQUIRE", cluster.way) == cluster.way


def test_each_namespace_is_fresh(cluster: Cluster) -> None:
    one, other = cluster.namespace(), cluster.namespace()
    assert one != other
    cluster.drop(one)
    cluster.drop(other)


def test_a_killed_broker_comes_back_with_its_data(cluster: Cluster) -> None:
    with cluster.private_standalone() as broker:
        namespace = broker.namespace()
        forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        ask(broker.admin, f"namespaces/{namespace}/retention", "POST", forever)  # or the restart trims the message
        first = write_and_read(broker.url, f"{namespace}/orders")
        assert broker.alive
        broker.kill()
        assert not broker.alive
        with pytest.raises(OSError, match="refused"):
            ask(broker.admin, "clusters")
        broker.start()
        assert write_and_read(broker.url, f"{namespace}/orders") == first
    assert not broker.alive
