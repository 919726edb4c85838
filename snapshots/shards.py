"""How many shards a namespace has, and which partition of the snapshot topic holds the state of a topic."""

from __future__ import annotations

from broker_io.port import Broker, PartitionedBroker
from snapshots.keys import SNAPSHOT_TOPIC
from txnbuffer.shards import Shard, shard_of


def shards_of(broker: Broker) -> int:
    """How many shards share the topics of a broker; 1 also where nothing was served yet."""
    return max(broker.partitions(SNAPSHOT_TOPIC), 1) if isinstance(broker, PartitionedBroker) else 1


def snapshot_topics(broker: Broker) -> list[str]:
    """The topics that hold snapshots, by shard."""
    count = shards_of(broker)
    return [Shard(number, count).topic(SNAPSHOT_TOPIC) for number in range(count)]


def owner_of(broker: Broker, topic: str) -> Shard:
    """The shard that a data topic belongs to."""
    count = shards_of(broker)
    return Shard(shard_of(topic, count), count)


def snapshot_topic_of(broker: Broker, topic: str) -> str:
    """Where the snapshot of a data topic stands."""
    return owner_of(broker, topic).topic(SNAPSHOT_TOPIC)
