"""Distribution of a micro-batch's messages over topics."""

from __future__ import annotations

from txnbuffer.model import Position
from txnbuffer.pipeline.offsets import UnreadRange, limited
from txnbuffer.pipeline.ranges import LedgerSize


def test_a_small_topic_does_not_wait_for_the_backlog_of_another() -> None:
    """Each topic is read in each micro-batch while as much is written as is read."""
    small = {f"small{number}": Position(1, 0) for number in range(7)}
    at, size = {"big": Position(1, 0), **small}, 10_000
    for _ in range(3):
        sizes = {"big": size, **dict.fromkeys(small, 3)}
        unread = [
            UnreadRange(topic, [LedgerSize(1, count, 100 * count)], at[topic], Position(1, count))
            for topic, count in sizes.items()
        ]
        before, at = at, limited(unread, 10)
        assert sum(at[topic].entry - before[topic].entry for topic in at) == 10
        size += 10
    assert [at[topic].entry for topic in small] == [3] * 7
    few = limited([UnreadRange(topic, [LedgerSize(1, 5, 500)], Position(1, 0), Position(1, 5)) for topic in at], 2)
    assert [position.entry for position in few.values()] == [1] * 8
