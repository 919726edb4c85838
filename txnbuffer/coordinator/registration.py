"""Topics with transactions: each is tailed by its owner before the first transactional record stands there."""

from __future__ import annotations

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.entries import Topic
from txnbuffer.coordinator.messages import Done, RegisterTopic
from txnbuffer.errors import RegistrationFailed, RegistrationRefused


class Registration:
    """A topic is registered when its first snapshot is durable, and then an entry of the decision log."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiters: dict[str, list[tuple[str, int]]] = {}
        self._missing: set[str] = set()
        """Topics that the decision log still has as registered."""

    def register(self, session: str, request: int, topic: str) -> None:
        core = self._core
        known = core.topics.get(topic)
        if known is not None and (known or not core.config.one_phase):
            core.answer(session, request, Done())
            return
        waiters = self._waiters.get(topic)
        if waiters is None:
            self._waiters[topic] = [(session, request)]
            core.effects.append(RegisterTopic(topic))
        else:
            waiters.append((session, request))

    def snapshotted(self, topic: str) -> None:
        one_phase = self._core.config.one_phase
        self._core.journal.put(Topic(topic, one_phase), lambda: self._durable(topic, one_phase))

    def failed(self, topic: str, why: str, *, final: bool = False) -> None:
        """`final`: asking again does not help."""
        kind = RegistrationRefused if final else RegistrationFailed
        error = kind(f"topic {topic!r} could not be registered: {why}")
        for session, request in self._waiters.pop(topic, ()):
            self._core.answer(session, request, error)

    def topic_missing(self, topic: str) -> None:
        self._core.markers.tell_again(topic)
        if self._core.topics.pop(topic, None) is not None:
            self._missing.add(topic)

    def topic_gone(self, topic: str) -> None:
        self.topic_missing(topic)
        if topic in self._missing:
            self._missing.discard(topic)
            self._core.journal.forget([f"topic-{topic}"])

    def _durable(self, topic: str, one_phase: bool) -> None:
        self._missing.discard(topic)
        self._core.topics[topic] = one_phase
        for session, request in self._waiters.pop(topic, ()):
            self._core.answer(session, request, Done())
