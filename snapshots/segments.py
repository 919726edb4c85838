"""Sealed segments: the parts of a snapshot that change no more, each written once under its number.

The content of a segment is opaque here. Its entry has the chain digest before and after it, which proves at restore
that no segment is missing, torn or of another topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

from snapshots.errors import SnapshotDamaged
from snapshots.format import SPILL, EndEntry, Stored, chain_start, digest
from snapshots.keys import EntryKey, KeyKind


class SegmentPayload(Protocol):
    """A segment to be written."""

    @property
    def number(self) -> int:
        """1, 2, 3 …"""

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        """Return the value of its entry, which ends with the chain digest after it."""


class SegmentEntry(Protocol):
    """A decoded entry of a segment."""

    @property
    def epoch(self) -> int: ...

    @property
    def chain_before(self) -> bytes: ...

    @property
    def chain_after(self) -> bytes: ...


E = TypeVar("E", bound=SegmentEntry)


def chained(
    topic: str, end: EndEntry, found: Mapping[int, Stored], decode: Callable[[str, int, Stored], E]
) -> Iterator[E]:
    """All segments that an end entry names, each checked against the ones before it. Raises SnapshotDamaged."""
    if end.first_part == 1 and end.chain_first != chain_start(topic, end.incarnation):
        raise SnapshotDamaged(topic, str(EntryKey(topic, KeyKind.END)), "its chain does not start as this topic's does")
    before, epoch = end.chain_first, 0
    for number in end.parts:
        key = str(EntryKey(topic, KeyKind.PART, number))
        stored = found.get(number)
        if stored is None:
            raise SnapshotDamaged(topic, key, f"it is missing, but the end entry names {_range(end)}")
        entry = decode(topic, number, stored)
        if entry.chain_before != before:
            raise SnapshotDamaged(topic, key, "it does not follow the part before it")
        if not epoch <= entry.epoch <= end.epoch:
            raise SnapshotDamaged(topic, key, f"its epoch {entry.epoch} is out of order")
        before, epoch = entry.chain_after, entry.epoch
        yield entry
    if before != end.chain_next:
        raise SnapshotDamaged(topic, str(EntryKey(topic, KeyKind.END)), "its chain does not end with the last part")


def _range(end: EndEntry) -> str:
    return f"{end.first_part} to {end.next_part - 1}"


def state_bytes(topic: str, end: EndEntry, found: Mapping[int, Stored]) -> bytes:
    """The state that belongs to an end entry, inline or from its spills. Raises SnapshotDamaged."""
    if not end.spills:
        return end.state
    pieces: list[bytes] = []
    for number, expected in zip(end.spill_numbers, end.spills, strict=True):
        stored = found.get(number)
        key = str(EntryKey(topic, KeyKind.SPILL, number))
        if stored is None or stored.value is None:
            raise SnapshotDamaged(topic, key, "it is missing, though the end entry names it")
        if stored.kind != SPILL or digest(stored.value) != expected:
            raise SnapshotDamaged(topic, key, "its bytes are not those that the end entry names")
        pieces.append(stored.value)
    return b"".join(pieces)
