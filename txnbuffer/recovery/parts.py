"""Sealed parts as entries: `T-1`, `T-2`, …, schema `part-1`.

A part holds what the buffer sealed as one: aborted transactions with the positions of their markers, and
ranges of suppressed positions, each in log order. Besides it has its topic, number, epoch, the first and
last position of its items, and the chain digest before it. It ends with the digest of all its bytes
before, which is the chain digest after it. Once an end entry names a part it is never written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from broker_io.position import Position
from snapshots.columns import MAX_LONG_BYTES, BadColumn
from snapshots.entries import checked, sealed, unsealed
from snapshots.envelope import PART, Stored
from snapshots.errors import SnapshotDamaged
from snapshots.keys import EntryKey, KeyKind
from snapshots.layout import get_column, get_position, get_positions, put_columns, put_position, put_positions
from snapshots.records import BadRecord, record
from txnbuffer.buffer.items import Items, Part

REST_BYTES = 2048
"""What an entry takes besides its items: key, properties, the topic's name, ends of columns."""
ITEM_BYTES = 6 * MAX_LONG_BYTES


def part_items(limit: int) -> int:
    """So many items fit into an entry of at most `limit` bytes, whatever they are."""
    return (limit - REST_BYTES) // ITEM_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class PartEntry:
    """One part entry; `chain_after` is empty until it was encoded."""

    topic: str
    epoch: int
    chain_before: bytes
    part: Part
    chain_after: bytes = b""


def put_items(prefix: str, items: Items) -> dict[str, Any]:
    return {
        f"{prefix}aborts": len(items.least),
        f"{prefix}ranges": len(items.firsts),
        **put_columns({f"{prefix}most": items.most, f"{prefix}least": items.least}),
        **put_positions(f"{prefix}marker", items.markers),
        **put_positions(f"{prefix}first", items.firsts),
        **put_positions(f"{prefix}last", items.lasts),
    }


def get_items(values: Mapping[str, Any], prefix: str) -> Items:
    aborts, ranges = values[f"{prefix}aborts"], values[f"{prefix}ranges"]
    return Items(
        get_column(values, f"{prefix}most", aborts),
        get_column(values, f"{prefix}least", aborts),
        get_positions(values, f"{prefix}marker", aborts),
        get_positions(values, f"{prefix}first", ranges),
        get_positions(values, f"{prefix}last", ranges),
    )


def encode_part(entry: PartEntry) -> bytes:
    """The value of a part entry; its last 16 bytes are the chain digest after it."""
    items = entry.part.items
    values = {
        "topic": entry.topic,
        "number": entry.part.number,
        "epoch": entry.epoch,
        **put_position("low", items.first),
        **put_position("high", items.last),
        "chain_before": entry.chain_before,
        **put_items("", items),
    }
    return sealed(record("part-1", __package__), values, "chain_after")


class PartPayload(NamedTuple):
    """A sealed part for the writer of snapshots."""

    part: Part

    @property
    def number(self) -> int:
        return self.part.number

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        return encode_part(PartEntry(topic, epoch, chain_before, self.part))


def _decode(data: bytes) -> tuple[PartEntry, Position | None, Position | None]:
    values = unsealed(record("part-1", __package__), data)
    try:
        items = get_items(values, "")
    except BadColumn as error:
        raise BadRecord(str(error)) from error
    part = Part(values["number"], items)
    entry = PartEntry(values["topic"], values["epoch"], values["chain_before"], part, values["chain_after"])
    return entry, get_position(values, "low"), get_position(values, "high")


def decode_part(topic: str, number: int, stored: Stored) -> PartEntry:
    """The part entry of that number. Raises SnapshotDamaged and UnsupportedSnapshot."""
    key = EntryKey(topic, KeyKind.PART, number)
    entry, low, high = checked(key, PART, stored, _decode)
    if (entry.topic, entry.part.number) != (topic, number):
        raise SnapshotDamaged(topic, str(key), f"it is part {entry.part.number} of topic {entry.topic}")
    items: Items = entry.part.items
    if not len(items) or (low, high) != (items.first, items.last) or entry.epoch != stored.epoch:
        raise SnapshotDamaged(topic, str(key), "its head and its items contradict each other")
    return entry
