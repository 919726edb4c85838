"""One reader of the client library, with what it was asked for; opened anew where it has to be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import _pulsar
import pulsar

from broker_io.position import Position
from broker_io.pulsar.cluster import Cluster
from broker_io.pulsar.failures import of_opening
from broker_io.pulsar.flushing import flusher

ASK_SECONDS = 2.0
"""How long the library may take to say whether there is more; it has been seen to hang."""


class Source:
    """Gives the messages from `start` on, that at `start` with them."""

    def __init__(self, cluster: Cluster, topic: str, start: Position, *, compacted: bool, ahead: int) -> None:
        self._topic = topic
        message_id = pulsar.MessageId(-1, start.ledger, start.entry, start.batch)
        self._reader: Any = cluster.opened(
            topic,
            "reader",
            lambda: cluster.client.create_reader(
                cluster.url(topic),
                message_id,
                receiver_queue_size=ahead,
                is_read_compacted=compacted,
                start_message_id_inclusive=True,
            ),
        )
        self._raw = self._reader._reader  # of the library's own kind: its wrapper costs as much again per message
        self._coming: Future[Any] | None = None  # the one that the library was asked to tell of
        self._tell: Callable[[], None]
        self._behind: Any | None = None  # what the library gave before the one that it stands behind

    def next(self, milliseconds: int) -> Any | None:
        """A message, or None if none comes in time. Whatever it raises: another source may give more."""
        if self._behind is not None:
            message, self._behind = self._behind, None
            return message
        if self._coming is None:
            return self._read(milliseconds)
        try:
            message = self._coming.result(milliseconds / 1000)
        except TimeoutError:
            return self._read(0)  # it can get into the queue just while it is asked for
        self._coming = None
        if message is None:
            return self._read(milliseconds)
        other = self._read(0)  # so one before it may stand there, or, as a rule, the next one
        if other is not None and place_of(other) < place_of(message):
            message, other = other, message
        self._behind = other
        return message

    def when_more(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when there is a message, or there won't be any."""
        self._tell = tell
        if self._behind is not None or (self._coming is not None and self._coming.done()):
            tell()
        elif self._coming is None:
            coming: Future[Any] = Future()
            self._coming = coming

            def came(result: Any, message: Any) -> None:
                coming.set_result(message if result == pulsar.Result.Ok else None)
                self._tell()

            self._raw.read_next_async(came)

    def _read(self, milliseconds: int) -> Any | None:
        try:
            return self._raw.read_next(milliseconds)
        except _pulsar.Timeout:
            return None
        except pulsar.PulsarException as error:
            raise of_opening(error, self._topic, "reader") from None

    def is_connected(self) -> bool:
        return bool(self._raw.is_connected())

    def has_more(self) -> bool | None:
        """Whether the library knows of more; None if it doesn't say."""
        said: list[bool] = []
        heard = threading.Event()

        def hear(result: Any, more: bool) -> None:
            if result == pulsar.Result.Ok:
                said.append(more)
            heard.set()

        self._raw.has_message_available_async(hear)
        heard.wait(ASK_SECONDS)
        return said[0] if said else None

    def close(self) -> None:
        """Let go of it; nothing is waited for."""
        flusher.within(self._reader.close, 0.0)  # the answer is lost if the topic is unloaded just then


def place_of(message: Any) -> Position:
    found = message.message_id()
    return Position(found.ledger_id(), found.entry_id(), found.batch_index())
