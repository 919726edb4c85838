"""Opening and registering topics in the background, while the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from broker_io.errors import DiskFailed, Error, TopicNotFound, as_error
from broker_io.port import Writer
from snapshots.errors import OwnershipLost
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.service.appends import Appends
from txnbuffer.service.topic import Topic
from txnbuffer.service.topics import Topics

QUIET = 0.001
"""Seconds between two looks whether a topic's appends have landed."""


class Registering:
    def __init__(
        self,
        coordinator: Coordinator,
        topics: Topics,
        appends: Appends,
        now: Callable[[], float],
        run: Callable[[Coroutine[Any, Any, None]], None],
        wake: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._topics = topics
        self._appends = appends
        self._now = now
        self._run = run
        self._wake = wake

    def open(self, topic: Topic) -> None:
        """Open a topic that has no transactions; what is sent to it waits meanwhile."""
        self._run(self._open(topic))

    def register(self, name: str) -> None:
        """Make a topic one with transactions, and tell the coordinator."""
        self._run(self._register(name))

    async def registered(self, name: str) -> None:
        """Make a topic one with transactions, as far as that can be: look at the topic what came of it."""
        await self._register(name)

    async def _open(self, topic: Topic) -> None:
        async with topic.lock:
            try:
                if topic.writer is None:
                    await self._topics.open(topic)
            except Exception as error:  # whatever it is, it is the topic's own
                self._give_up(topic, as_error(error))
            else:
                self._appends.release(topic)

    async def _register(self, name: str) -> None:
        try:
            topic = self._topic(name)
        except Error as error:
            self._coordinator.registration_failed(name, str(error), self._now())
            self._wake()
            return
        async with topic.lock:
            topic.held = topic.held or not topic.shared
            while topic.flights and not topic.shared:
                await asyncio.sleep(QUIET)
            try:
                await self._topics.register(topic)
            except (DiskFailed, OwnershipLost):
                raise
            except Exception as unexpected:
                failure = as_error(unexpected)
                self._coordinator.registration_failed(name, str(failure), self._now())
                if topic.writer is None:
                    self._give_up(topic, failure)
                else:
                    self._appends.release(topic)
            else:
                self._coordinator.topic_snapshotted(name, self._now())
                if topic.writer is not None:
                    self._appends.release(topic)
        self._wake()

    def _topic(self, name: str) -> Topic:
        """The entry of a topic, another one if it was deleted. Raises InvalidTopicName."""
        topic = self._topics.get(name)
        if topic is not None and isinstance(topic.problem, TopicNotFound):
            self._appends.fail(topic, topic.problem)
            if topic.writer is not None:
                self._run(self._close(topic.writer))
            topic = None
        return topic or self._topics.make(name)

    async def _close(self, writer: Writer) -> None:
        with contextlib.suppress(Error):
            await asyncio.to_thread(writer.close)

    def _give_up(self, topic: Topic, error: Error) -> None:
        self._topics.forget(topic)
        self._appends.fail(topic, error)
        self._wake()
