"""Partitioned topics of a simulated cluster: how many partitions they have, and which one a record goes to.

Each partition is a topic of its own for services, streams and relays: a *log*. A topic without partitions is its log.
"""

from __future__ import annotations

from collections.abc import Mapping


class Partitions:
    """The topics that have partitions, with their number."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = dict(counts or {})

    def logs(self, *topics: str) -> tuple[str, ...]:
        """The logs of topics."""
        return tuple(log for topic in topics for log in self._logs(topic))

    def _logs(self, topic: str) -> list[str]:
        count = self.counts.get(topic)
        return [topic] if count is None else [f"{topic}-partition-{number}" for number in range(count)]

    def log(self, topic: str, key: bytes | None, partition: int | None = None) -> str:
        """The log of a record: that of the partition, or else that which Java clients choose for its key."""
        count = self.counts.get(topic)
        if count is None:
            return topic
        if partition is None:
            assert key is not None, "records without a key take turns"
            partition = java_hash(key.decode()) % count
        return self._logs(topic)[partition]


def java_hash(text: str) -> int:
    """The hash of a text in ASCII as Java clients have it: `String.hashCode`, without its sign."""
    value = 0
    for character in text:
        value = (31 * value + ord(character)) & 0xFFFFFFFF
    return value & 0x7FFFFFFF
