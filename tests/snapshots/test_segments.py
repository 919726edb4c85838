"""Snapshots of a state without transactions: numbers, sealed in segments of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from snapshot_driver import with_entries

from broker_io.memory import MemoryBroker
from broker_io.position import Position
from snapshots.errors import SnapshotDamaged, UnsupportedSnapshot
from snapshots.format import (
    CHAINS,
    DIGEST_BYTES,
    END,
    MUTATIONS,
    OVERFLOW,
    SEGMENT,
    EntryKey,
    Stored,
    chained,
    checked,
    decode_end,
    decode_long,
    digest,
    encode_long,
    no_segments,
    record,
    sealed,
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


def decode_as(kind: str) -> Callable[[str, int, Stored], Entry]:
    def read(data: bytes) -> Entry:
        epoch, start = decode_long(data, 0)
        text = slice(start + DIGEST_BYTES, -DIGEST_BYTES)
        return Entry(epoch, data[start : text.start], data[text], data[text.stop :])

    return lambda topic, number, stored: checked(EntryKey(topic, kind, number), stored, read)


def restored(entries: TopicEntries) -> tuple[list[bytes], bytes]:
    assert entries.end is not None
    end = decode_end(T, entries.end)
    texts = [entry.text for kind in CHAINS for entry in chained(T, end, kind, entries.numbered[kind], decode_as(kind))]
    return texts, state_bytes(T, end, entries.numbered[OVERFLOW])


@pytest.mark.parametrize("kind", CHAINS)
def test_segments_and_state_come_back_as_they_were_written(kind: str) -> None:
    with MemoryBroker() as broker:
        ownership, _ = acquire(broker)
        with ownership:
            writer = SnapshotWriter(T, "incarnation", max_entry_bytes=2048)
            chain = writer.chains[kind]
            for count, state in enumerate([b"short", b"long" * 1000], 1):
                chain.add([Sealed(2 * count - 1, b"odd"), Sealed(2 * count, b"even")])
                commit(ownership, [(writer, writer.plan(ownership.epoch, state))])
                assert restored(scan(broker).topics[T]) == ([b"odd", b"even"] * count, state)
            chain.drop_to(3)
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
        entries = scan(broker).topics[T]
        assert restored(entries) == ([b"odd", b"even"], b"")
        found = entries.numbered[kind]
        assert (sorted(found), entries.numbered[OVERFLOW]) == ([3, 4], {})
        for number in (3, 4):
            rest = {other: stored for other, stored in found.items() if other != number}
            with pytest.raises(SnapshotDamaged, match="it is missing"):
                restored(with_entries(entries, kind, rest))
        swapped = {3: found[4], 4: found[3]}
        with pytest.raises(SnapshotDamaged, match="does not follow"):
            restored(with_entries(entries, kind, swapped))


def test_the_chains_of_a_topic_do_not_depend_on_each_other() -> None:
    with MemoryBroker() as broker:
        ownership, _ = acquire(broker)
        with ownership:
            writer = SnapshotWriter(T, "incarnation")
            segments, mutations = (writer.chains[kind] for kind in (SEGMENT, MUTATIONS))
            segments.add([Sealed(1, b"aborts")])
            mutations.add([Sealed(1, b"bounds"), Sealed(2, b"more")])
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
            mutations.drop_to(2)
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
            entries = scan(broker).topics[T]
            assert restored(entries)[0] == [b"aborts", b"more"]
            assert entries.numbered[SEGMENT][1].value != entries.numbered[MUTATIONS][2].value
            mutations.restart(decode_end(T, entries.end).chains[MUTATIONS])
            mutations.add([Sealed(3, b"again")])
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
        entries = scan(broker).topics[T]
        assert restored(entries)[0] == [b"aborts", b"again"]
        assert [*entries.numbered[MUTATIONS]] == [3]


def test_segments_that_never_became_durable_can_be_dropped() -> None:
    with MemoryBroker() as broker:
        ownership, _ = acquire(broker)
        with ownership:
            writer = SnapshotWriter(T, "incarnation")
            chain = writer.chains[MUTATIONS]
            chain.add([Sealed(1, b"one"), Sealed(2, b"two"), Sealed(3, b"three")])
            chain.drop_to(3)
            commit(ownership, [(writer, writer.plan(ownership.epoch, b""))])
        assert restored(scan(broker).topics[T])[0] == [b"three"]


def test_an_end_entry_of_version_1_has_no_mutation_snapshots() -> None:
    start = no_segments(T, "incarnation", SEGMENT)
    values = {
        "topic": T,
        "incarnation": "incarnation",
        "epoch": 1,
        "snapshot_id": 1,
        "deleted": False,
        "first_part": 1,
        "next_part": 1,
        "chain_first": start.before,
        "chain_next": start.after,
        "next_spill": 1,
        "spills": [],
        "state": b"state",
    }
    old = Stored(Position(0, 1), "1", END, 1, sealed(record("end-1", "snapshots"), values, "digest"))
    end = decode_end(T, old)
    assert end.numbers(MUTATIONS) == range(1, 1)
    assert restored(TopicEntries(old)) == ([], b"state")
    with pytest.raises(SnapshotDamaged):
        decode_end(T, old._replace(version="2"))
    with pytest.raises(UnsupportedSnapshot):
        decode_end(T, old._replace(version="4"))
