"""Topics of other shards: no buffer of ours, only markers of transactions that our clients wrote there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from broker_io.errors import Error, TopicNotFound
from broker_io.port import Broker
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.service.appends import Appends
from txnbuffer.service.marking import MarkerWriters
from txnbuffer.service.topic import Topic

IDLE = 60.0
"""Seconds after the last marker for a topic until its writer is closed: who has many topics uses few at a time."""


class Elsewhere:
    """`by_name`: those that markers were written to, or are to be. `run` runs something beside the loop's turns."""

    def __init__(
        self,
        broker: Broker,
        coordinator: Coordinator,
        appends: Appends,
        marking: MarkerWriters,
        run: Callable[[Coroutine[Any, Any, None]], None],
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.by_name: dict[str, Topic] = {}
        self._broker = broker
        self._coordinator = coordinator
        self._appends = appends
        self._marking = marking
        self._run = run
        self._now = now
        self._wake = wake
        self._stopped: set[str] = set()
        self._used: dict[str, float] = {}
        marking.opened = self.opened

    def topic(self, name: str) -> Topic:
        """The entry of a topic, to append markers to."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = Topic(name, shared=True)
        self._used[name] = self._now()
        return found

    def tick(self) -> None:
        """Forget topics that were idle for long."""
        before = self._now() - IDLE
        for name in [name for name, used in self._used.items() if used < before]:
            if name not in self.by_name or self._marking.let_go(self.by_name[name]):
                self.by_name.pop(name, None)
                del self._used[name]

    def opened(self, topic: Topic, error: Error | None) -> None:
        """What came of opening a writer: a topic that is gone needs no markers."""
        name = topic.name
        if self.by_name.get(name) is not topic:
            return
        if error is None:
            if name in self._stopped:
                self._stopped.discard(name)
                self._coordinator.topic_goes_on(name, self._now())
        elif isinstance(error, TopicNotFound):
            del self.by_name[name]
            self._appends.fail(topic, error)  # its markers come again with the next look at the time, if wanted
            self._run(self._look(name))
        elif not error.retryable and name not in self._stopped:
            self._stopped.add(name)
            self._coordinator.topic_stopped(name, error, self._now())
        self._wake()

    async def _look(self, name: str) -> None:
        try:
            there = name in await asyncio.to_thread(self._broker.topics)
        except Error:
            return  # a marker that is still wanted asks again
        if not there:
            self._coordinator.topic_deleted(name, self._now())
            self._wake()
