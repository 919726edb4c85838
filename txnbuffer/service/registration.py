"""The topic registrar: opens and registers topics in the background."""

from __future__ import annotations

import asyncio
import contextlib

from broker_io.errors import DiskFailed, Error, InvalidTopicName, NotAuthorized, NotSupported, UnsafePolicy, as_error
from broker_io.port import Writer
from snapshots.errors import OwnershipLost, SnapshotMissing
from txnbuffer.coordinator.coordinator import Coordinator
from txnbuffer.errors import TopicNotCreated
from txnbuffer.service.appends import Appends
from txnbuffer.service.loop import Loop
from txnbuffer.service.mode import Mode
from txnbuffer.service.topic import ServiceTopic, Topics

FINAL = (InvalidTopicName, NotAuthorized, NotSupported, SnapshotMissing, TopicNotCreated, UnsafePolicy)
"""Errors that a retry can't fix: an operator has to act first."""


class TopicRegistrar:
    """Opens and registers topics."""

    def __init__(self, loop: Loop, coordinator: Coordinator, topics: Topics, appends: Appends, mode: Mode) -> None:
        self._coordinator = coordinator
        self._topics = topics
        self._appends = appends
        self._mode = mode
        self._now = loop.now
        self._run = loop.run
        self._wake = loop.wake

    def open(self, topic: ServiceTopic) -> None:
        """Open a topic that has no transactions; sends to it wait meanwhile."""
        self._run(self._open(topic))

    def register(self, name: str) -> None:
        """Start to register a topic for transactions; the coordinator is notified of the result."""
        self._run(self.register_now(name))

    async def register_now(self, name: str) -> None:
        """Register a topic for transactions; its entry then shows whether that succeeded."""
        await self._register(name)

    async def reregister(self, name: str) -> Error | None:
        """Register a missing topic again if it exists; return the error if that failed."""
        return await self._register(name, create=False)

    async def _open(self, topic: ServiceTopic) -> None:
        async with topic.lock:
            try:
                if topic.writer is None:
                    await self._topics.open(topic)
            except Exception as error:  # any error affects this topic only
                self._give_up(topic, as_error(error))
            else:
                self._appends.release(topic)

    async def _register(self, name: str, *, create: bool = True) -> Error | None:
        while True:
            missing = self._topics.get(name)
            try:
                topic = self._topic(name)
            except Error as error:
                return self._failed(name, error)
            async with topic.lock:
                if self._topics.get(name) is not topic:
                    continue  # another attempt has failed meanwhile
                await self._mode.hold(topic)
                try:
                    fresh = await self._topics.register(topic, create=create)
                except (DiskFailed, OwnershipLost):
                    raise
                except Exception as unexpected:
                    return self._not_registered(topic, missing, as_error(unexpected))
                if (obstacle := await self._mode.registered(topic, fresh=fresh)) is not None:
                    return self._failed(name, obstacle)
                self._registered(topic)
                return None

    def _registered(self, topic: ServiceTopic) -> None:
        self._coordinator.topic_snapshotted(topic.name, self._now())
        if topic.writer is not None:
            self._appends.release(topic)
        self._wake()

    def _not_registered(self, topic: ServiceTopic, missing: ServiceTopic | None, error: Error) -> Error:
        if topic.writer is None:
            self._topics.forget(topic)
            self._appends.fail(topic, error)
        else:
            self._appends.release(topic)
        if missing is not None and missing is not topic:
            self._topics.recreation_failed(missing, error)
        return self._failed(topic.name, error)

    def _failed(self, name: str, error: Error) -> Error:
        self._coordinator.registration_failed(name, str(error), self._now(), final=isinstance(error, FINAL))
        self._wake()
        return error

    def _topic(self, name: str) -> ServiceTopic:
        """The entry of a topic, a new one if the topic was missing. Raises InvalidTopicName."""
        topic = self._topics.get(name)
        if topic is not None and topic.problem is not None and topic.missing:
            self._appends.fail(topic, topic.problem)
            if topic.writer is not None:
                self._run(self._close(topic.writer))
                topic.writer = None
            topic = None
        return topic or self._topics.make(name)

    async def _close(self, writer: Writer) -> None:
        with contextlib.suppress(Error):
            await asyncio.to_thread(writer.close)

    def _give_up(self, topic: ServiceTopic, error: Error) -> None:
        self._topics.forget(topic)
        self._appends.fail(topic, error)
        self._wake()
