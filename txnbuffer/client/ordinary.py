"""Ordinary sends straight to a cluster: no service has a part in them, and they go on without one."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from broker_io.errors import InvalidTopicName
from broker_io.port import Broker
from snapshots.keys import INTERNAL_PREFIX, is_internal
from txnbuffer.client.outbox import Flight, Outbox, Rows
from txnbuffer.client.writers import Writers
from txnbuffer.errors import Error, SendUnknown

ROOM = 8 * 1024 * 1024
"""Bytes of ordinary records that may be unacknowledged."""


class OrdinarySends:
    """All that tasks send to a topic in one turn of the loop is appended together."""

    def __init__(self, writers: Writers, broker: Broker) -> None:
        self._writers = writers
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, Outbox] = {}
        self._scheduled = False
        self._unacknowledged = 0
        self._for_room: deque[asyncio.Future[None]] = deque()

    @property
    def max_message_bytes(self) -> int:
        """The cluster's limit of one message, as far as it is known."""
        return self._broker.max_message_bytes

    async def send(self, topic: str, rows: Rows) -> None:
        """Return when the records are durable. Raises SendUnknown where they may stand in the log or not."""
        if is_internal(topic):
            text = f"topic {topic!r}: names that begin with {INTERNAL_PREFIX} are the service's own: use another"
            raise InvalidTopicName(text)
        while self._unacknowledged >= ROOM:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._for_room.append(waiter)
            await waiter
        outbox = self._outboxes.get(topic)
        if outbox is None:
            outbox = self._outboxes[topic] = Outbox(topic)
        if not outbox.fits(rows):
            self._append(topic, outbox)
        before = outbox.size
        done: asyncio.Future[None] = self._loop.create_future()
        outbox.add(rows, None, done)
        self._unacknowledged += outbox.size - before
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        await done

    def _flush(self) -> None:
        self._scheduled = False
        for topic, outbox in self._outboxes.items():
            if outbox.size:
                self._append(topic, outbox)

    def _append(self, topic: str, outbox: Outbox) -> None:
        flight = outbox.take()
        self._writers.append(topic, flight.send.batch, partial(self._settled, flight), creates=True)

    def _settled(self, flight: Flight, error: Error | None) -> None:
        self._unacknowledged -= flight.size
        for waiter in flight.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(_told(flight.send.topic, error))
        while self._for_room and self._unacknowledged < ROOM:
            waiter = self._for_room.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _told(topic: str, error: Error) -> Error:
    """Where sending again can help, it has to be known that the records may then stand there twice."""
    if not error.retryable:
        return error
    unknown = SendUnknown(f"records for {topic!r} were not acknowledged: they may be there or not ({error})")
    unknown.__cause__ = error
    return unknown
