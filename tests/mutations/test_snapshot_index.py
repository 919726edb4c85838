"""The index of mutation snapshots: bounded, and never returning a position after the requested seqno."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_mutations import position_of

from txnbuffer.mutations.manager import SnapshotAnchor, SnapshotIndex, SnapshotIndexEntry

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=60)


def entries_of(lengths: list[tuple[int, int]]) -> list[SnapshotIndexEntry]:
    entries = []
    start = 1
    for length, gap in lengths:
        end = start + length - 1
        entries.append(SnapshotIndexEntry(start, end, position_of(start), position_of(end), max(1, length - 1)))
        start = end + 1 + gap
    return entries


@given(lengths, st.integers(2, 12), st.integers(0, 200), st.integers(0, 700))
def test_anchors_are_at_or_below_and_exact(
    lengths: list[tuple[int, int]], cap: int, first_seqno: int, asked: int
) -> None:
    index = SnapshotIndex(cap)
    entries = entries_of(lengths)
    for entry in entries:
        index.add(entry)
        assert len(index) <= cap
    kept = index.entries()
    assert sum(entry.rows for entry in kept) == sum(entry.rows for entry in entries)
    assert entries == [] or kept[-1].end == entries[-1].end
    assert all(a.end < b.start for a, b in itertools.pairwise(kept))
    again = SnapshotIndex.of(index.columns(), cap)
    assert again.entries() == kept
    index.trim(first_seqno)
    anchor = index.anchor(asked)
    known = [seqno for entry in kept if entry.start >= first_seqno for seqno in (entry.start, entry.end)]
    below = [seqno for seqno in known if seqno <= asked]
    assert anchor == (SnapshotAnchor(max(below), position_of(max(below))) if below else None)


def test_recent_entries_stay_exact() -> None:
    index = SnapshotIndex(8)
    entries = entries_of([(1, 0)] * 1_000)
    for entry in entries:
        index.add(entry)
    assert index.entries()[-4:] == entries[-4:]
    assert index.entries()[0].start == 1
    for entry in index.entries():
        assert (entry.first, entry.last) == (position_of(entry.start), position_of(entry.end))


@pytest.mark.parametrize(
    "bad",
    [
        SnapshotIndexEntry(3, 4, position_of(3), position_of(4), 2),
        SnapshotIndexEntry(5, 4, position_of(5), position_of(4), 1),
        SnapshotIndexEntry(4, 5, position_of(4), position_of(5), 3),
        SnapshotIndexEntry(4, 5, position_of(4), position_of(5), 0),
    ],
)
def test_invalid_entries_are_rejected(bad: SnapshotIndexEntry) -> None:
    index = SnapshotIndex()
    index.add(SnapshotIndexEntry(1, 3, position_of(1), position_of(3), 2))
    with pytest.raises(ValueError, match="snapshot"):
        index.add(bad)
    with pytest.raises(ValueError, match="cap must be at least 2"):
        SnapshotIndex(1)
    with pytest.raises(ValueError, match="snapshot"):
        SnapshotIndex().add(SnapshotIndexEntry(0, 0, position_of(0), position_of(0), 1))
