"""How long a failing attempt is repeated, and who ends that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker_io import retrying
from broker_io.errors import Closed, ServiceUnavailable, TopicNotFound
from broker_io.retrying import RetryPolicy


class Clock:
    """Time passes only in `sleep`, and where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("broker_io.retrying.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("broker_io.retrying.time.sleep", clock.sleep)
    return clock


def failing(clock: Clock, *, first: float = 0.0) -> Callable[[], None]:
    """An attempt that never succeeds; the first one takes so many seconds."""
    left = [first]

    def attempt() -> None:
        clock.now += left.pop() if left else 0.0
        raise ServiceUnavailable("it is away")

    return attempt


def nothing() -> None: ...


def test_an_attempt_is_repeated_until_the_time_is_up(clock: Clock) -> None:
    with pytest.raises(ServiceUnavailable, match="it is away"):
        RetryPolicy(20.0, nothing)("it", failing(clock))
    assert 20.0 <= clock.now - 100.0 <= 20.0 + retrying.LONGEST_PAUSE
    assert max(clock.pauses) <= retrying.LONGEST_PAUSE
    assert clock.pauses[0] <= retrying.FIRST_PAUSE


def test_without_time_there_is_one_attempt(clock: Clock) -> None:
    with pytest.raises(ServiceUnavailable):
        RetryPolicy(0.0, nothing)("it", failing(clock))
    assert clock.pauses == []


@pytest.mark.parametrize("from_start", [False, True])
def test_a_long_first_attempt_counts_only_from_the_start(clock: Clock, from_start: bool) -> None:
    """A read may wait for longer than a service may be away; a question may not."""
    with pytest.raises(ServiceUnavailable):
        RetryPolicy(20.0, nothing, from_start=from_start)("it", failing(clock, first=30.0))
    assert bool(clock.pauses) is not from_start


def test_other_errors_end_it_at_once(clock: Clock) -> None:
    def attempt() -> None:
        raise TopicNotFound("there is no such topic")

    with pytest.raises(TopicNotFound):
        RetryPolicy(20.0, nothing)("it", attempt)
    assert clock.pauses == []


def test_it_ends_once_nobody_waits(clock: Clock) -> None:
    def check() -> None:
        if clock.now > 105.0:
            raise Closed("closed in this process")

    with pytest.raises(Closed):
        RetryPolicy(20.0, check)("it", failing(clock))
    assert clock.now < 107.0
    clock.now = 200.0
    with pytest.raises(Closed):  # also where no time is left
        RetryPolicy(0.0, check)("it", failing(clock))
