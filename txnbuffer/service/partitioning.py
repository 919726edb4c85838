"""Partitions of our own topics, one for each shard: made by the first service of a namespace, fixed from then on."""

from __future__ import annotations

from broker_io.port import Broker, PartitionedBroker
from snapshots.keys import SNAPSHOT_TOPIC
from snapshots.shard_count import settle, settled
from snapshots.shards import Shard
from txnbuffer.coordinator.entries import TOPIC as DECISIONS
from txnbuffer.coordinator.letters import TOPIC as LETTERS
from txnbuffer.errors import InvalidConfiguration

OURS = (DECISIONS, SNAPSHOT_TOPIC, LETTERS)

MAX_SHARDS = 256


def check_shard(shard: Shard, *, shared: bool) -> None:
    """Raises InvalidConfiguration for a shard that can't be; `shared`: beside a cluster."""
    if shard.of > 1 and not shared:
        raise InvalidConfiguration(f"this log has one shard, not {shard.of}: only a cluster has several")
    if not 1 <= shard.of <= MAX_SHARDS:
        raise InvalidConfiguration(f"{shard.of} shards: there may be 1 to {MAX_SHARDS}")
    if shard.number < 0:
        raise InvalidConfiguration(f"say which of {shard.of} shards is meant, 0 to {shard.of - 1}: give --shard")
    if shard.number >= shard.of:
        raise InvalidConfiguration(
            f"there is no shard {shard.number} of {shard.of}: they are 0 to {shard.of - 1}; give --shard"
        )


def prepare(broker: Broker, shard: Shard) -> None:
    """Make the partitions of our own topics where there are several shards; a crash may have left some unmade.

    Raises InvalidConfiguration where the namespace has another number of them, or has topics of ours that do not belong
    together: then nothing is made.
    """
    if not isinstance(broker, PartitionedBroker):
        if shard.of > 1:
            raise InvalidConfiguration(f"this log has one shard, not {shard.of}: only a cluster has several")
        return
    several = shard.of > 1
    counts = {topic: broker.partitions(topic) for topic in (OURS if several else OURS[:2])}
    known = settled(broker) if any(counts.values()) else None
    there = {*broker.topics()} if several else set()
    found = {
        topic: count if known is None or count < known else known
        for topic, count in counts.items()
        if count or topic in there
    }
    _check(shard.of, found)
    if several:
        for topic in OURS:
            if topic not in found:
                broker.partition(topic, shard.of)
                _check(shard.of, {topic: broker.partitions(topic)})  # another service may have been first
        if known is None:
            settle(broker, shard.of)


def _check(shards: int, found: dict[str, int]) -> None:
    """`found`: partitions of those that are there, 0 of one without. A service with one shard makes none."""
    wanted = shards if shards > 1 else 0
    numbers = {*found.values()}
    if numbers <= {wanted}:
        return
    if len(numbers) == 1:
        has = max(numbers.pop(), 1)
        raise InvalidConfiguration(
            f"this namespace has {has} shards, which was settled when it was first served, not {shards}: "
            f"give --shards {has}"
        )
    facts = ", ".join(f"{topic} has {count or 'no'}" for topic, count in found.items())
    raise InvalidConfiguration(
        f"topics of ours have different numbers of partitions, which no service made: {facts}; delete the one that was "
        "made by hand, with `pulsar-admin topics delete` or `delete-partitioned-topic`, if no service has written to it"
    )
