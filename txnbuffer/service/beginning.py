"""The first message of logs that hold none: a border.

Whoever loads a topic of a cluster replaces its empty ledger. A snapshot that applied nothing names that ledger, and
could not tell a log that was always empty from one whose messages went; so no log with a snapshot is left empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker_io.batch import Batch
from broker_io.errors import Error, ServiceUnavailable
from broker_io.port import Broker, LookingBroker
from txnbuffer.model import Marker
from txnbuffer.protocol import encode_marker
from txnbuffer.service.topic import Topic

SECONDS = 60.0
"""So long the cluster has to acknowledge a border."""


class Beginning:
    """`border` makes a marker without transactions."""

    def __init__(self, broker: Broker, border: Callable[[], Marker]) -> None:
        self._broker = broker
        self._border = border

    async def begin(self, topic: Topic, *, new: bool = False) -> Error | None:
        """Give a followed topic its first message if it has none that lasts; what is in the way.

        `new`: its registration has just seen that no policy endangers it.
        """
        if topic.tail is None or topic.tail.buffer.applied is not None:
            return None
        try:
            await asyncio.to_thread(self._begin, topic.name, Batch.of([encode_marker(self._border())]), new)
        except Error as error:
            return error
        except TimeoutError:
            return ServiceUnavailable(
                f"the cluster did not acknowledge a message to topic {topic.name!r}: is it running?"
            )
        return None

    def _begin(self, name: str, border: Batch, new: bool) -> None:
        if any(ledger.lasting for ledger in self._broker.ledgers(name)):
            return
        if new and isinstance(self._broker, LookingBroker):
            opened = self._broker.writer_of_new(name)
        else:
            opened = self._broker.writer(name)
        with opened as writer:
            writer.append(border).result(SECONDS)
