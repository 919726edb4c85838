"""Lanes on real threads: everything is applied, in order; an error ends a run and loses nothing."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import pytest

from broker_io.environment import current
from broker_io.filelog.log.numbers import Change, Lanes, NumberedOperation, ObjectNumbers
from broker_io.filelog.pair.applying import LaneThreads

COUNTS = [1, 2, 4, 8]


class Applied:
    """Numbers that were applied, by topic; those of the manifest as topic 0. `fails` once for each of these bodies."""

    def __init__(self) -> None:
        self.numbers: defaultdict[int, list[int]] = defaultdict(list)
        self.fails: set[object] = set()
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    def apply(self, operations: Sequence[NumberedOperation]) -> None:
        with self._lock:
            for operation in operations:
                if operation.body in self.fails:
                    self.fails.discard(operation.body)
                    raise ValueError(operation.body)
            for operation in operations:
                self.threads.add(threading.get_ident())
                self.numbers[operation.topic].append(operation.number)
                if operation.manifest:
                    self.numbers[0].append(operation.manifest)


def records(count: int, topics: int) -> list[list[NumberedOperation]]:
    numbers = ObjectNumbers()
    return [
        [
            numbers.draw(Change.ROLL if (record + topic) % 7 == 0 else Change.APPEND, topic + 1, (record, topic))
            for topic in range(topics)
        ]
        for record in range(count)
    ]


@pytest.mark.parametrize("count", COUNTS)
def test_everything_is_applied_in_the_order_of_its_numbers(count: int) -> None:
    applied, lanes = Applied(), Lanes(count, ObjectNumbers(), 0)
    workers = LaneThreads(current().threads, count, "test")
    made = records(60, 5)
    for start in range(0, 60, 20):
        for record in range(start, start + 20):
            lanes.add(record + 1, made[record])
        workers.run(lanes, applied.apply)
        assert lanes.applied == start + 20
    workers.close()
    assert all(found == [*range(1, len(found) + 1)] for found in applied.numbers.values())
    assert {topic: len(applied.numbers[topic]) for topic in range(1, 6)} == dict.fromkeys(range(1, 6), 60)


@pytest.mark.parametrize("count", COUNTS)
def test_run_that_failed_continues(count: int) -> None:
    applied, lanes = Applied(), Lanes(count, ObjectNumbers(), 0)
    workers = LaneThreads(current().threads, count, "test")
    applied.fails = {(3, 1), (9, 0)}
    for lsn, record in enumerate(records(12, 3), 1):
        lanes.add(lsn, record)
    failures = 0
    while lanes.applied < 12:
        try:
            workers.run(lanes, applied.apply)
        except ValueError:
            failures += 1
    workers.close()
    assert 1 <= failures <= 2
    assert applied.fails == set()
    assert all(found == [*range(1, len(found) + 1)] for found in applied.numbers.values())


def test_two_lanes_are_two_threads() -> None:
    barrier = threading.Barrier(2, timeout=30)
    lanes = Lanes(2, ObjectNumbers(), 0)
    workers = LaneThreads(current().threads, 2, "test")
    numbers = ObjectNumbers()
    lanes.add(1, [numbers.draw(Change.APPEND, topic, None) for topic in (1, 2)])
    workers.run(lanes, lambda _: barrier.wait() and None)
    workers.close()
    assert lanes.applied == 1


def test_one_lane_has_no_thread_of_its_own() -> None:
    applied, lanes, before = Applied(), Lanes(1, ObjectNumbers(), 0), {*threading.enumerate()}
    workers = LaneThreads(current().threads, 1, "test")
    lanes.add(1, records(1, 3)[0])
    workers.run(lanes, applied.apply)
    assert {*threading.enumerate()} <= before
    assert applied.threads == {threading.get_ident()}
