"""The index of mutation snapshots against a list: nothing is forgotten before the log forgets it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations.naive_mutations import position_of

from broker_io.position import Position, Positions
from txnbuffer.mutations.index import (
    EMPTY,
    IndexColumns,
    IndexSegment,
    IndexState,
    SnapshotAnchor,
    SnapshotIndex,
    SnapshotIndexEntry,
)

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=60)


def entries_of(lengths: list[tuple[int, int]]) -> list[SnapshotIndexEntry]:
    entries = []
    start = 1
    for length, gap in lengths:
        end = start + length - 1
        entries.append(SnapshotIndexEntry(start, end, position_of(start), position_of(end), max(1, length - 1)))
        start = end + 1 + gap
    return entries


def index_of(entries: list[SnapshotIndexEntry], size: int) -> SnapshotIndex:
    index = SnapshotIndex(segment_entries=size)
    for entry in entries:
        index.add(entry)
    return index


@given(lengths, st.integers(1, 12), st.integers(0, 200), st.lists(st.integers(0, 700), min_size=1, max_size=9))
def test_it_agrees_with_a_list(lengths: list[tuple[int, int]], size: int, first_seqno: int, asked: list[int]) -> None:
    entries = entries_of(lengths)
    index = index_of(entries, size)
    assert [*index] == entries
    again = SnapshotIndex(index.state(), segment_entries=size)
    assert [*again] == entries
    again.trim(first_seqno)
    kept = [entry for entry in entries if entry.end >= first_seqno]
    assert [*again][len(again) - len(kept) :] == kept
    for seqno in asked:
        below = [entry for entry in entries if entry.start <= seqno]
        assert index.find(seqno) == (below[-1] if below else None)
        last = below[-1] if below else None
        if last is None or last.start < first_seqno:
            assert again.anchor(seqno) is None
        elif last.end <= seqno:
            assert again.anchor(seqno) == SnapshotAnchor(last.end, position_of(last.end))
        else:
            assert again.anchor(seqno) == SnapshotAnchor(last.start, position_of(last.start))


@given(lengths, st.integers(1, 12))
def test_segments_never_change_and_hold_full_runs(lengths: list[tuple[int, int]], size: int) -> None:
    index = SnapshotIndex(segment_entries=size)
    seen: dict[int, list[SnapshotIndexEntry]] = {}
    for entry in entries_of(lengths):
        index.add(entry)
        first, segments, unsealed = index.state()
        assert [segment.number for segment in segments] == [*range(first, first + len(segments))]
        assert 1 <= len(unsealed) <= size
        for segment in segments:
            assert len(segment) == size
            assert seen.setdefault(segment.number, [*segment.columns()]) == [*segment.columns()]


@given(lengths, st.integers(1, 12), st.integers(0, 200))
def test_trimming_drops_what_is_wholly_below(lengths: list[tuple[int, int]], size: int, first_seqno: int) -> None:
    index = index_of(entries_of(lengths), size)
    state = index.state()
    trimmed = state.trimmed(first_seqno)
    assert all(segment.end >= first_seqno for segment in trimmed.segments)
    gone = state.segments[: trimmed.first - state.first]
    assert all(segment.end < first_seqno for segment in gone)
    assert [*state.segments] == [*gone, *trimmed.segments]
    trimmed.check()
    index.trim(first_seqno)
    assert index.state().first == trimmed.first
    assert index.state().segments == trimmed.segments


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
    with pytest.raises(ValueError, match="is not a snapshot"):
        index.add(bad)
    assert len(index) == 1
    with pytest.raises(ValueError, match="is not a snapshot"):
        SnapshotIndex().add(SnapshotIndexEntry(0, 0, position_of(0), position_of(0), 1))


def test_states_that_contradict_themselves_are_found() -> None:
    one, two, three = (IndexColumns.of(entries_of([(2, 0)] * 3)[at : at + 1]) for at in range(3))
    IndexState(4, (IndexSegment(4, one), IndexSegment(5, two)), three).check()
    with pytest.raises(ValueError, match="segment 6 of mutation snapshots is in the place of 5"):
        IndexState(4, (IndexSegment(4, one), IndexSegment(6, two)), three).check()
    with pytest.raises(ValueError, match="segment 5 of mutation snapshots begins with 1, after 4"):
        IndexState(4, (IndexSegment(4, two), IndexSegment(5, one)), three).check()
    with pytest.raises(ValueError, match="is not a snapshot of 1 to 2 mutations after 4"):
        IndexState(4, (IndexSegment(4, one), IndexSegment(5, two)), two).check()
    EMPTY.check()


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 9), min_size=1, max_size=5))
def test_any_numbers_survive_in_a_segment(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    made = IndexColumns(columns[0], columns[1], Positions(*columns[2:5]), Positions(*columns[5:8]), columns[8])
    assert [*IndexSegment(1, made).columns()] == [*made]


def test_a_segment_is_small_in_memory() -> None:
    starts = np.arange(10**6, 10**6 + 1024 * 40, 40, dtype=np.int64)
    places = [Positions(np.full(1024, 7), starts // 10 + shift, np.full(1024, -1)) for shift in (0, 4)]
    segment = IndexSegment(1, IndexColumns(starts, starts + 39, *places, np.full(1024, 40)))
    assert segment.nbytes <= 15 * len(segment)
    assert segment.columns().row(5) == SnapshotIndexEntry(
        1_000_200, 1_000_239, Position(7, 100_020), Position(7, 100_024), 40
    )


def test_entries_follow_one_another() -> None:
    entries = entries_of([(1, 0)] * 1_000)
    index = index_of(entries, 7)
    assert all(a.end < b.start for a, b in itertools.pairwise(index))
    assert index.end == entries[-1].end
    assert SnapshotIndex().end == 0
