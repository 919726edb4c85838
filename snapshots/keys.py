"""Keys of the snapshot topic.

A data topic T has the keys `T-1`, `T-2`, … for its sealed segments (stored as parts), `T-s1`, `T-s2`, … for the
overflow of its end entry (spills), and `T-end`; `__owner` is the owner's. The text after the last `-` tells them apart,
so the topics `a`, `a-1`, `a-s1` and `a-end` do not collide: `a-1-1` is part 1 of `a-1`.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from broker_io.errors import InvalidTopicName

INTERNAL_PREFIX = "__txnbuffer_"
"""Name prefix of internal topics."""

SNAPSHOT_TOPIC = "__txnbuffer_snapshots"

OWNER_KEY = b"__owner"
END_SUFFIX = "end"

_NUMBERED = re.compile(r"(s?)([1-9][0-9]{0,17})")


class KeyKind(enum.Enum):
    PART = "part"
    SPILL = "spill"
    END = "end"


class EntryKey(NamedTuple):
    """A key of the snapshot topic other than `__owner`. `number` is 0 for the end entry, else 1, 2, …"""

    topic: str
    kind: KeyKind
    number: int = 0

    def __str__(self) -> str:
        if self.kind is KeyKind.END:
            return f"{self.topic}-{END_SUFFIX}"
        letter = "s" if self.kind is KeyKind.SPILL else ""
        return f"{self.topic}-{letter}{self.number}"

    def to_bytes(self) -> bytes:
        return str(self).encode()

    @classmethod
    def parse(cls, key: bytes) -> EntryKey | None:
        """Parse the output of `to_bytes`; None for anything else."""
        try:
            topic, dash, suffix = key.decode().rpartition("-")
        except UnicodeDecodeError:
            return None
        if not (topic and dash):
            return None
        if suffix == END_SUFFIX:
            return cls(topic, KeyKind.END)
        match = _NUMBERED.fullmatch(suffix)
        if match is None:
            return None
        return cls(topic, KeyKind.SPILL if match[1] else KeyKind.PART, int(match[2]))


def part_key(topic: str, number: int) -> bytes:
    return EntryKey(topic, KeyKind.PART, number).to_bytes()


def spill_key(topic: str, number: int) -> bytes:
    return EntryKey(topic, KeyKind.SPILL, number).to_bytes()


def end_key(topic: str) -> bytes:
    return EntryKey(topic, KeyKind.END).to_bytes()


def is_internal(topic: str) -> bool:
    return topic.startswith(INTERNAL_PREFIX)


def check_data_topic(topic: str) -> None:
    """Raises InvalidTopicName for an internal topic."""
    if is_internal(topic):
        raise InvalidTopicName(f"topic {topic!r} is internal and has no buffer: name a data topic")
