"""Cutting a log into ranges: nothing is left out or doubled, and no range is larger than need be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.position import Position
from txnbuffer.pipeline.ranges import Cut, Extent, RangeAnchor, RecordRange, behind, carried, packed

TOPIC = "orders"


@st.composite
def logs(draw: st.DrawFn) -> list[Extent]:
    entries = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    return [Extent(3 + 2 * index, count, count * draw(st.integers(1, 50))) for index, count in enumerate(entries)]


def positions(log: list[Extent]) -> list[Position]:
    """Of all messages."""
    return [Position(extent.ledger, entry) for extent in log for entry in range(extent.entries)]


def covered(ranges: list[RecordRange], log: list[Extent]) -> list[Position]:
    return [position for one in ranges for position in positions(log) if one.first <= position < one.stop]


@settings(max_examples=300)
@given(log=logs(), target=st.integers(1, 2000), data=st.data())
def test_ranges_hold_every_message_once_and_are_no_larger_than_asked_for(
    log: list[Extent], target: int, data: st.DataObject
) -> None:
    places = [Position(extent.ledger, entry) for extent in log for entry in range(extent.entries + 2)]
    first, stop = sorted([data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))])
    ranges = Cut(numbered=False, target_bytes=target).ranges(TOPIC, log, (), first, stop)
    assert covered(ranges, log) == [position for position in positions(log) if first <= position < stop]
    sizes = {extent.ledger: extent.bytes // max(extent.entries, 1) for extent in log}
    for one in ranges:
        held = covered([one], log)
        # The estimate of a range is off by a message at each of its ends.
        assert len(held) <= 1 or sum(sizes[position.ledger] for position in held[2:]) <= target
    # Two neighbours that fit into one range would be one.
    assert all(a.bytes + b.bytes > target - 100 for a, b in pairwise(ranges)) or len(ranges) <= 1


@settings(max_examples=300)
@given(log=logs(), target=st.integers(1, 2000), data=st.data())
def test_numbered_ranges_begin_at_anchors(log: list[Extent], target: int, data: st.DataObject) -> None:
    places = [Position(extent.ledger, entry) for extent in log for entry in range(extent.entries + 1)]
    first, stop = sorted([data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))])
    chosen = sorted(data.draw(st.sets(st.sampled_from(places))))
    anchors = [RangeAnchor(position, 1 + len([p for p in positions(log) if p < position])) for position in chosen]
    ranges = Cut(numbered=True, target_bytes=target).ranges(TOPIC, log, anchors, first, stop)
    assert covered(ranges, log) == [position for position in positions(log) if first <= position < stop]
    usable = [anchor for anchor in anchors if anchor.position < stop]
    for one in ranges:
        below = [anchor for anchor in usable if anchor.position <= one.first]
        assert (one.begin, one.seqno) == (below[-1] if below else (one.first, None))
        assert not usable or one is ranges[0] or one.begin == one.first


def test_a_range_ends_with_its_ledger_not_where_the_next_one_begins() -> None:
    log = [Extent(1, 10, 100), Extent(4, 10, 100)]
    first, second = Cut(numbered=False, target_bytes=100).ranges(TOPIC, log, (), Position(1, 0), Position(4, 10))
    assert (first.stop, second.first) == (Position(1, 10), Position(4, 0))


def test_a_place_inside_a_record_set_belongs_to_its_message() -> None:
    log = [Extent(1, 3, 30)]
    (one,) = Cut(numbered=False, target_bytes=100).ranges(TOPIC, log, (), Position(1, 1, 2), Position(1, 1, 4))
    assert (one.begin, one.first, one.stop) == (Position(1, 1), Position(1, 1, 2), Position(1, 1, 4))


def test_a_range_may_end_inside_the_first_message_of_a_ledger() -> None:
    cut, stop = Cut(numbered=False, target_bytes=10**6), Position(3, 0, 1)
    (one,) = cut.ranges(TOPIC, [Extent(1, 4, 40), Extent(3, 4, 40)], [], Position(1, 0), stop)
    assert one.stop == stop
    (one,) = cut.ranges(TOPIC, [Extent(1, 4, 40), Extent(3, 4, 40)], [], Position(1, 0), Position(3, 0))
    assert one.stop == Position(1, 4)


def test_only_the_last_range_knows_the_last_record() -> None:
    log = [Extent(1, 10, 100)]
    last = Position(1, 9, 3)
    ranges = Cut(numbered=False, target_bytes=40).ranges(TOPIC, log, (), Position(1, 0), behind(last), last)
    assert [one.last for one in ranges] == [None, None, last]


@given(log=logs(), data=st.data())
def test_a_place_that_is_carried_on_has_the_same_messages_behind_it(log: list[Extent], data: st.DataObject) -> None:
    at = data.draw(st.sampled_from([Position(extent.ledger, entry) for extent in log for entry in range(32)]))
    there = carried(log, at)
    assert [place for place in positions(log) if place >= there] == [place for place in positions(log) if place >= at]
    assert there >= at
    assert all(there.entry < extent.entries for extent in log[:-1] if extent.ledger == there.ledger)


@given(sizes=st.lists(st.integers(0, 100)), target=st.integers(1, 150))
def test_tasks_are_filled_in_order(sizes: list[int], target: int) -> None:
    place = Position(1, 0)
    ranges = [RecordRange(str(index), place, place, place, None, None, size) for index, size in enumerate(sizes)]
    tasks = packed(ranges, target)
    assert [one for task in tasks for one in task] == ranges
    assert all(len(task) == 1 or sum(one.bytes for one in task) <= target for task in tasks)
    assert all(sum(one.bytes for one in a) + b[0].bytes > target for a, b in pairwise(tasks))
