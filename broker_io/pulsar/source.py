"""One reader of the client library, with what it was asked for; opened anew where it has to be."""

from __future__ import annotations

import threading
from typing import Any

import _pulsar
import pulsar

from broker_io.errors import Closed, Error
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

    def next(self, milliseconds: int) -> Any | None:
        """A message, or None if none comes in time."""
        try:
            return self._raw.read_next(milliseconds)
        except _pulsar.Timeout:
            return None
        except pulsar.PulsarException as error:
            raise self._named(error) from None

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

    def _named(self, error: pulsar.PulsarException) -> Error:
        if type(error).__name__ == "AlreadyClosed":
            return Closed(f"this reader of topic {self._topic!r} is closed: open another one")
        return of_opening(error, self._topic, "reader")


def place_of(message: Any) -> Position:
    found = message.message_id()
    return Position(found.ledger_id(), found.entry_id(), found.batch_index())
