"""How much is tried after some of it took too long."""

from __future__ import annotations

from txnbuffer.client.membership import COMMIT_INTERVAL, SUCCESSES_TO_GROW, UNLIMITED, AdaptiveBatch
from txnbuffer.model import Position

AT, NEXT = Position(1, 7), Position(1, 8)


def test_fewer_are_tried_and_more_again_once_that_goes_well() -> None:
    pace = AdaptiveBatch()
    pace.too_long(AT, 100, 60.0, 1.0)
    assert (pace.seconds, pace.records) == (COMMIT_INTERVAL, 50)
    pace.too_long(AT, 50, 6.0, 1.0)
    assert (pace.seconds, pace.records) == (3.0, 25)
    for _ in range(SUCCESSES_TO_GROW):
        assert pace.records == 25
        pace.committed()
    assert (pace.seconds, pace.records) == (3.0, 50)
    for _ in range(SUCCESSES_TO_GROW * 40):
        pace.committed()
    assert pace.records == UNLIMITED


def test_a_last_record_that_took_most_of_the_time_is_alone_next() -> None:
    pace = AdaptiveBatch()
    pace.too_long(AT, 5, 61.0, 60.0)
    assert pace.records == 4
    assert pace.calls(AT) == 0


def test_calls_of_a_record_alone_are_counted() -> None:
    pace = AdaptiveBatch()
    for count in range(1, 4):
        pace.too_long(AT, 1, 60.0, 60.0)
        assert (pace.calls(AT), pace.calls(NEXT)) == (count, 0)
    pace.too_long(NEXT, 1, 60.0, 60.0)
    assert (pace.calls(AT), pace.calls(NEXT)) == (0, 1)
