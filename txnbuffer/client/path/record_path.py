"""How the records of a session get into the logs of their topics: through the service, or straight to the cluster

A transaction that takes the `ServicePath` collects its records until it commits, as long as they are few
(`session_requests.py`). A `SendQueue` takes the records of many transactions for a topic, and makes a send of them. A
`RecordPath` has the outboxes of all topics. There they wait until their topic is registered. A `ServicePath` puts the
sends into the frames of the session, and is pure. A `DirectPath` (`writers.py`) appends them to the topics of a
cluster; the service then gets only the other requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from broker_io.batch import ROW_BYTES, Batch, Blobs, Labels, Numbers, PropertyColumn, property_column
from broker_io.position import maker
from txnbuffer.client.path.send_columns import MAX_PROPERTIES, SendColumns, width
from txnbuffer.coordinator.messages import Branch, ConsumerPosition, ProducerSequence
from txnbuffer.errors import Error, SendUnknown
from txnbuffer.model import PROTOCOL_VERSION, TxnId, txn_text
from txnbuffer.protocol import SEQ, TXN, VERSION, transactional
from txnbuffer.recordset import BatchSlice, pack_all
from txnbuffer.rpc.frames import FRAME_BYTES, SEND_BYTES, Send, ServerFrame

Waiter = Any
"""A value, such as a future, that the caller gets back with the result of its request."""


class EndPlan(NamedTuple):
    """How a transaction ends once its sends are settled. `ready`: finish its branch and query its state instead."""

    commit: bool
    waiter: Waiter
    wait_visible: bool = False
    positions: tuple[ConsumerPosition, ...] = ()
    winners: tuple[Branch, ...] = ()
    ready: bool = False


as_plan = maker(EndPlan)


@dataclass(slots=True, eq=False)
class OpenTransaction:
    """The client's state of a transaction.

    - `start`: the tick in which it began. `announced`: the number of the request that announced it, or 0.
    - `counts`: the number of records sent to each topic. `pending`: how many of all records are not settled; `unsent`:
      how many are in no frame of this connection, or not passed to a writer.
    - `failure`: the error because of which it can only abort. `ending`: commit or abort was requested.
    - `then`: the plan to execute later: a commit that is sent with its records once nothing is unsent, any other once
      nothing is pending. `commit`: the number of the request for the commit, or 0; `answer`: its result.
    - `collects`: its records are `collected` until it commits, with their topic and the sequence number of the first;
      `collected_bytes` is their size.
    """

    txn: TxnId
    start: int
    timeout: float | None
    sequence: ProducerSequence | None
    collects: bool
    collected: list[tuple[SendTopic, SendColumns, int]] = field(default_factory=list)
    collected_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    unsent: int = 0
    failure: Error | None = None
    ending: bool = False
    announced: int = 0
    commit: int = 0
    answer: Any = None
    then: EndPlan | None = None

    def count(self, topic: str, records: int) -> int:
        """Count records for a topic; return the sequence number of the first."""
        first = self.counts.get(topic, 0) + 1
        self.counts[topic] = first + records - 1
        self.pending += records
        self.unsent += records
        return first


TransactionSlice: TypeAlias = tuple[OpenTransaction, int]
"""A transaction, and how many consecutive records are of it."""


class SendInFlight(NamedTuple):
    """A send with its transactions, or with the waiters of ordinary sends. `size`: its approximate memory in bytes."""

    send: Send
    runs: list[TransactionSlice]
    waiters: list[Waiter]
    size: int


as_flight = maker(SendInFlight)
ONE_VERSION = Labels.constant(str(PROTOCOL_VERSION), 1)


class SendQueue:
    """Queued records of one topic: all transactional, or all ordinary."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._clear()

    def _clear(self) -> None:
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._properties: list[Mapping[str, str] | None] | None = None
        self._times: list[int] | None = None
        self._names: set[str] = set()
        self._runs: list[TransactionSlice] = []
        self._seqs: list[int] = []
        self._waiters: list[Waiter] = []
        self._set_bytes = 0
        self._weight = 0
        self.size = 0

    def add(self, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter, seq: int) -> bool:
        """Add records of a transaction, of which the first has the number `seq`; or ordinary ones and their waiter.

        Returns False if they do not fit into the same send as the queued ones, and adds nothing.
        """
        before, count = len(self._values), len(rows.values)
        weight = size = self._weight + rows.size + ROW_BYTES * count
        names = self._names if rows.properties is None else self._names.union(*filter(None, rows.properties))
        if names:
            size += width(len(names), before + count)
        if before and (
            rows.set_bytes != self._set_bytes or size > SEND_BYTES or MAX_PROPERTIES < len(names) != len(self._names)
        ):
            return False
        self._set_bytes, self._weight, self._names, self.size = rows.set_bytes, weight, names, size
        if transaction is None:
            self._waiters.append(waiter)
        else:
            self._runs.append((transaction, count))
            if count == 1:
                self._seqs.append(seq)
            else:
                self._seqs += range(seq, seq + count)
        self._keys += rows.keys
        self._values += rows.values
        if rows.properties is not None or self._properties is not None:
            table = self._properties = [None] * before if self._properties is None else self._properties
            table += [None] * count if rows.properties is None else rows.properties
        if rows.times is not None or self._times is not None:
            times = self._times = [0] * before if self._times is None else self._times
            times += [0] * count if rows.times is None else rows.times
        return True

    @property
    def sends(self) -> int:
        """How many sends of transactions are queued."""
        return len(self._runs)

    def take(self) -> SendInFlight:
        """Remove all records and return them as one send."""
        count = len(self._values)
        properties: dict[str, PropertyColumn] = {}
        if self._properties is not None:
            table = [row or {} for row in self._properties]
            properties = {name: property_column([row.get(name) for row in table]) for name in sorted(self._names)}
        if self._runs and not self._set_bytes:
            properties |= self._transaction_columns(count)
        times = None if self._times is None else np.array(self._times, np.int64)
        keys = Blobs.none(count) if self._keys.count(None) == count else Blobs.of(self._keys)
        batch = Batch(keys, Blobs.of(self._values), properties, times)
        if self._set_bytes:
            batch = self._packed(batch)
        flight = as_flight((Send(self._topic, batch), self._runs, self._waiters, self.size))
        self._clear()
        return flight

    def drop(self) -> list[Waiter]:
        """Remove all records; return their waiters."""
        waiters = self._waiters
        self._clear()
        return waiters

    def _packed(self, records: Batch) -> Batch:
        """Return the records in record sets, the records of each transaction together."""
        if not self._runs:
            return pack_all(records, [BatchSlice(None, 1, len(records))], self._set_bytes)
        rows: dict[OpenTransaction, list[int]] = {}
        at = 0
        for transaction, count in self._runs:
            rows.setdefault(transaction, []).extend(range(at, at + count))
            at += count
        if 1 < len(rows) < len(self._runs):
            records = records.take(np.array([row for chosen in rows.values() for row in chosen], np.intp))
        slices = [BatchSlice(one.txn, self._seqs[chosen[0]], len(chosen)) for one, chosen in rows.items()]
        return pack_all(records, slices, self._set_bytes)

    def _transaction_columns(self, count: int) -> dict[str, PropertyColumn]:
        seen: dict[TxnId, int] = {}
        codes = [seen.setdefault(transaction.txn, len(seen)) for transaction, _ in self._runs]
        column = np.array(codes, np.int32)
        if len(codes) < count:
            column = np.repeat(column, [records for _, records in self._runs])
        return {
            VERSION: ONE_VERSION if count == 1 else Labels.constant(str(PROTOCOL_VERSION), count),
            TXN: Labels(column, tuple(map(txn_text, seen))),
            SEQ: Numbers(np.array(self._seqs, np.int64)),
        }


def flight_of(topic: str, records: Batch, transaction: OpenTransaction, set_bytes: int, first: int) -> SendInFlight:
    """Return a send with records of a transaction; the first has this number. `set_bytes` as in SendColumns."""
    count = len(records)
    size = int(records.sizes().sum()) + ROW_BYTES * count + width(len(records.properties), count)
    if set_bytes:
        messages = pack_all(records, [BatchSlice(transaction.txn, first, count)], set_bytes)
    else:
        messages = transactional(records, transaction.txn, first)
    return SendInFlight(Send(topic, messages), [(transaction, count)], [], size)


MAX_IN_FLIGHT = 3
"""Maximum number of unacknowledged frames with sends, or of appends to each topic of a cluster. While the limit is
reached, records are collected for the next one.
"""

GROUP = 128
"""Sends of transactions that wait for a topic of a cluster after which they are appended at once, so that brokers and
service work on them while callers send more.
"""

FIRST_CREDITS = 1024 * 1024
"""Bytes that a client may have unacknowledged before the service tells its limit."""


class SendTopic:
    """The queue of one topic.

    `registered`: transactional records may be sent. `asked`: the registration was requested. `in_flight` counts sends.
    `collecting`: the transactions that have collected records for it, by `least`.
    """

    __slots__ = ("asked", "collecting", "in_flight", "name", "ordinary", "registered", "sealed", "transactional")

    def __init__(self, name: str) -> None:
        self.name = name
        self.registered = False
        self.asked = False
        self.in_flight = 0
        self.transactional = SendQueue(name)
        self.ordinary = SendQueue(name)
        self.sealed: deque[SendInFlight] = deque()
        self.collecting: dict[int, OpenTransaction] = {}

    @property
    def has_group(self) -> bool:
        """Whether enough sends of transactions are queued for an append."""
        return self.transactional.sends >= GROUP and self.in_flight < MAX_IN_FLIGHT

    @property
    def has_transactional(self) -> bool:
        """Whether transactional records are queued."""
        return self.transactional.size > 0 or any(flight.runs for flight in self.sealed)


def count_unsent(flight: SendInFlight, sign: int) -> None:
    """Count the records of a send as unsent again (1), or not any more (-1)."""
    for transaction, records in flight.runs:
        transaction.unsent += sign * records


class SendResult(NamedTuple):
    """What became of a send: it failed, for one transaction or (`txn` is None) for all; or it is `settled`."""

    flight: SendInFlight
    error: Error | None = None
    txn: TxnId | None = None
    settled: bool = True


def send_unknown(topic: str, error: Error) -> SendUnknown:
    """The error of a send outside of a transaction that failed in a way which does not say whether it was stored."""
    unknown = SendUnknown(f"records for {topic!r} were not acknowledged: they may or may not be in the log ({error})")
    unknown.__cause__ = error
    return unknown


class RecordPath(ABC):
    """The queues of the topics, and the sends in flight.

    `ready`: the topics that may have another send, by name. `unacknowledged` counts bytes, also of queued and collected
    records; `credits` is its limit. `through_service`: the service gets the records, in order, and acknowledges them.
    `all_sent`: the transactions whose last records are in the sends that were taken last. `not_taken`: after `lost`,
    the transactions with records that the service has said not to have taken.
    """

    through_service: ClassVar[bool]

    def __init__(self, first_credits: int) -> None:
        self.topics: dict[str, SendTopic] = {}
        self.credits = first_credits
        self.unacknowledged = 0
        self.ready: dict[str, SendTopic] = {}
        self.all_sent: list[OpenTransaction] = []
        self.not_taken: list[OpenTransaction] = []
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

    def add(
        self, topic: SendTopic, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter, first: int = 0
    ) -> None:
        """Queue records of a transaction, of which the first has this number, or ordinary ones (None)."""
        if transaction is None and topic.registered and topic.transactional.size:
            self.seal(topic)
        outbox = topic.ordinary if transaction is None else topic.transactional
        before = outbox.size
        if not outbox.add(rows, transaction, waiter, first):
            topic.sealed.append(outbox.take())
            before = 0
            outbox.add(rows, transaction, waiter, first)
        self.unacknowledged += outbox.size - before
        if transaction is None or topic.registered:
            self.ready[topic.name] = topic

    def add_batch(
        self, topic: SendTopic, records: Batch, transaction: OpenTransaction, set_bytes: int, first: int
    ) -> None:
        """Queue records as a send of their own; the first has this number."""
        self.seal(topic)
        flight = flight_of(topic.name, records, transaction, set_bytes, first)
        topic.sealed.append(flight)
        self.unacknowledged += flight.size
        if topic.registered:
            self.ready[topic.name] = topic

    def seal(self, topic: SendTopic) -> None:
        """Let the queued records of transactions go before all that is queued later, and after all that was before."""
        if topic.transactional.size:
            if topic.ordinary.size:
                topic.sealed.append(topic.ordinary.take())
            topic.sealed.append(topic.transactional.take())

    def registered(self, topic: SendTopic) -> None:
        topic.asked, topic.registered = False, True
        self.ready[topic.name] = topic

    def not_registered(self, topic: SendTopic) -> list[SendInFlight]:
        """Drop and return the sends that waited for the registration of a topic."""
        topic.asked = topic.registered = False
        dropped = [flight for flight in topic.sealed if flight.runs]
        topic.sealed = deque(flight for flight in topic.sealed if not flight.runs)
        if topic.transactional.size:
            dropped.append(topic.transactional.take())
        self.unacknowledged -= sum(flight.size for flight in dropped)
        for flight in dropped:
            count_unsent(flight, -1)
        return dropped

    def take_results(self) -> list[SendResult]:
        """Return what became of sends since the last call."""
        results, self._results = self._results, []
        return results

    def drop_all(self) -> list[Waiter]:
        """Drop everything that is not acknowledged; return the waiters."""
        flights = [*self._drop_in_flight()]
        waiters: list[Waiter] = []
        self._results.clear()
        self.ready.clear()
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
        """Whether another send to the topic may be in flight now; if not, `_settle` puts it into `ready` again."""

    def _next(self) -> SendInFlight | None:
        """Return the next send, which is in flight from now on."""
        while self.ready:
            topic = next(iter(self.ready.values()))
            flight: SendInFlight | None = None
            if self._may_send(topic):
                if topic.sealed and (topic.registered or not topic.sealed[0].runs):
                    flight = topic.sealed.popleft()
                elif topic.ordinary.size:
                    flight = topic.ordinary.take()
                elif topic.registered and topic.transactional.size:
                    flight = topic.transactional.take()
            if flight is None or not (topic.sealed or topic.transactional.size or topic.ordinary.size):
                del self.ready[topic.name]
            if flight is not None:
                topic.in_flight += 1
                return flight
        return None

    def _settle(self, flight: SendInFlight) -> None:
        self.unacknowledged -= flight.size
        topic = self.topics[flight.send.topic]
        topic.in_flight -= 1
        if topic.sealed or topic.transactional.size or topic.ordinary.size:
            self.ready[topic.name] = topic


class ServicePath(RecordPath):
    """Sends in frames to the service, numbered over one connection.

    After a reconnect the sends of transactions are repeated first, because the service recognizes records that it has;
    and ordinary sends of which the service has said that it did not take them.
    """

    through_service = True

    def __init__(self) -> None:
        super().__init__(FIRST_CREDITS)
        self._again: deque[SendInFlight] = deque()
        self._in_flight: dict[int, SendInFlight] = {}
        self._frames: deque[int] = deque()
        self._number = 0
        self._not_taken = False

    def take(self) -> tuple[Send, ...]:
        self.all_sent = []
        if len(self._frames) >= MAX_IN_FLIGHT:
            return ()
        taken: list[Send] = []
        size = 0
        while size < FRAME_BYTES and (self._again or self.ready):
            flight = self._repeated() if self._again else self._next()
            if flight is None:
                break
            self._number += 1
            self._in_flight[self._number] = flight
            taken.append(flight.send)
            size += flight.size
            for transaction, records in flight.runs:
                transaction.unsent -= records
                if not transaction.unsent:
                    self.all_sent.append(transaction)
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
            while self._in_flight and (number := next(iter(self._in_flight))) <= frame.acknowledged:
                flight = self._in_flight.pop(number)
                self._settle(flight)
                self._results.append(SendResult(flight))
        self._not_taken = self._not_taken or frame.settled

    def limit(self, max_message_bytes: int) -> int:
        return max_message_bytes

    def lost(self) -> list[SendInFlight]:
        not_taken, self._not_taken = self._not_taken, False
        unknown = [flight for flight in self._in_flight.values() if not (flight.runs or not_taken)]
        again = [flight for flight in self._in_flight.values() if flight.runs or not_taken]
        self.not_taken = [transaction for flight in again for transaction, _ in flight.runs if not_taken]
        for flight in self._in_flight.values():
            count_unsent(flight, 1)
            topic = self.topics[flight.send.topic]
            topic.in_flight = 0
            self.ready[topic.name] = topic
        self.unacknowledged -= sum(flight.size for flight in unknown)
        self._again.extendleft(reversed(again))
        self._in_flight.clear()
        self._frames.clear()
        self._number = 0
        return unknown

    def _repeated(self) -> SendInFlight:
        flight = self._again.popleft()
        self.topics[flight.send.topic].in_flight += 1
        return flight

    def _drop_in_flight(self) -> Iterable[SendInFlight]:
        dropped = [*self.lost(), *self._again]
        self._again.clear()
        return dropped

    def _may_send(self, topic: SendTopic) -> bool:
        return True
