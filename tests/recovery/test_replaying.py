"""Recovering topics concurrently has the same result as one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from snapshot_driver import abort_some, assert_true, manager_on
from writing import TopicWriter

from broker_io.memory import MemoryBroker

Result = TypeVar("Result")
TOPICS = ["a", "b", "c", "d"]
SECONDS = 120.0


def broken(broker: MemoryBroker) -> str:
    """Four topics with aborts; the third was re-created since its last snapshot, unknown to the owner."""
    with manager_on(broker) as owner:
        for topic in TOPICS:
            owner.register(topic)
            abort_some(TopicWriter(broker, topic), 1, 2, 3, 4)
            owner.pump()
            owner.snapshot(topic)
            abort_some(TopicWriter(broker, topic), 5, 6)
        broker.delete_topic("c")
        broker.create_topic("c")
    return "c"


def test_all_topics_are_read_before_the_first_is_waited_for() -> None:
    """With as many threads as topics, each waits for all the others."""
    broker = MemoryBroker()
    gone = broken(broker)
    together = threading.Barrier(len(TOPICS))

    with ThreadPoolExecutor(len(TOPICS)) as pool:

        def each(function: Callable[[str], Result], topics: Iterable[str], /) -> Iterable[Result]:
            def one(topic: str) -> Result:
                together.wait(SECONDS)
                return function(topic)

            return pool.map(one, topics)

        owner = manager_on(broker, each=each)
    alone = sorted(set(TOPICS) - {gone})
    assert owner.topics == alone
    assert owner.problems == {}
    assert len(owner.notes) == 1
    for topic in alone:
        assert_true(owner, broker, topic)
