"""The waits that a process shows: the long ones, with the error of the last attempt."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from broker_io import waits
from broker_io.environment import current, use
from broker_io.errors import ServiceUnavailable
from broker_io.testing import SimulatedClock
from broker_io.waits import LongWait, RetryPolicy, Waker, long_waits, waiting


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the waits of other tests in this process."""
    monkeypatch.setattr(waits, "_waits", {})
    monkeypatch.setattr(waits, "_failed", {})


@pytest.fixture
def clock() -> Iterator[SimulatedClock]:
    clock = SimulatedClock()
    with use(replace(current(), clock=clock)):
        yield clock
        assert long_waits() == []


def test_a_wait_is_shown_once_it_has_lasted_and_until_it_is_over(clock: SimulatedClock) -> None:
    with waiting("the moon") as wait:
        assert long_waits() == []
        clock.advance(4)
        wait.failed(ServiceUnavailable("behind a cloud"))
        clock.advance(1)
        with waiting("a train"):
            clock.advance(4)
            assert long_waits() == [LongWait("the moon", 9.0, "behind a cloud"), LongWait("a train", 4.0, "")]
        assert [str(one) for one in long_waits()] == ["waiting for the moon for 9 s: behind a cloud"]


def test_failed_wait_is_logged_once(clock: SimulatedClock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="txnbuffer.waits"), waiting("the moon") as wait:
        for _ in range(10):
            clock.advance(1)
            wait.failed(ServiceUnavailable("behind a cloud"))
    assert caplog.messages == ["waiting for the moon for 4 s: behind a cloud"]


def test_paused_wait_is_not_shown(clock: SimulatedClock) -> None:
    wait = waits.begin("acknowledgements")
    clock.advance(4)
    assert len(long_waits()) == 1
    wait.resume()
    assert long_waits() == []
    wait.pause()
    clock.advance(4)
    assert long_waits() == []
    wait.resume()
    clock.advance(4)
    assert long_waits() == [LongWait("acknowledgements", 4.0, "")]
    waits.end(wait)
    waits.end(wait)


def test_retries_are_shown_as_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LONG_SECONDS", 0.0)
    seen: list[list[str]] = []

    def attempt() -> str:
        seen.append([str(wait).partition(" for 0 s")[0] for wait in long_waits()])
        if len(seen) < 3:
            raise ServiceUnavailable("it is away")
        return "here"

    assert RetryPolicy(60.0, lambda: None)("the cluster", attempt) == "here"
    assert seen == [["waiting for the cluster"]] * 3
    assert long_waits() == []


def test_next_attempt_continues_a_failed_wait(clock: SimulatedClock) -> None:
    for _ in range(3):
        with pytest.raises(ServiceUnavailable), waiting("the moon"):
            clock.advance(10)
            raise ServiceUnavailable("behind a cloud")
        clock.advance(1)
    assert long_waits() == [LongWait("the moon", 33.0, "behind a cloud")]
    with waiting("the moon"):
        assert len(long_waits()) == 1
    assert long_waits() == []
    with pytest.raises(ServiceUnavailable), waiting("the moon"):
        raise ServiceUnavailable("behind a cloud")
    clock.advance(waits.KEPT_SECONDS + 1)
    assert long_waits() == []
    with waiting("the moon"):
        assert long_waits() == []


async def test_loop_is_woken_once_for_the_events_of_other_threads() -> None:
    calls: list[int] = []
    waker = Waker(asyncio.get_running_loop(), lambda: calls.append(1))
    for number in (1, 2):
        thread = threading.Thread(target=lambda: [waker.wake() for _ in range(10)])
        thread.start()
        thread.join()  # the loop can't run meanwhile
        while len(calls) < number:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(calls) == number


def test_event_after_the_end_of_the_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    waker = Waker(loop, lambda: None)
    loop.close()
    waker.wake()
