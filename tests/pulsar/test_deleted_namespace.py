"""A namespace that is deleted and re-created while services and clients use it."""

from __future__ import annotations

import threading
import urllib.error
from contextlib import ExitStack, suppress

import pytest
from pulsar_cluster import Cluster
from reading import read_values
from service_process import ServiceProcess

from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually
from txnbuffer import SyncClient, connect
from txnbuffer.errors import Error, LogDeleted

pytestmark = pytest.mark.timeout(300)


def delete_namespace(cluster: Cluster, namespace: str) -> None:
    """Delete a namespace with all topics, including those re-created meanwhile."""

    def gone() -> bool:
        with suppress(urllib.error.HTTPError):
            ask(cluster.admin, f"namespaces/{namespace}?force=true", "DELETE")
        with suppress(urllib.error.HTTPError):  # a cluster may refuse both in one request
            for topic in ask(cluster.admin, f"persistent/{namespace}"):
                ask(cluster.admin, f"{topic.replace('://', '/')}?force=true", "DELETE")
            ask(cluster.admin, f"namespaces/{namespace}", "DELETE")
        return namespace not in ask(cluster.admin, "namespaces/public")

    eventually(gone)


def made_anew(cluster: Cluster, namespace: str) -> None:
    def made() -> bool:
        with suppress(urllib.error.HTTPError):
            ask(cluster.admin, f"namespaces/{namespace}", "PUT", {})
        return namespace in ask(cluster.admin, "namespaces/public")

    eventually(made)


def tell_errors(client: SyncClient, told: list[Error]) -> None:
    """Commit until a call fails; no call waits for ever."""
    while not told:
        try:
            with client.transaction() as txn:
                txn.send("orders", b"older")
        except Error as error:
            told.append(error)


def test_deletion_ends_services_and_clients_and_the_new_namespace_works(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}

    def service(*flags: str) -> ServiceProcess:
        return ServiceProcess(address, "--admin-url", cluster.admin, *flags)

    with ExitStack() as stack:
        active = stack.enter_context(service())
        standby = service("--standby")
        stack.push(standby.__exit__)
        standby.wait_event("standing by")
        older = stack.enter_context(connect(address, broker_options=options))
        with older.transaction() as txn:
            txn.send("orders", b"older")
            of_older = txn.id
        older.client.session.max_unavailable = 2.0
        told: list[Error] = []
        working = threading.Thread(target=tell_errors, args=(older, told), daemon=True)
        working.start()
        delete_namespace(cluster, namespace)
        for ended in (active, standby):
            assert ended.finish(120.0) == LogDeleted("").exit_code, "".join(ended.lines)
            assert "alone or with its namespace" in "".join(ended.lines), "".join(ended.lines)
        working.join(120.0)
        assert not working.is_alive()
        made_anew(cluster, namespace)
        with service(), connect(address, broker_options=options) as client:
            numbers = [str(number).encode() for number in range(20)]
            for number in numbers:
                with client.transaction() as txn:
                    txn.send("newer", number)
                    of_newer = txn.id
            assert of_newer > of_older
            with pytest.raises(Error), older.transaction() as txn:  # the older client has to reconnect
                txn.send("newer", b"older")
            assert read_values(client, "newer", len(numbers)) == numbers
