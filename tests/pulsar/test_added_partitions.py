"""Partitions that an operator adds to internal topics of a cluster do not count as shards."""

from __future__ import annotations

import pytest
from pulsar_cluster import Cluster

from broker_io import open_broker
from broker_io.standalone import ask
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.service.standby.takeover import INTERNAL_TOPICS, prepare


def test_number_of_shards_is_unchanged(cluster: Cluster, namespace: str) -> None:
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.partition(INTERNAL_TOPICS[0], 2)  # as after a crash
        for shard in (Shard(), Shard(0, 3)):
            with pytest.raises(InvalidConfiguration, match="has 2 shards"):
                prepare(broker, shard)
        prepare(broker, Shard(0, 2))
        for topic in INTERNAL_TOPICS:
            ask(cluster.admin, f"persistent/{namespace}/{topic}/partitions", "POST", 3)
        prepare(broker, Shard(1, 2))
        assert shards_of(broker) == 2
        with pytest.raises(InvalidConfiguration, match=r"has 2 shards, .* not 3"):
            prepare(broker, Shard(2, 3))
