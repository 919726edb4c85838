"""The contract for a Pulsar cluster: data topics, and compacted topics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.pulsar.broker import OVERHEAD_BYTES
from broker_io.testing.contract import BrokerContract
from broker_io.testing.contract.base import Base
from broker_io.testing.contract.ledgers import LedgersContract, TrimmingContract
from broker_io.testing.contract.messages import ContentsContract, FollowingContract, ReadingContract
from broker_io.testing.contract.topics import OwningContract, TopicsContract


@pytest.fixture(scope="module")
def shared_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for all of these tests, each with its own topics."""
    name = cluster.namespace()
    yield name
    cluster.drop(name)


class OnCluster(Base):
    max_message_bytes = 5 * 1024 * 1024 - OVERHEAD_BYTES
    keeps_empty_values = False
    trims_at_once = False
    destructive_compaction = True
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def broker(self, cluster: Cluster, shared_namespace: str) -> Iterator[Broker]:
        self.address = f"{cluster.url}/{shared_namespace}"
        self.admin = cluster.admin
        with self.open() as broker:
            yield broker

    def open(self) -> Broker:
        return open_broker(self.address, admin_url=self.admin, **self.options)

    def reopen(self, broker: Broker) -> Broker:
        broker.close()
        return self.open()


class TestCompactedTopics(OnCluster, BrokerContract):
    options: ClassVar = {"compacted_prefix": "contract-"}


class TestDataTopics(
    OnCluster,
    TopicsContract,
    ContentsContract,
    ReadingContract,
    FollowingContract,
    LedgersContract,
    TrimmingContract,
    OwningContract,
):
    """Data topics are batched and can't be compacted."""
