"""The order of output: answers first, then markers, which no client waits for."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from broker_io.batch import Batch, Message
from broker_io.errors import Error
from broker_io.position import Positions
from broker_io.waits import Waker
from txnbuffer.service.cluster.cluster import SharedTopic
from txnbuffer.service.topics.appends import AppendPart, ServiceTopic, TopicAppends


class Writing:
    """Records each append under a name, and acknowledges none."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name = name
        self._order = order

    def append(self, batch: Batch) -> Future[Positions]:
        self._order.append(self._name)
        return Future()


class Broken(Writing):
    def append(self, batch: Batch) -> Future[Positions]:
        raise ZeroDivisionError


UNUSED: Any = None


def opened(topic: ServiceTopic, writer: Writing) -> ServiceTopic:
    topic.writer, topic.held = writer, False  # type: ignore[assignment]  # all of a writer that is used here
    return topic


def part() -> AppendPart:
    return AppendPart(Batch.of([Message(b"k", b"v")]), 0, lambda: None, lambda error: None)


async def test_answers_of_a_turn_go_out_before_its_markers() -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    appends = TopicAppends(loop, lambda: None, Waker(loop, lambda: None))
    appends.add(opened(SharedTopic("t", UNUSED, UNUSED, UNUSED), Writing("marker", order)), part())
    appends.add(opened(ServiceTopic("decisions"), Writing("decision", order)), part())
    loop.call_soon(order.append, "answer")
    appends.flush()
    assert not appends.idle
    assert order == ["decision"]
    await asyncio.sleep(0)
    assert order == ["decision", "answer", "marker"]


async def test_a_marker_that_is_still_to_go_out_keeps_appends_busy() -> None:
    loop = asyncio.get_running_loop()
    appends = TopicAppends(loop, lambda: None, Waker(loop, lambda: None))
    appends.add(opened(SharedTopic("t", UNUSED, UNUSED, UNUSED), Writing("marker", [])), part())
    appends.flush()
    assert not appends.idle


async def test_what_breaks_while_markers_go_out_ends_the_owner() -> None:
    turns: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    appends = TopicAppends(loop, lambda: turns.append("turn"), Waker(loop, lambda: None))
    appends.add(opened(SharedTopic("t", UNUSED, UNUSED, UNUSED), Broken("marker", [])), part())
    appends.flush()
    await asyncio.sleep(0)
    assert isinstance(appends.failure, Error)
    assert turns == ["turn"]
