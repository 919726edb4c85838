"""The number of shards of a namespace, and the partition of the snapshot topic that holds the state of a topic.

If there are several shards, `__txnbuffer_snapshots` has the annotation `shards=N` since a service first started:
partitions that are added later do not count. Without that annotation there are as many shards as partitions.
"""

from __future__ import annotations

import contextlib
import re

from broker_io.errors import Error, TopicNotFound
from broker_io.port import AnnotatedBroker, Broker, PartitionedBroker
from snapshots.format import SNAPSHOT_TOPIC
from snapshots.shards import Shard, shard_of


def shards_of(broker: Broker) -> int:
    """The number of shards that share the topics of a broker; 1 if no service has started yet."""
    partitions = broker.partitions(SNAPSHOT_TOPIC) if isinstance(broker, PartitionedBroker) else 0
    return max((recorded_shard_count(broker) if partitions else None) or partitions, 1)


def recorded_shard_count(broker: Broker) -> int | None:
    """The recorded number of shards; None if none is recorded."""
    if not isinstance(broker, AnnotatedBroker):
        return None
    try:
        found = re.fullmatch(r"shards=([1-9]\d*)", broker.annotation(SNAPSHOT_TOPIC) or "")
    except TopicNotFound:
        return None
    return None if found is None else int(found[1])


def record_shard_count(broker: Broker, shards: int) -> None:
    """Record the number of shards permanently. If that fails, the number of partitions counts."""
    if isinstance(broker, AnnotatedBroker):
        with contextlib.suppress(Error):
            broker.annotate(SNAPSHOT_TOPIC, f"shards={shards}")


def snapshot_topics(broker: Broker) -> list[str]:
    """The topics that hold snapshots, by shard."""
    count = shards_of(broker)
    return [Shard(number, count).topic(SNAPSHOT_TOPIC) for number in range(count)]


def owner_of(broker: Broker, topic: str) -> Shard:
    """The shard that a data topic belongs to."""
    count = shards_of(broker)
    return Shard(shard_of(topic, count), count)


def snapshot_topic_of(broker: Broker, topic: str) -> str:
    """The topic that holds the snapshot of a data topic."""
    return owner_of(broker, topic).topic(SNAPSHOT_TOPIC)
