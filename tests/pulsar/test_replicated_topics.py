"""Topics that are replicated to another cluster are rejected by name, before they are written to and later.

The other cluster is an entry in the list of clusters without a real cluster: only the policy matters. Where replicated
messages matter, the entry names the cluster itself: a replicated message is then in its topic twice.
"""

from __future__ import annotations

import contextlib
import logging
import time
import urllib.error
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import UnsafePolicy
from broker_io.port import Broker
from broker_io.position import EARLIEST
from broker_io.standalone import ask
from broker_io.testing.contract.base import WAIT_SECONDS, eventually
from txnbuffer import SyncClient, connect
from txnbuffer.errors import Error, RegistrationRefused

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def clusters(cluster: Cluster) -> Iterator[list[str]]:
    """The names of the cluster and of another one."""
    (own,) = (name for name in ask(cluster.admin, "clusters") if not name.startswith(("other-", "global")))
    other = f"other-{uuid.uuid4().hex[:8]}"
    nowhere = {"serviceUrl": "http://127.0.0.1:9", "brokerServiceUrl": "pulsar://127.0.0.1:9"}
    ask(cluster.admin, f"clusters/{other}", "PUT", nowhere)
    yield [own, other]
    with contextlib.suppress(urllib.error.HTTPError):
        ask(cluster.admin, f"clusters/{other}", "DELETE")


@pytest.fixture
def shared_namespace(cluster: Cluster, clusters: list[str]) -> Iterator[str]:
    """A namespace that may be replicated and is not yet."""
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    ask(cluster.admin, f"tenants/{tenant}", "PUT", {"allowedClusters": clusters, "adminRoles": []})
    name = f"{tenant}/shop"
    ask(cluster.admin, f"namespaces/{name}", "PUT", {"replication_clusters": clusters[:1]})
    yield name
    cluster.drop(name)
    with contextlib.suppress(OSError):
        ask(cluster.admin, f"tenants/{tenant}?force=true", "DELETE")


def replicate(cluster: Cluster, place: str, clusters: list[str]) -> None:
    ask(cluster.admin, f"{place}/replication", "POST", clusters)
    eventually(lambda: sorted(ask(cluster.admin, f"{place}/replication") or ()) == sorted(clusters))


def commit(client: SyncClient, topic: str) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"1")
        txn.commit(wait_visible=True)


def test_replication_is_rejected_by_name_and_reported_later(
    cluster: Cluster, shared_namespace: str, clusters: list[str]
) -> None:
    namespace = shared_namespace
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    replicated = f"replicated to {', '.join(sorted(clusters))}, .*"
    refused = replicated + f"topics set-replication-clusters persistent://{namespace}/stock --clusters ONE"
    with (
        ServiceProcess(address, "--admin-url", cluster.admin, "--set", "retention.check_seconds=0.2") as service,
        connect(address, broker_options=options) as client,
    ):
        commit(client, "orders")
        ask(cluster.admin, f"persistent/{namespace}/stock", "PUT", {})
        replicate(cluster, f"persistent/{namespace}/stock", clusters)
        with pytest.raises(Error, match=refused):
            commit(client, "stock")
        with pytest.raises(Error, match=refused):
            client.send("stock", b"1")
        replicate(cluster, f"persistent/{namespace}/stock", clusters[:1])  # the remedy of the error
        eventually(lambda: commits(client, "stock"))
        replicate(cluster, f"persistent/{namespace}/orders", clusters)

        def told() -> bool:
            problems = [event for event in service.events if event["event"] == "problem"]
            return any(
                event["what"] == "policies of orders" and "replicated to" in event["error"] for event in problems
            )

        eventually(told)
        commit(client, "orders")  # this topic is not replicated
        replicate(cluster, f"namespaces/{namespace}", clusters)
        whole = f"{replicated}namespaces set-clusters {namespace} --clusters ONE"
        with pytest.raises(RegistrationRefused, match=whole):
            commit(client, "later")
    with open_broker(address, **options) as broker, pytest.raises(UnsafePolicy, match=whole):
        broker.create_topic("__txnbuffer_other")  # as the internal topic of another service


def commits(client: SyncClient, topic: str) -> bool:
    try:
        commit(client, topic)
    except Error:
        return False
    return True


def test_written_messages_are_not_replicated(cluster: Cluster, shared_namespace: str, clusters: list[str]) -> None:
    """Services and readers there would apply the markers and the internal topics as their own."""
    itself = {"serviceUrl": cluster.admin, "brokerServiceUrl": cluster.url}
    ask(cluster.admin, f"clusters/{clusters[1]}", "POST", itself)
    with (
        open_broker(f"{cluster.url}/{shared_namespace}", admin_url=cluster.admin) as broker,
        other_program(cluster, f"persistent://{shared_namespace}/orders") as foreign,
    ):
        broker.create_topic("orders")
        with broker.writer("orders") as writer, broker.writer("orders", unbatched=True) as alone:
            replicate(cluster, f"persistent/{shared_namespace}/orders", clusters)
            foreign.is_replicated(broker)
            writer.append(numbered(0, 1)).result()
            for future in [writer.append(numbered(first, 10)) for first in range(1, 201, 10)]:
                future.result()
            alone.append(numbered(201, 3)).result()
        foreign.is_replicated(broker)  # replication is in order, so all earlier messages were replicated too
        found = Counter(value for value in log(broker) if value.isdigit())
        replicate(cluster, f"persistent/{shared_namespace}/orders", clusters[:1])
    assert found == {b"%d" % number: 1 for number in range(204)}


def numbered(first: int, count: int) -> Batch:
    return Batch.of([Message(value=b"%d" % number) for number in range(first, first + count)])


def log(broker: Broker) -> list[bytes]:
    """All values of the topic now."""
    end = broker.last_position("orders")
    found: list[bytes] = []
    at, deadline = EARLIEST, time.monotonic() + WAIT_SECONDS
    with broker.reader("orders") as reader:
        while end is not None and at < end:
            assert time.monotonic() < deadline
            placed = reader.read(timeout=1.0)
            if placed is not None:
                at = placed.positions.last
                found += [value for value in placed.messages.values.to_list() if value is not None]
    return found


class OtherProgram:
    """Writes to a topic as a plain producer."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._sent = 0

    def is_replicated(self, broker: Broker) -> None:
        """Write messages until one of them arrives by replication."""
        sent: list[bytes] = []

        def again() -> bool:
            self._sent += 1
            sent.append(b"foreign %d" % self._sent)
            self._producer.send(sent[-1])
            found = Counter(log(broker))
            return any(found[value] == 2 for value in sent)

        eventually(again)


@contextlib.contextmanager
def other_program(cluster: Cluster, topic: str) -> Iterator[OtherProgram]:
    client = pulsar.Client(cluster.url, logger=logging.getLogger("pulsar"))
    try:
        yield OtherProgram(client.create_producer(topic))
    finally:
        client.close()
