"""Records from the application to the service: queued, sent, acknowledged, sent again"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from broker_io.batch import Batch
from txnbuffer.client.outbox import OpenTransaction, Outbox, SendColumns, SendInFlight, Waiter, flight_of
from txnbuffer.rpc.frames import FRAME_BYTES, Send

MAX_UNDER_WAY = 3
"""Limit of unacknowledged frames with sends, or of sends for each topic if topics are pipelined independently.
Records that arrive meanwhile go into the next one together.
"""
FIRST_CREDITS = 1024 * 1024


class SendTopic:
    """The queue of one topic.

    `registered`: transactional records may be sent; `asked`: the registration was requested. `under_way` counts sends.
    """

    __slots__ = ("asked", "name", "ordinary", "registered", "sealed", "transactional", "under_way")

    def __init__(self, name: str) -> None:
        self.name = name
        self.registered = False
        self.asked = False
        self.under_way = 0
        self.transactional = Outbox(name)
        self.ordinary = Outbox(name)
        self.sealed: deque[SendInFlight] = deque()

    @property
    def has_transactional(self) -> bool:
        """Whether transactional records wait here."""
        return self.transactional.size > 0 or any(flight.runs for flight in self.sealed)


class Sending:
    """The sends of a session. `unacknowledged` counts bytes, queued ones included. `pipelined`: topics do not wait for
    one another.
    """

    def __init__(self, *, pipelined: bool) -> None:
        self.topics: dict[str, SendTopic] = {}
        self.credits = FIRST_CREDITS
        self.unacknowledged = 0
        self._pipelined = pipelined
        self._ready: dict[str, SendTopic] = {}
        self._again: deque[SendInFlight] = deque()
        self._under_way: dict[int, SendInFlight] = {}
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
        """Drop what waited for the registration of a topic."""
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
        if len(self._frames) >= MAX_UNDER_WAY:
            return ()
        size = 0
        while size < FRAME_BYTES and (flight := self._next()) is not None:
            self._number += 1
            self._under_way[self._number] = flight
            self.topics[flight.send.topic].under_way += 1
            taken.append(flight.send)
            size += flight.size
        if taken and not self._pipelined:
            self._frames.append(self._number)
        return tuple(taken)

    def failed(self, number: int) -> SendInFlight | None:
        """Return the send of this number, if it is not settled yet."""
        return self._under_way.get(number)

    def acknowledged(self, number: int) -> list[SendInFlight]:
        """Settle all sends up to this number."""
        while self._frames and self._frames[0] <= number:
            self._frames.popleft()
        return self.settled([one for one in self._under_way if one <= number])

    def settled(self, numbers: Iterable[int]) -> list[SendInFlight]:
        """Settle these sends, regardless of others."""
        flights = []
        for number in numbers:
            flight = self._under_way.pop(number)
            self.unacknowledged -= flight.size
            flights.append(flight)
            topic = self.topics[flight.send.topic]
            topic.under_way -= 1
            self._ready[topic.name] = topic
        return flights

    def lost(self) -> list[SendInFlight]:
        """The connection is lost: queue transactional sends again, and return the ordinary ones, which are not sent
        again.
        """
        unknown = [flight for flight in self._under_way.values() if not flight.runs]
        again = [flight for flight in self._under_way.values() if flight.runs]
        for flight in self._under_way.values():
            topic = self.topics[flight.send.topic]
            topic.under_way = 0
            self._ready[topic.name] = topic
        self.unacknowledged -= sum(flight.size for flight in unknown)
        self._again.extendleft(reversed(again))
        self._under_way.clear()
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
            if self._pipelined and topic.under_way >= MAX_UNDER_WAY:
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
