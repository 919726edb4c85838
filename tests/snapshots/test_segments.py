"""Snapshots of a state without transactions: numbers, sealed in segments of a fixed size."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from broker_io.memory import MemoryBroker
from snapshots.errors import SnapshotDamaged
from snapshots.format import (
    DIGEST_BYTES,
    SEGMENT,
    EntryKey,
    Stored,
    chained,
    checked,
    decode_end,
    decode_long,
    digest,
    encode_long,
    state_bytes,
)
from snapshots.scan import TopicEntries, scan
from snapshots.writer import SnapshotWriter, acquire, commit

T = "numbers"


class Sealed(NamedTuple):
    number: int
    text: bytes

    def encode(self, topic: str, epoch: int, chain_before: bytes) -> bytes:
        body = encode_long(epoch) + chain_before + self.text
        return body + digest(topic.encode() + body)


class Entry(NamedTuple):
    epoch: int
    chain_before: bytes
    text: bytes
    chain_after: bytes


def decode(topic: str, number: int, stored: Stored) -> Entry:
    def read(data: bytes) -> Entry:
        epoch, start = decode_long(data, 0)
        text = slice(start + DIGEST_BYTES, -DIGEST_BYTES)
        return Entry(epoch, data[start : text.start], data[text], data[text.stop :])

    return checked(EntryKey(topic, SEGMENT, number), stored, read)


def restored(entries: TopicEntries) -> tuple[list[bytes], bytes]:
    assert entries.end is not None
    end = decode_end(T, entries.end)
    return [entry.text for entry in chained(T, end, entries.segments, decode)], state_bytes(T, end, entries.overflow)


def test_segments_and_state_come_back_as_they_were_written() -> None:
    with MemoryBroker() as broker:
        ownership, _ = acquire(broker)
        with ownership:
            writer = SnapshotWriter(T, "incarnation", max_entry_bytes=2048)
            for count, state in enumerate([b"short", b"long" * 1000], 1):
                writer.add([Sealed(2 * count - 1, b"odd"), Sealed(2 * count, b"even")])
                commit(ownership, [(writer, writer.plan(ownership.epoch, state))])
                assert restored(scan(broker).topics[T]) == ([b"odd", b"even"] * count, state)
            writer.drop_to(3)
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
        entries = scan(broker).topics[T]
        assert restored(entries) == ([b"odd", b"even"], b"")
        assert (sorted(entries.segments), entries.overflow) == ([3, 4], {})
        for number in (3, 4):
            rest = {other: stored for other, stored in entries.segments.items() if other != number}
            with pytest.raises(SnapshotDamaged, match="it is missing"):
                restored(TopicEntries(entries.end, segments=rest))
        swapped = {3: entries.segments[4], 4: entries.segments[3]}
        with pytest.raises(SnapshotDamaged, match="does not follow"):
            restored(TopicEntries(entries.end, segments=swapped))
