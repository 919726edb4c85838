"""Counting the records of commits where others write the topics: the buffer has them once its tail has come to them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from broker_io.errors import Error
from broker_io.port import Broker
from broker_io.position import Position
from txnbuffer.service.topic import Topic

PAUSE = 0.5
"""Seconds until a broker that could not tell the end of a topic is asked again."""

Count = Callable[[Topic, "tuple[int, ...]"], None]


class Counting:
    """`count` is called for transactions once the buffer has all that was in the log when they were asked for."""

    def __init__(self, broker: Broker, run: Callable[[Coroutine[Any, Any, None]], None], count: Count) -> None:
        self._broker = broker
        self._run = run
        self._count = count
        self._asked: dict[Topic, list[int]] = {}
        self._waiting: dict[Topic, deque[tuple[Position, tuple[int, ...]]]] = {}
        self._looking: set[Topic] = set()

    def ask(self, topic: Topic, least: tuple[int, ...]) -> None:
        """Count the records of these in a topic."""
        self._asked.setdefault(topic, []).extend(least)
        if topic not in self._looking:
            self._looking.add(topic)
            self._run(self._look(topic))

    def applied(self, topic: Topic) -> None:
        """The buffer has come further."""
        waiting = self._waiting.get(topic)
        if not waiting:
            return
        at = None if topic.tail is None else topic.tail.buffer.applied
        while waiting and (topic.tail is None or (at is not None and waiting[0][0] <= at)):
            self._count(topic, waiting.popleft()[1])

    async def _look(self, topic: Topic) -> None:
        """Take the end of the topic for all that were asked for by then."""
        try:
            while asked := self._asked.pop(topic, None):
                try:
                    end = await asyncio.to_thread(self._broker.last_position, topic.name)
                except Error:
                    self._asked[topic] = [*asked, *self._asked.get(topic, ())]
                    await asyncio.sleep(PAUSE)
                    continue
                if end is None:
                    self._count(topic, tuple(asked))
                else:
                    self._waiting.setdefault(topic, deque()).append((end, tuple(asked)))
                    self.applied(topic)
        finally:
            self._looking.discard(topic)
