"""The duration of retries, and what ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from broker_io import waits
from broker_io.environment import current, use
from broker_io.errors import Closed, ServiceUnavailable, TopicNotFound
from broker_io.system import SystemRandomness
from broker_io.testing import SimulatedClock
from broker_io.waits import Backoff, RetryPolicy


class Clock(SimulatedClock):
    """A clock that advances in `sleep` and on request only."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.advance(seconds)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with use(replace(current(), clock=clock)):
        yield clock


def failing(clock: Clock, *, first: float = 0.0) -> Callable[[], None]:
    """An attempt that always fails; the first call takes `first` seconds."""
    left = [first]

    def attempt() -> None:
        clock.advance(left.pop() if left else 0.0)
        raise ServiceUnavailable("it is away")

    return attempt


def nothing() -> None: ...


def test_an_attempt_is_repeated_until_the_time_is_up(clock: Clock) -> None:
    with pytest.raises(ServiceUnavailable, match="it is away"):
        RetryPolicy(20.0, nothing)("it", failing(clock))
    assert 20.0 <= clock.monotonic() <= 20.0 + waits.LONGEST_PAUSE
    assert max(clock.pauses) <= waits.LONGEST_PAUSE
    assert clock.pauses[0] <= waits.FIRST_PAUSE


def test_pauses_are_random_parts_of_doubling_ones() -> None:
    parts: list[tuple[float, float]] = []

    class Parts(SystemRandomness):
        def uniform(self, low: float, high: float) -> float:
            parts.append((low, high))
            return high / 2

    with use(replace(current(), randomness=Parts())):
        backoff = Backoff(0.5, 3.0)
    assert [backoff.after(failures) for failures in (1, 2, 3, 4, 2000)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert parts[0] == (0.0, 0.5)


def test_without_retry_time_there_is_one_attempt(clock: Clock) -> None:
    with pytest.raises(ServiceUnavailable):
        RetryPolicy(0.0, nothing)("it", failing(clock))
    assert clock.pauses == []


@pytest.mark.parametrize("from_start", [False, True])
def test_a_long_first_attempt_counts_only_from_the_start(clock: Clock, from_start: bool) -> None:
    """A read may wait longer than a service may be unavailable; a query may not."""
    with pytest.raises(ServiceUnavailable):
        RetryPolicy(20.0, nothing, from_start=from_start)("it", failing(clock, first=30.0))
    assert bool(clock.pauses) is not from_start


def test_other_errors_end_it_at_once(clock: Clock) -> None:
    def attempt() -> None:
        raise TopicNotFound("there is no such topic")

    with pytest.raises(TopicNotFound):
        RetryPolicy(20.0, nothing)("it", attempt)
    assert clock.pauses == []


def test_retries_end_when_the_caller_closes(clock: Clock) -> None:
    def check() -> None:
        if clock.monotonic() > 5.0:
            raise Closed("closed in this process")

    with pytest.raises(Closed):
        RetryPolicy(20.0, check)("it", failing(clock))
    assert clock.monotonic() < 7.0
    clock.advance(100.0)
    with pytest.raises(Closed):  # also if no time is left
        RetryPolicy(0.0, check)("it", failing(clock))
