"""The contract for a Pulsar cluster: data topics, and compacted topics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from cluster_contract import ClusterBase
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.testing.contract import BrokerContract, DataTopicsContract


@pytest.fixture(scope="module")
def shared_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for all of these tests, each with its own topics."""
    name = cluster.namespace()
    yield name
    cluster.drop(name)


class OnCluster(ClusterBase):
    @pytest.fixture
    def broker(self, cluster: Cluster, shared_namespace: str) -> Iterator[Broker]:
        self.address = f"{cluster.url}/{shared_namespace}"
        self.admin = cluster.admin
        with self.open() as broker:
            yield broker

    def open(self) -> Broker:
        return open_broker(self.address, admin_url=self.admin, **self.options)


class TestCompactedTopics(OnCluster, BrokerContract):
    options: ClassVar = {"compacted_prefix": "contract-"}


class TestDataTopics(OnCluster, DataTopicsContract):
    pass
