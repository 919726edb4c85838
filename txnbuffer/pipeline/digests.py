"""Digests of records by key: equal where two tables say the same of every key, in whatever order they stand.

A record's digest is 64 bits: XXH64 over its topic (seed 42), over its key with that as the seed, over ledger, entry and
batch of its position where versions are compared (8 bytes each, little-endian), and over its value, in this order; a
key or value that is null is left out. Behind these, where they are compared, come the event time (microseconds since
1970, 8 bytes; 0: none), and the number of properties (8 bytes) with their names and texts, sorted by name. It is what
Spark's `xxhash64` makes of the same columns. Digests of many records are added, modulo 2^64; so they can be added up
in parts, by key, by range of keys, by topic.

A range of keys holds those from one cut point on, below the next, as unsigned bytes; the first one holds what has no
key as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MASK = 2**64 - 1


class Tally(NamedTuple):
    """So many keys, their records, and the sum of the digests of these."""

    keys: int = 0
    records: int = 0
    digest: int = 0

    def plus(self, other: Tally) -> Tally:
        return Tally(self.keys + other.keys, self.records + other.records, (self.digest + other.digest) & MASK)


def added(low: int, high: int) -> int:
    """The sum of digests of which the lower and the upper halves were added up."""
    return (low + (high << 32)) & MASK


def cut_points(sample: Iterable[bytes], ranges: int) -> list[bytes]:
    """Where to cut keys into at most so many ranges of about as many keys, by a sample of them."""
    keys = sorted(set(sample))
    places = [len(keys) * number // ranges for number in range(1, ranges)]
    return [keys[place] for place in dict.fromkeys(places) if place]
