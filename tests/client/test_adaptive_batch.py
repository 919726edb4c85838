"""The batch size after slow and after successful batches."""

from __future__ import annotations

from txnbuffer.client.groups.membership import COMMIT_INTERVAL, SUCCESSES_TO_GROW, UNLIMITED, AdaptiveBatch
from txnbuffer.model import Position

AT, NEXT = Position(1, 7), Position(1, 8)


def test_batch_size_shrinks_after_slow_batches_and_grows_after_successes() -> None:
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


def test_slow_last_record_is_excluded_from_the_next_batch() -> None:
    pace = AdaptiveBatch()
    pace.too_long(AT, 5, 61.0, 60.0)
    assert pace.records == 4
    assert pace.calls(AT) == 0


def test_slow_calls_of_a_single_record_are_counted() -> None:
    pace = AdaptiveBatch()
    for count in range(1, 4):
        pace.too_long(AT, 1, 60.0, 60.0)
        assert (pace.calls(AT), pace.calls(NEXT)) == (count, 0)
    pace.too_long(NEXT, 1, 60.0, 60.0)
    assert (pace.calls(AT), pace.calls(NEXT)) == (0, 1)
