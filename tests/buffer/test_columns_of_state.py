"""The pieces of the buffer's state, each compared with a naive model."""

from __future__ import annotations

import numpy as np
import pytest
from histories import Log
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from broker_io.batch import Labels
from broker_io.position import Position, Positions
from txnbuffer.buffer.buffer import DAMAGE_KEPT, BufferSegments, TransactionBuffer
from txnbuffer.buffer.state import (
    AbortedSet,
    CoordinatorState,
    Damage,
    Items,
    Ongoing,
    OpenTxn,
    SuppressedRanges,
    coordinator_columns,
    coordinator_states,
)
from txnbuffer.model import MAX_LEAST, Outcome, TxnId
from txnbuffer.protocol import ABSENT, UNREADABLE, ids, used

txns = st.builds(TxnId, st.sampled_from([0, 1, MAX_LEAST]), st.one_of(st.integers(1, 50), st.integers(1, MAX_LEAST)))


def columns(some: list[TxnId]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(some, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(st.lists(st.tuples(st.booleans(), st.lists(txns, max_size=20)), max_size=6), st.lists(txns, max_size=30))
def test_the_aborted_set_is_a_set(steps: list[tuple[bool, list[TxnId]]], asked: list[TxnId]) -> None:
    aborted, plain = AbortedSet(), set()
    for adds, some in steps:
        if adds:
            aborted.update(*columns(some))
            plain |= set(some)
        else:
            aborted.discard(*columns(some))
            plain -= set(some)
    assert aborted.ids() == sorted(plain)
    assert (len(aborted), bool(aborted)) == (len(plain), bool(plain))
    assert (
        aborted.mask(*columns(asked)).tolist() == [txn in plain for txn in asked] == [txn in aborted for txn in asked]
    )


def test_invalid_ids_are_never_aborted() -> None:
    aborted = AbortedSet()
    aborted.add([TxnId(0, 1)])
    assert aborted.mask(np.array([-1, -2, 0]), np.array([-1, -2, 1])).tolist() == [False, False, True]


def test_dense_aborts_cost_less_than_four_bytes_each() -> None:
    least = np.arange(1, 1_000_001, 2)
    aborted = AbortedSet()
    aborted.update(np.zeros(len(least), np.int64), least)
    assert sum(len(bitmap.serialize()) for bitmap in aborted._bitmaps.values()) <= 4 * len(least)


@given(st.lists(st.integers(1, 40)), st.lists(st.integers(1, 40)), st.integers(0, 40))
def test_ends_above_the_mark_are_known_by_outcome(committed: list[int], aborted: list[int], mark: int) -> None:
    aborted = [least for least in aborted if least not in committed]
    state = CoordinatorState()
    state.add(set(committed), set(aborted))
    state.raise_low_water_mark(mark)
    state.raise_low_water_mark(mark - 1)
    assert state.low_water_mark == mark
    (back,) = coordinator_states(coordinator_columns({7: state})).values()
    for known in (state, back):
        for least in range(1, 45):
            assert known.has_ended(least) == (least <= mark or least in committed or least in aborted)
            expected = Outcome.COMMIT if least in committed else Outcome.ABORT if least in aborted else None
            assert known.outcome(least) == (expected if least > mark else None)


def test_ends_at_or_below_the_mark_are_not_kept() -> None:
    state = CoordinatorState(low_water_mark=10)
    state.add({3, 11}, {10, 12})
    assert (list(state.committed), list(state.aborted)) == ([11], [12])


@given(st.sets(st.integers(1, 200_000), max_size=300), st.integers(0, 100_000))
def test_equal_ended_sets_have_equal_bytes(members: set[int], mark: int) -> None:
    grown, whole = CoordinatorState(), CoordinatorState()
    grown.committed.add_range(1, 70_000)
    grown.raise_low_water_mark(mark)
    grown.committed |= BitMap64(members)
    whole.low_water_mark = mark
    whole.committed = BitMap64(sorted(grown.committed))
    assert coordinator_columns({0: grown}).committed == coordinator_columns({0: whole}).committed


@given(st.lists(st.booleans(), max_size=200))
def test_the_oldest_ongoing_is_the_first_opened(steps: list[bool]) -> None:
    ongoing, plain, number = Ongoing(), [], 0
    for opens in steps:
        if opens or not plain:
            number += 1
            txn = TxnId(0, number)
            ongoing[txn] = OpenTxn(txn, Position(1, number), None, 1, 1)
            plain.append(txn)
        else:
            gone = plain.pop(number % len(plain))
            assert ongoing.pop(gone, None) is not None
            assert ongoing.pop(gone, None) is None
        oldest = ongoing.oldest()
        assert (oldest and oldest.txn) == (plain[0] if plain else None)
        assert [entry.txn for entry in ongoing.values()] == plain
        assert len(ongoing) == len(plain)


@st.composite
def placed_ranges(draw: st.DrawFn) -> tuple[list[Position], list[tuple[Position, Position]]]:
    """Positions of records of one ledger, and disjoint ranges of them in order."""
    places: list[Position] = []
    for entry in range(draw(st.integers(1, 25))):
        size = draw(st.sampled_from([0, 0, 0, 2, 3]))
        places += [Position(4, entry * 2, index) for index in range(size)] if size else [Position(4, entry * 2)]
    cuts = sorted(draw(st.sets(st.integers(0, len(places)), max_size=10)))
    pairs = zip(cuts[0::2], cuts[1::2], strict=False)
    return places, [(places[low], places[high - 1]) for low, high in pairs]


@given(placed_ranges(), st.data())
def test_suppressed_ranges_answer_for_every_position(drawn, data) -> None:
    places, pairs = drawn
    ranges = SuppressedRanges()
    ranges.add(Position(3, 0), Position(3, 99))
    for first, last in pairs:
        ranges.add(first, first)
        ranges.extend(last)
    ranges.add(Position(5, 0), Position(5, 99))
    low = data.draw(st.integers(0, len(places) - 1))
    asked = places[low : data.draw(st.integers(low + 1, len(places)))]
    hidden = [any(first <= place <= last for first, last in pairs) for place in asked]
    assert ranges.mask(Positions.of(asked)).tolist() == hidden
    assert ranges.touch(asked[0], asked[-1]) == any(first <= asked[-1] and last >= asked[0] for first, last in pairs)
    single = [place for place in asked if place.batch == -1]
    if single:
        alone = [any(first <= place <= last for first, last in pairs) for place in single]
        assert ranges.mask(Positions.of(single)).tolist() == alone
    entry = asked[0].entry
    members = [place for place in places if place.entry == entry and place.batch >= 0]
    if members:
        expected = sum(any(first <= place <= last for first, last in pairs) for place in members)
        assert ranges.count(members[0], len(members)) == expected
    ranges.trim(5)
    assert ranges.ranges() == [(Position(5, 0), Position(5, 99))]


@given(st.integers(1, 6), st.lists(st.one_of(st.integers(1, 9), st.none()), max_size=20))
def test_segments_hold_exactly_their_size_in_log_order(size: int, steps: list[int | None]) -> None:
    parts, least, place = BufferSegments(size), 0, Position(1, 0)
    expected: list[object] = []
    for count in steps:
        before, place = Position(1, place.entry + 1), Position(1, place.entry + 2)
        if count is None:
            assert not parts.add_range(place, place, before)
            expected.append(place)
        else:
            some = [TxnId(0, least + step) for step in range(1, count + 1)]
            least += count
            parts.add_aborts(some, place)
            expected += some
    sealed = parts.take_sealed()
    assert parts.take_sealed() == []
    assert [part.number for part in sealed] == [*range(1, len(sealed) + 1)]
    assert {len(part.items) for part in sealed} <= {size}
    assert len(sealed) == max(0, -(-len(expected) // size) - 1)
    for index, items in enumerate([*(part.items for part in sealed), parts.unsealed()]):
        wanted = expected[index * size : (index + 1) * size]
        assert items.least.tolist() == [item.least for item in wanted if isinstance(item, TxnId)]
        assert [*items.firsts] == [item for item in wanted if isinstance(item, Position)]
        assert [*items.lasts] == [*items.firsts]


def test_suppressed_messages_that_follow_one_another_are_one_range() -> None:
    parts = BufferSegments(2)
    assert not parts.add_range(Position(1, 3), Position(1, 4), Position(1, 2))
    assert parts.add_range(Position(1, 7), Position(1, 8), Position(1, 4))
    assert not parts.add_range(Position(1, 10), Position(1, 10), Position(1, 9))
    assert not parts.add_range(Position(2, 0), Position(2, 0), Position(1, 10))
    assert [*parts.unsealed().firsts] == [Position(2, 0)]
    (part,) = parts.take_sealed()
    assert [*part.items.lasts] == [Position(1, 8), Position(1, 10)]
    assert (part.items.first, part.items.last, part.summary.last_ledger) == (Position(1, 3), Position(1, 10), 1)


def test_segments_that_nobody_took_are_not_trimmed() -> None:
    parts = BufferSegments(1)
    parts.add_aborts([TxnId(0, least) for least in (1, 2, 3)], Position(1, 0))
    assert parts.trim(9) == []
    parts.take_sealed()
    parts.add_aborts([TxnId(0, 4)], Position(1, 1))
    assert parts.trim(9) == [1, 2]
    parts.take_sealed()
    assert parts.trim(1) == []
    assert parts.trim(9) == [3]


def test_a_segment_of_no_items_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TransactionBuffer(segment_size=0)


def test_differences_name_the_field() -> None:
    log = Log()
    empty = TransactionBuffer().snapshot_state()
    assert empty.differences(TransactionBuffer().snapshot_state()) == []
    buffer = TransactionBuffer()
    log.record(TxnId(0, 4), 1)
    buffer.apply_batch(next(log.batches()))
    names = [line.partition(":")[0] for line in empty.differences(buffer.snapshot_state())]
    assert {"applied", "ongoing.least", "ongoing.firsts.entries"} <= set(names)


def test_damage_is_kept_up_to_a_number_and_counted_in_all() -> None:
    log = Log()
    for least in range(1, DAMAGE_KEPT + 11):
        log.end(TxnId(0, least), Outcome.COMMIT, 3)
    buffer = TransactionBuffer()
    for placed in log.batches():
        buffer.apply_batch(placed)
    assert buffer.counters.damaged == DAMAGE_KEPT + 10
    assert len(buffer.damage) == DAMAGE_KEPT
    assert buffer.damage[0] == Damage(TxnId(0, 1), Position(1, 0), 3, 0)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["0:1", "1:2", "x", "", "0:0", "0:1\n0:2", "1", f"{MAX_LEAST}:{MAX_LEAST}"]),
            st.builds(str, txns),
        ),
        max_size=8,
    )
)
def test_ids_are_parsed_by_the_column_as_one_by_one(texts: list[str]) -> None:
    most, least = ids(texts)
    assert (most[-1], least[-1]) == (ABSENT, ABSENT)
    for text, *pair in zip(texts, most[:-1].tolist(), least[:-1].tolist(), strict=True):
        try:
            assert TxnId(*pair) == TxnId.parse(text)
        except ValueError:
            assert pair == [UNREADABLE, UNREADABLE]


@given(st.lists(st.integers(-1, 30), max_size=10))
def test_used_labels_are_the_same_texts(codes: list[int]) -> None:
    labels = Labels(np.array(codes, np.int32), tuple(map(str, range(31))))
    smaller = used(labels)
    assert smaller.to_list() == labels.to_list()
    assert len(smaller.values) <= max(1, len(codes))


def test_items_know_their_first_and_last_position() -> None:
    items = Items.of([(TxnId(0, 1), Position(2, 0))], [(Position(1, 1), Position(1, 5))])
    assert (items.first, items.last, len(items)) == (Position(1, 1), Position(2, 0), 2)
