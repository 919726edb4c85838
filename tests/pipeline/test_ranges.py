"""Splitting a log into ranges: each message is in one range, and no range is larger than necessary."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.position import Position
from txnbuffer.pipeline.ranges import LedgerSize, RangeAnchor, RangePlanner, RecordRange, after, carried, packed

TOPIC = "orders"


@st.composite
def logs(draw: st.DrawFn) -> list[LedgerSize]:
    entries = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    return [LedgerSize(3 + 2 * index, count, count * draw(st.integers(1, 50))) for index, count in enumerate(entries)]


def positions(log: list[LedgerSize]) -> list[Position]:
    """The positions of all messages."""
    return [Position(ledger.ledger, entry) for ledger in log for entry in range(ledger.entries)]


def covered(ranges: list[RecordRange], log: list[LedgerSize]) -> list[Position]:
    return [position for one in ranges for position in positions(log) if one.first <= position < one.stop]


@settings(max_examples=300)
@given(log=logs(), target=st.integers(1, 2000), data=st.data())
def test_ranges_contain_every_message_once_and_keep_the_target_size(
    log: list[LedgerSize], target: int, data: st.DataObject
) -> None:
    places = [Position(ledger.ledger, entry) for ledger in log for entry in range(ledger.entries + 2)]
    first, stop = sorted([data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))])
    ranges = RangePlanner(numbered=False, target_bytes=target).ranges(TOPIC, log, (), first, stop)
    assert covered(ranges, log) == [position for position in positions(log) if first <= position < stop]
    sizes = {ledger.ledger: ledger.bytes // max(ledger.entries, 1) for ledger in log}
    for one in ranges:
        held = covered([one], log)
        # The estimate of a range is off by a message at each of its ends.
        assert len(held) <= 1 or sum(sizes[position.ledger] for position in held[2:]) <= target
    # Two adjacent ranges that fit into one would be one.
    assert all(a.bytes + b.bytes > target - 100 for a, b in pairwise(ranges)) or len(ranges) <= 1


@settings(max_examples=300)
@given(log=logs(), target=st.integers(1, 2000), data=st.data())
def test_numbered_ranges_begin_at_anchors(log: list[LedgerSize], target: int, data: st.DataObject) -> None:
    places = [Position(ledger.ledger, entry) for ledger in log for entry in range(ledger.entries + 1)]
    first, stop = sorted([data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))])
    chosen = sorted(data.draw(st.sets(st.sampled_from(places))))
    anchors = [RangeAnchor(position, 1 + len([p for p in positions(log) if p < position])) for position in chosen]
    ranges = RangePlanner(numbered=True, target_bytes=target).ranges(TOPIC, log, anchors, first, stop)
    assert covered(ranges, log) == [position for position in positions(log) if first <= position < stop]
    usable = [anchor for anchor in anchors if anchor.position < stop]
    for one in ranges:
        below = [anchor for anchor in usable if anchor.position <= one.first]
        assert (one.begin, one.seqno) == (below[-1] if below else (one.first, None))
        assert not usable or one is ranges[0] or one.begin == one.first


def test_a_range_ends_at_the_end_of_a_ledger() -> None:
    log = [LedgerSize(1, 10, 100), LedgerSize(4, 10, 100)]
    first, second = RangePlanner(numbered=False, target_bytes=100).ranges(
        TOPIC, log, (), Position(1, 0), Position(4, 10)
    )
    assert (first.stop, second.first) == (Position(1, 10), Position(4, 0))


def test_a_position_inside_a_record_set_belongs_to_its_message() -> None:
    log = [LedgerSize(1, 3, 30)]
    (one,) = RangePlanner(numbered=False, target_bytes=100).ranges(TOPIC, log, (), Position(1, 1, 2), Position(1, 1, 4))
    assert (one.begin, one.first, one.stop) == (Position(1, 1), Position(1, 1, 2), Position(1, 1, 4))


def test_a_range_may_end_inside_the_first_message_of_a_ledger() -> None:
    planner, stop = RangePlanner(numbered=False, target_bytes=10**6), Position(3, 0, 1)
    (one,) = planner.ranges(TOPIC, [LedgerSize(1, 4, 40), LedgerSize(3, 4, 40)], [], Position(1, 0), stop)
    assert one.stop == stop
    (one,) = planner.ranges(TOPIC, [LedgerSize(1, 4, 40), LedgerSize(3, 4, 40)], [], Position(1, 0), Position(3, 0))
    assert one.stop == Position(1, 4)


def test_only_the_last_range_has_the_last_record() -> None:
    log = [LedgerSize(1, 10, 100)]
    last = Position(1, 9, 3)
    ranges = RangePlanner(numbered=False, target_bytes=40).ranges(TOPIC, log, (), Position(1, 0), after(last), last)
    assert [one.last for one in ranges] == [None, None, last]


@given(log=logs(), data=st.data())
def test_a_position_moved_to_the_next_ledger_is_equivalent(log: list[LedgerSize], data: st.DataObject) -> None:
    at = data.draw(st.sampled_from([Position(ledger.ledger, entry) for ledger in log for entry in range(32)]))
    there = carried(log, at)
    assert [place for place in positions(log) if place >= there] == [place for place in positions(log) if place >= at]
    assert there >= at
    assert all(there.entry < ledger.entries for ledger in log[:-1] if ledger.ledger == there.ledger)


@given(sizes=st.lists(st.integers(0, 100)), target=st.integers(1, 150))
def test_tasks_are_filled_in_order(sizes: list[int], target: int) -> None:
    place = Position(1, 0)
    ranges = [RecordRange(str(index), place, place, place, None, None, size) for index, size in enumerate(sizes)]
    tasks = packed(ranges, target)
    assert [one for task in tasks for one in task] == ranges
    assert all(len(task) == 1 or sum(one.bytes for one in task) <= target for task in tasks)
    assert all(sum(one.bytes for one in a) + b[0].bytes > target for a, b in pairwise(tasks))
