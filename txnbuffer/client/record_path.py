"""How the records of a session get into the logs of their topics: through the service, or straight to the cluster

A `RecordPath` collects the records of each topic and cuts them into sends. The records of a transaction wait until
their topic is registered. A `ServicePath` puts the sends into the frames of the session, and is pure. A `DirectPath`
(`writers.py`) appends them to the topics of a cluster; the service then gets only the other requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from broker_io.batch import Batch
from txnbuffer.client.outbox import OpenTransaction, Outbox, SendColumns, SendInFlight, Waiter, flight_of
from txnbuffer.errors import Error
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import FRAME_BYTES, Send, ServerFrame

MAX_IN_FLIGHT = 3
"""Maximum number of unacknowledged frames with sends, or of appends to each topic of a cluster. While the limit is
reached, records are collected for the next one.
"""

FIRST_CREDITS = 1024 * 1024
"""Bytes that a client may have unacknowledged before the service tells its limit."""


class SendTopic:
    """The queue of one topic.

    `registered`: transactional records may be sent. `asked`: the registration was requested. `in_flight` counts sends.
    """

    __slots__ = ("asked", "in_flight", "name", "ordinary", "registered", "sealed", "transactional")

    def __init__(self, name: str) -> None:
        self.name = name
        self.registered = False
        self.asked = False
        self.in_flight = 0
        self.transactional = Outbox(name)
        self.ordinary = Outbox(name)
        self.sealed: deque[SendInFlight] = deque()

    @property
    def has_transactional(self) -> bool:
        """Whether transactional records are queued."""
        return self.transactional.size > 0 or any(flight.runs for flight in self.sealed)


class SendResult(NamedTuple):
    """News of a send: it failed, for one transaction or (`txn` is None) for all; or it is `settled`."""

    flight: SendInFlight
    error: Error | None = None
    txn: TxnId | None = None
    settled: bool = True


class RecordPath(ABC):
    """The queues of the topics, and the sends in flight.

    `unacknowledged` counts bytes, also of queued records; `credits` is its limit. `through_service`: the service gets
    the records, in order, and acknowledges them.
    """

    through_service: ClassVar[bool]

    def __init__(self, first_credits: int) -> None:
        self.topics: dict[str, SendTopic] = {}
        self.credits = first_credits
        self.unacknowledged = 0
        self._ready: dict[str, SendTopic] = {}
        self._results: list[SendResult] = []

    @property
    def room(self) -> int:
        """Bytes that may be queued before callers have to wait; 0 or less: they have to wait now."""
        return self.credits - self.unacknowledged

    def topic(self, name: str) -> SendTopic:
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = SendTopic(name)
        return topic

    def add(self, topic: SendTopic, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter) -> None:
        """Queue records of a transaction, or ordinary ones (None)."""
        outbox = topic.ordinary if transaction is None else topic.transactional
        before = outbox.size
        if not outbox.fits(rows):
            topic.sealed.append(outbox.take())
            before = 0
        outbox.add(rows, transaction, waiter)
        self.unacknowledged += outbox.size - before
        if transaction is None or topic.registered:
            self._ready[topic.name] = topic

    def add_batch(self, topic: SendTopic, records: Batch, transaction: OpenTransaction, set_bytes: int) -> None:
        """Queue records as a send of their own."""
        if topic.transactional.size:
            topic.sealed.append(topic.transactional.take())
        flight = flight_of(topic.name, records, transaction, set_bytes)
        topic.sealed.append(flight)
        self.unacknowledged += flight.size
        if topic.registered:
            self._ready[topic.name] = topic

    def registered(self, topic: SendTopic) -> None:
        topic.asked, topic.registered = False, True
        self._ready[topic.name] = topic

    def not_registered(self, topic: SendTopic) -> list[SendInFlight]:
        """Drop and return the sends that waited for the registration of a topic."""
        topic.asked = topic.registered = False
        dropped = [flight for flight in topic.sealed if flight.runs]
        topic.sealed = deque(flight for flight in topic.sealed if not flight.runs)
        if topic.transactional.size:
            dropped.append(topic.transactional.take())
        self.unacknowledged -= sum(flight.size for flight in dropped)
        return dropped

    def take_results(self) -> list[SendResult]:
        """Return the news of sends since the last call."""
        results, self._results = self._results, []
        return results

    def drop_all(self) -> list[Waiter]:
        """Drop everything that is not acknowledged; return the waiters."""
        flights = [*self._drop_in_flight()]
        waiters: list[Waiter] = []
        self._results.clear()
        self._ready.clear()
        for topic in self.topics.values():
            topic.asked = False
            topic.in_flight = 0
            flights += topic.sealed
            topic.sealed.clear()
            waiters += [*topic.ordinary.drop(), *topic.transactional.drop()]
        self.unacknowledged = 0
        return [waiter for flight in flights for waiter in flight.waiters] + waiters

    @abstractmethod
    def take(self) -> tuple[Send, ...]:
        """Return the sends of the next frame; a path that does not use frames sends them by itself."""

    @abstractmethod
    def receive(self, frame: ServerFrame) -> None:
        """Handle what a frame of the service says about sends."""

    @abstractmethod
    def limit(self, max_message_bytes: int) -> int:
        """Return the size limit of a message, given that of the service (0: it has none)."""

    @abstractmethod
    def lost(self) -> list[SendInFlight]:
        """The connection to the service is lost; return the sends that may or may not be stored."""

    @abstractmethod
    def _drop_in_flight(self) -> Iterable[SendInFlight]: ...

    @abstractmethod
    def _may_send(self, topic: SendTopic) -> bool:
        """Whether another send to the topic may be in flight now; if not, `_settle` puts it into `_ready` again."""

    def _next(self) -> SendInFlight | None:
        """Return the next send, which is in flight from now on."""
        while self._ready:
            topic = next(iter(self._ready.values()))
            if self._may_send(topic):
                flight = _take(topic)
                if flight is not None:
                    topic.in_flight += 1
                    return flight
            del self._ready[topic.name]
        return None

    def _settle(self, flight: SendInFlight) -> None:
        self.unacknowledged -= flight.size
        topic = self.topics[flight.send.topic]
        topic.in_flight -= 1
        self._ready[topic.name] = topic


def _take(topic: SendTopic) -> SendInFlight | None:
    if topic.sealed and (topic.registered or not topic.sealed[0].runs):
        return topic.sealed.popleft()
    if topic.ordinary.size:
        return topic.ordinary.take()
    if topic.registered and topic.transactional.size:
        return topic.transactional.take()
    return None


class ServicePath(RecordPath):
    """Sends in frames to the service, numbered over one connection.

    After a reconnect the sends of transactions are repeated first, because the service recognizes records that it has.
    """

    through_service = True

    def __init__(self) -> None:
        super().__init__(FIRST_CREDITS)
        self._again: deque[SendInFlight] = deque()
        self._in_flight: dict[int, SendInFlight] = {}
        self._frames: deque[int] = deque()
        self._number = 0

    def take(self) -> tuple[Send, ...]:
        if len(self._frames) >= MAX_IN_FLIGHT:
            return ()
        taken: list[Send] = []
        size = 0
        while size < FRAME_BYTES and (flight := self._repeated() or self._next()) is not None:
            self._number += 1
            self._in_flight[self._number] = flight
            taken.append(flight.send)
            size += flight.size
        if taken:
            self._frames.append(self._number)
        return tuple(taken)

    def receive(self, frame: ServerFrame) -> None:
        if frame.credits is not None:
            self.credits = frame.credits
        for failure in frame.failures:
            if (flight := self._in_flight.get(failure.send)) is not None:
                self._results.append(SendResult(flight, failure.error, failure.txn, settled=False))
        if frame.acknowledged:
            while self._frames and self._frames[0] <= frame.acknowledged:
                self._frames.popleft()
            for number in [one for one in self._in_flight if one <= frame.acknowledged]:
                flight = self._in_flight.pop(number)
                self._settle(flight)
                self._results.append(SendResult(flight))

    def limit(self, max_message_bytes: int) -> int:
        return max_message_bytes

    def lost(self) -> list[SendInFlight]:
        unknown = [flight for flight in self._in_flight.values() if not flight.runs]
        again = [flight for flight in self._in_flight.values() if flight.runs]
        for flight in self._in_flight.values():
            topic = self.topics[flight.send.topic]
            topic.in_flight = 0
            self._ready[topic.name] = topic
        self.unacknowledged -= sum(flight.size for flight in unknown)
        self._again.extendleft(reversed(again))
        self._in_flight.clear()
        self._frames.clear()
        self._number = 0
        return unknown

    def _repeated(self) -> SendInFlight | None:
        if not self._again:
            return None
        flight = self._again.popleft()
        self.topics[flight.send.topic].in_flight += 1
        return flight

    def _drop_in_flight(self) -> Iterable[SendInFlight]:
        dropped = [*self.lost(), *self._again]
        self._again.clear()
        return dropped

    def _may_send(self, topic: SendTopic) -> bool:
        return True
