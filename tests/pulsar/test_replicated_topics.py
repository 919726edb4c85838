"""Topics that are replicated to another cluster: refused by name, before they are written to and later.

The other cluster is an entry in the list of clusters, which nobody answers for: what counts is the policy.
"""

from __future__ import annotations

import contextlib
import urllib.error
import uuid
from collections.abc import Iterator

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io.testing.contract.base import eventually
from broker_io.testing.standalone import ask
from txnbuffer import PlainClient, connect
from txnbuffer.errors import Error

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def clusters(cluster: Cluster) -> Iterator[list[str]]:
    """The cluster's own name, and that of another one."""
    (own,) = (name for name in ask(cluster.admin, "clusters") if not name.startswith(("other-", "global")))
    other = f"other-{uuid.uuid4().hex[:8]}"
    nowhere = {"serviceUrl": "http://127.0.0.1:9", "brokerServiceUrl": "pulsar://127.0.0.1:9"}
    ask(cluster.admin, f"clusters/{other}", "PUT", nowhere)
    yield [own, other]
    with contextlib.suppress(urllib.error.HTTPError):
        ask(cluster.admin, f"clusters/{other}", "DELETE")


@pytest.fixture
def shared_namespace(cluster: Cluster, clusters: list[str]) -> Iterator[str]:
    """A namespace that may be replicated, and is not yet."""
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


def commit(client: PlainClient, topic: str) -> None:
    with client.transaction() as txn:
        txn.send(topic, b"1")
        txn.commit(wait_visible=True)


def test_replication_is_refused_by_name_before_and_told_later(
    cluster: Cluster, shared_namespace: str, clusters: list[str]
) -> None:
    namespace = shared_namespace
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    refused = rf"replicated to {', '.join(sorted(clusters))}, .*set-replication-clusters"
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
        replicate(cluster, f"persistent/{namespace}/stock", clusters[:1])  # what the error says
        eventually(lambda: commits(client, "stock"))
        replicate(cluster, f"persistent/{namespace}/orders", clusters)

        def told() -> bool:
            problems = [event for event in service.events if event["event"] == "problem"]
            return any(
                event["what"] == "policies of orders" and "replicated to" in event["error"] for event in problems
            )

        eventually(told)
        commit(client, "orders")  # here all is well: the other cluster is where it isn't
        replicate(cluster, f"namespaces/{namespace}", clusters)
        with pytest.raises(Error, match=refused):
            commit(client, "later")


def commits(client: PlainClient, topic: str) -> bool:
    try:
        commit(client, topic)
    except Error:
        return False
    return True
