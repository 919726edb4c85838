"""Shards: several services that share the topics of a namespace.

Topics that begin with `__txnbuffer_` have a partition for each shard if there is more than one. A data topic, a named
producer and a consumer group belong to shard h mod n of n: h is the first 8 bytes of the SHA-256 of the name in UTF-8,
as an unsigned number, most significant byte first. Topic names are those within the namespace, and a partition has the
name of its own, `T-partition-0`. Golden vectors pin this: under another shard a topic would have lost its state.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from broker_io.partitions import partition_name


def shard_of(name: str, shards: int) -> int:
    """The shard, out of `shards`, of a topic, a named producer or a consumer group."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % shards


class Shard(NamedTuple):
    """Shard `number` of `of`."""

    number: int = 0
    of: int = 1

    def owns(self, name: str) -> bool:
        """Whether a topic, a named producer or a consumer group belongs to this shard."""
        return self.of == 1 or shard_of(name, self.of) == self.number

    def topic(self, internal: str) -> str:
        """The name of this shard's partition of an internal topic."""
        return internal if self.of == 1 else partition_name(internal, self.number)

    def others(self) -> list[Shard]:
        return [Shard(number, self.of) for number in range(self.of) if number != self.number]


ONLY = Shard()
