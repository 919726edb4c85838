"""The sends of a session: queued, sent, acknowledged, and sent again after a reconnect"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from broker_io.batch import Batch
from txnbuffer.client.outbox import OpenTransaction, Outbox, SendColumns, SendInFlight, Waiter, flight_of
from txnbuffer.rpc.frames import FRAME_BYTES, Send

MAX_IN_FLIGHT = 3
"""Maximum number of unacknowledged frames with sends, or of sends for each topic if `pipelined`. While the limit is
reached, records are collected for the next one.
"""
FIRST_CREDITS = 1024 * 1024


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


class Sending:
    """The sends of a session. `unacknowledged` counts bytes, also of queued records.

    `pipelined`: topics do not wait for one another.
    """

    def __init__(self, *, pipelined: bool) -> None:
        self.topics: dict[str, SendTopic] = {}
        self.credits = FIRST_CREDITS
        self.unacknowledged = 0
        self._pipelined = pipelined
        self._ready: dict[str, SendTopic] = {}
        self._again: deque[SendInFlight] = deque()
        self._in_flight: dict[int, SendInFlight] = {}
        self._frames: deque[int] = deque()
        self._number = 0

    @property
    def has_room(self) -> bool:
        return self.unacknowledged < self.credits

    def topic(self, name: str) -> SendTopic:
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = SendTopic(name)
        return topic

    def add(self, topic: SendTopic, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter) -> None:
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

    def take(self) -> tuple[Send, ...]:
        """Return the sends of the next frame."""
        taken: list[Send] = []
        if len(self._frames) >= MAX_IN_FLIGHT:
            return ()
        size = 0
        while size < FRAME_BYTES and (flight := self._next()) is not None:
            self._number += 1
            self._in_flight[self._number] = flight
            self.topics[flight.send.topic].in_flight += 1
            taken.append(flight.send)
            size += flight.size
        if taken and not self._pipelined:
            self._frames.append(self._number)
        return tuple(taken)

    def failed(self, number: int) -> SendInFlight | None:
        """Return the send of this number, if it is not settled yet."""
        return self._in_flight.get(number)

    def acknowledged(self, number: int) -> list[SendInFlight]:
        """Settle and return all sends up to this number."""
        while self._frames and self._frames[0] <= number:
            self._frames.popleft()
        return self.settled([one for one in self._in_flight if one <= number])

    def settled(self, numbers: Iterable[int]) -> list[SendInFlight]:
        """Settle and return these sends."""
        flights = []
        for number in numbers:
            flight = self._in_flight.pop(number)
            self.unacknowledged -= flight.size
            flights.append(flight)
            topic = self.topics[flight.send.topic]
            topic.in_flight -= 1
            self._ready[topic.name] = topic
        return flights

    def lost(self) -> list[SendInFlight]:
        """Queue the transactional sends in flight again, because the connection is lost; return the ordinary ones."""
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

    def drop_all(self) -> list[Waiter]:
        """Drop everything that is not acknowledged; return the waiters."""
        flights = [*self.lost(), *self._again]
        waiters: list[Waiter] = []
        self._again.clear()
        self._ready.clear()
        for topic in self.topics.values():
            topic.asked = False
            flights += topic.sealed
            topic.sealed.clear()
            waiters += [*topic.ordinary.drop(), *topic.transactional.drop()]
        self.unacknowledged = 0
        return [waiter for flight in flights for waiter in flight.waiters] + waiters

    def _next(self) -> SendInFlight | None:
        if self._again:
            return self._again.popleft()
        while self._ready:
            topic = next(iter(self._ready.values()))
            if self._pipelined and topic.in_flight >= MAX_IN_FLIGHT:
                del self._ready[topic.name]  # `settled` adds it again
                continue
            if topic.sealed and (topic.registered or not topic.sealed[0].runs):
                return topic.sealed.popleft()
            if topic.ordinary.size:
                return topic.ordinary.take()
            if topic.registered and topic.transactional.size:
                return topic.transactional.take()
            del self._ready[topic.name]
        return None
