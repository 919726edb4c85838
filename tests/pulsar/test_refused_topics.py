"""Rejected topics of a cluster: the error names them, nothing is created, other topics are unaffected."""

from __future__ import annotations

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import NotSupported, TopicPartitioned, UnsafePolicy
from broker_io.standalone import ask
from txnbuffer import connect
from txnbuffer.errors import RegistrationRefused, TopicNotCreated
from txnbuffer.model import Outcome


def test_a_partitioned_topic_is_refused_by_name(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "PUT", 3)
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        for open_it in (broker.create_topic, broker.writer, broker.incarnation):
            with pytest.raises(TopicPartitioned, match="'wide' is partitioned"):
                open_it("wide")


@pytest.mark.parametrize("topic", ["wide-partition-0", "__change_events", "__transaction_buffer_snapshot"])
def test_reserved_topic_is_rejected_by_name(cluster: Cluster, namespace: str, topic: str) -> None:
    with (
        open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker,
        pytest.raises(NotSupported, match=topic),
    ):
        broker.create_topic(topic)


def test_rejected_topic_has_no_subscription(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/brief", "PUT", {})
    ask(cluster.admin, f"namespaces/{namespace}/messageTTL", "POST", 3600)
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        with pytest.raises(UnsafePolicy, match="TTL"):
            broker.writer("brief")
        assert ask(cluster.admin, f"persistent/{namespace}/brief/subscriptions") == []


def test_only_the_transaction_on_a_rejected_topic_fails(cluster: Cluster, namespace: str) -> None:
    address = f"{cluster.url}/{namespace}"
    with (
        ServiceProcess(address, "--admin-url", cluster.admin),
        connect(address, broker_options={"admin_url": cluster.admin}) as client,
    ):
        with pytest.raises(RegistrationRefused, match="name of a partition"), client.transaction() as txn:
            txn.send("wide-partition-0", b"1")
        with client.transaction() as txn:
            txn.send("narrow", b"1")
        assert client.outcome(txn.id) is Outcome.COMMIT


def test_no_create_applies_to_clients_too(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    ask(cluster.admin, f"persistent/{namespace}/orders", "PUT", {})
    flags = ["--admin-url", cluster.admin, "--set", "service.create_topics=false"]
    with ServiceProcess(address, *flags), connect(address, broker_options=options) as client:
        client.send("orders", b"1")
        with client.transaction() as txn:
            txn.send("orders", b"2")
        with pytest.raises(TopicNotCreated, match="topic 'missing' does not exist, and this service"):
            client.send("missing", b"1")
        with (
            pytest.raises(RegistrationRefused, match="topic 'missing' does not exist, and this service"),
            client.transaction() as txn,
        ):
            txn.send("missing", b"1")
    assert not [name for name in ask(cluster.admin, f"persistent/{namespace}") if name.endswith("missing")]
