"""The client's side of a session, without I/O: requests become frames, and frames become results

A `SessionCore` is used over many connections. Its caller calls `hello` for each new connection and `lost` when the
connection is lost, passes it the frames of the service (`receive`), and sends the frames that `take_frame` returns. A
request has a *waiter*, which `take_results` returns with the result.

- Transaction ids are leased in advance, so that `begin` does not wait.
- A topic is registered before its first transactional send; its records wait until then.
- A commit or abort is sent once all sends of the transaction are settled. After a failed send only an abort is
  possible.
- After a reconnect the client names its open transactions, and sends unacknowledged sends and unanswered requests
  again. Ordinary sends fail with SendUnknown instead, because the service could not recognize a duplicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from broker_io.batch import Batch
from txnbuffer.client.open_transactions import Answer, EndPlan, Field, PendingRequest, Requests, Transactions
from txnbuffer.client.outbox import OpenTransaction, Outbox, SendColumns, SendInFlight, Waiter, flight_of
from txnbuffer.coordinator.messages import GroupHeartbeat, Leased, ProducerSequence, Result
from txnbuffer.errors import CoordinatorStopped, Error, OutcomeUnknown, SendUnknown, UnknownSession, UnregisteredTopic
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import (
    FRAME_BYTES,
    Abort,
    ClientFrame,
    Deletion,
    Failure,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    Query,
    Send,
    ServerFrame,
    SessionHello,
    Welcome,
)

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
    def room(self) -> int:
        return self.credits - self.unacknowledged

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


SMALLEST, LARGEST = 16, 8192


class Ids:
    """Leased transaction ids that are not used yet. `want`: the size of the next lease; it grows when ids run out."""

    def __init__(self) -> None:
        self.want = 64
        self._blocks: deque[list[int]] = deque()
        self._left = 0

    def __len__(self) -> int:
        return self._left

    @property
    def low(self) -> bool:
        """Whether more ids should be leased now."""
        return self._left * 2 < self.want

    def add(self, first: int, size: int, *, ran_out: bool) -> None:
        self._blocks.append([first, first + size])
        self._left += size
        if ran_out:
            self.want = min(self.want * 2, LARGEST)

    def refused(self) -> bool:
        """Reduce the size of the next lease, because one was rejected; False if it was already the smallest."""
        smaller = self.want > SMALLEST
        self.want = max(self.want // 4, SMALLEST)
        return smaller

    def take(self) -> int:
        """Return the next id; there must be one."""
        block = self._blocks[0]
        least = block[0]
        block[0] += 1
        self._left -= 1
        if block[0] == block[1]:
            self._blocks.popleft()
        return least

    def clear(self) -> tuple[IdBlock, ...]:
        """Remove and return all ids."""
        blocks = tuple(IdBlock(first, end - first) for first, end in self._blocks)
        self._blocks.clear()
        self._left = 0
        return blocks


IDLE_TICKS = 5
"""Ticks without a new transaction after which unused ids are returned to the service."""


class SessionCore:
    """The state of a session.

    `broken`: the error because of which the caller must open a new connection. `pipelined`: topics do not wait for one
    another; otherwise sends are acknowledged in order. `progress` grows with each answer and acknowledgement.
    """

    def __init__(self, *, pipelined: bool = False) -> None:
        self.session = ""
        self.max_message_bytes = 0
        self.broken: Error | None = None
        self.draining = False
        self.welcomed = False
        self._shard = 0
        self._ids = Ids()
        self._leasing = False
        self._returned: tuple[IdBlock, ...] = ()
        self._requests = Requests()
        self._results: list[Answer] = []
        self._transactions = Transactions(self._requests, self._results)
        self._sending = Sending(pipelined=pipelined)
        self._for_ids: list[Waiter] = []
        self._for_room: list[Waiter] = []
        self._idle = 0
        self.progress = 0

    # The connection

    def hello(self) -> ClientFrame:
        """Return the first frame of a new connection."""
        self.lost()
        return ClientFrame(hello=SessionHello(self.session, self._transactions.ids()))

    def lost(self) -> None:
        """Handle the loss of the connection."""
        self.welcomed = self.draining = False
        self.broken = None
        # The service reclaims unused ids when the session reconnects.
        self._ids.clear()
        self._returned = ()
        for flight in self._sending.lost():
            text = f"the connection was lost while sending to {flight.send.topic!r}: records may or may not be stored"
            self._results += [(waiter, SendUnknown(text)) for waiter in flight.waiters]

    def receive(self, frame: ServerFrame) -> None:
        """Handle a frame from the service."""
        if frame.welcome is not None:
            self._welcome(frame.welcome)
        if frame.credits is not None:
            self._sending.credits = frame.credits
        self.draining = self.draining or frame.draining
        self.progress += bool(frame.answers or frame.settled or frame.acknowledged)
        # Answers come before failures: the error of a begin is more specific than the errors of its sends.
        # Errors come before other answers: a frame has no order, and a transaction keeps its first error.
        for number, result in _refusals_first(frame.answers):
            self._answer(number, result)
        for failure in frame.failures:
            self._fail(failure)
        if frame.acknowledged:
            for flight in self._sending.acknowledged(frame.acknowledged):
                self._settle(flight)
        for flight in self._sending.settled(frame.settled):
            self._settle(flight)
        if frame.goodbye is not None:
            self.broken = frame.goodbye
        if self._for_room and self.has_room:
            self._wake(self._for_room)

    def take_frame(self) -> ClientFrame | None:
        """Return the next frame to send; None if there is nothing."""
        if not self.welcomed:
            return None
        parts = self._requests.take()
        sends = self._sending.take()
        returned, self._returned = self._returned, ()
        if not (parts or sends or returned):
            return None
        return ClientFrame(sends=sends, returned=returned, **parts)

    def take_results(self) -> list[Answer]:
        """Return the new results, each once."""
        results = self._results[:]
        self._results.clear()
        return results

    def give_up(self, error: Error) -> None:
        """Fail all requests, because no service can be reached or the service rejects this client."""
        self._results += [(waiter, error) for waiter in self._sending.drop_all()]
        for request in list(self._requests.unanswered.values()):
            if request.waiter is not None:
                self._results.append((request.waiter, _unanswered(request, error)))
        self._requests.drop_all()
        self._transactions.give_up(error)
        self._leasing = False
        self._wake(self._for_ids, error)
        self._wake(self._for_room, error)

    @property
    def waited_for(self) -> bool:
        """Whether a caller waits for a result."""
        waiting = bool(self._for_ids or self._for_room)
        return waiting or self._transactions.waited_for or self._requests.waited_for

    def stop_waiting(self, error: Error, *, visible: bool) -> None:
        """Fail the callers that wait, because there is no progress; their requests may still succeed.

        Commits that wait for visibility fail only with `visible`.
        """
        for request in self._requests.stop_waiting(visible=visible):
            self._results.append((request.waiter, _unanswered(request, error)))
        self._transactions.stop_waiting(error)
        self._wake(self._for_ids, error)
        self._wake(self._for_room, error)

    @property
    def unregistered(self) -> list[str]:
        """The topics whose registration was requested and is not answered."""
        return [topic.name for topic in self._sending.topics.values() if topic.asked]

    # Transactions

    @property
    def can_begin(self) -> bool:
        return len(self._ids) > 0 and self.welcomed and not self.draining

    def wait_to_begin(self, waiter: Waiter) -> None:
        """Return `waiter` as a result when `begin` may be possible."""
        self._for_ids.append(waiter)
        self._lease()

    def begin(self, timeout: float | None = None, sequence: ProducerSequence | None = None) -> OpenTransaction:
        """Begin a transaction; only while `can_begin`."""
        txn = TxnId(self._shard, self._ids.take())
        self._idle = 0
        if self._ids.low:
            self._lease()
        return self._transactions.begin(txn, timeout, sequence)

    @property
    def room(self) -> int:
        """How many more bytes of records the service accepts now; may be negative."""
        return self._sending.room

    @property
    def has_room(self) -> bool:
        """Whether the service accepts more records now."""
        return self._sending.room > 0

    def wait_for_room(self, waiter: Waiter) -> None:
        """Return `waiter` as a result when the service accepts more records."""
        self._for_room.append(waiter)

    def send(self, topic: str, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter = None) -> None:
        """Send records of an open transaction or ordinary ones (None), whose waiter gets None once they are durable."""
        found = self._sending.topic(topic)
        if transaction is not None:
            self._register(found)
        self._sending.add(found, rows, transaction, waiter)

    def send_batch(self, topic: str, records: Batch, transaction: OpenTransaction, set_bytes: int) -> None:
        """Send records of an open transaction as a Batch; `set_bytes` as in SendColumns."""
        found = self._sending.topic(topic)
        self._register(found)
        self._sending.add_batch(found, records, transaction, set_bytes)

    def end(self, transaction: OpenTransaction, plan: EndPlan) -> None:
        """Commit or abort an open transaction. The waiter gets the outcome or an error."""
        self._transactions.end(transaction, plan)

    def withdraw_commit(self, transaction: OpenTransaction) -> bool:
        """Turn a commit that was not sent yet into an abort; False if it was sent."""
        return self._transactions.withdraw_commit(transaction)

    def fail(self, transaction: OpenTransaction, error: Error) -> None:
        """Make a transaction unable to commit."""
        self._transactions.fail(transaction, error)

    def ask(self, field: Field, name: str, waiter: Waiter) -> None:
        """Open a producer name, or start a new generation of a group."""
        self._requests.ask(field, NamedRequest(self._requests.number(), name), waiter)

    def delete_name(self, name: str, last_number: int, waiter: Waiter) -> None:
        """Delete a producer name; its numbers up to `last_number` count as used."""
        self._requests.ask("delete_names", Deletion(self._requests.number(), name, last_number), waiter)

    def heartbeat(self, heartbeat: GroupHeartbeat, waiter: Waiter) -> None:
        """Send the heartbeat of a group member; it may also leave the group."""
        self._requests.ask("members", heartbeat._replace(request=self._requests.number()), waiter)

    def query(self, txn: TxnId, waiter: Waiter) -> None:
        """Request the outcome or the state of a transaction."""
        self._requests.ask("queries", Query(self._requests.number(), txn), waiter)

    def abort_foreign(self, txn: TxnId, topics: tuple[str, ...], waiter: Waiter) -> None:
        """Abort a branch that another session began. The waiter gets the outcome."""
        subject = OpenTransaction(txn, 0, None, None)
        self._requests.ask("aborts", Abort(self._requests.number(), txn, topics), waiter, subject)

    def forget(self, waiter: Waiter) -> None:
        """Remove a waiter for ids or room."""
        for waiting in (self._for_ids, self._for_room):
            if waiter in waiting:
                waiting.remove(waiter)

    def tick(self) -> None:
        """Announce long transactions, and return unused ids. Call it about once a second."""
        self._transactions.tick()
        self._idle += 1
        if self.welcomed and not len(self._transactions) and self._idle > IDLE_TICKS:
            self._returned += self._ids.clear()

    # Frames of the service

    def _welcome(self, welcome: Welcome) -> None:
        self.session, self._shard = welcome.session, welcome.shard
        self.max_message_bytes = welcome.max_message_bytes
        self.welcomed = True
        for txn, state in welcome.states:
            self._transactions.adopted(txn, state)
        self._requests.again()
        self._lease()

    def _fail(self, failure: Failure) -> None:
        flight = self._sending.failed(failure.send)
        if flight is None:
            return
        if isinstance(failure.error, UnregisteredTopic) or (flight.runs and failure.txn is None):
            self._register_again(flight.send.topic)
        for run in flight.runs:
            if failure.txn is None or run.transaction.txn == failure.txn:
                self._transactions.fail(run.transaction, failure.error)
        self._results += [(waiter, failure.error) for waiter in flight.waiters]
        flight.waiters.clear()

    def _settle(self, flight: SendInFlight) -> None:
        if flight.runs:
            self._transactions.settle(flight.runs)
        else:
            self._results += [(waiter, None) for waiter in flight.waiters]

    def _answer(self, number: int, result: Result) -> None:
        if isinstance(result, (UnknownSession, CoordinatorStopped)):
            self.broken = result
            return
        request = self._requests.answered(number)
        if request is None:
            return
        if request.field == "commits":
            if isinstance(result, UnregisteredTopic):
                for topic in request.subject.counts:
                    self._register_again(topic)
            self._transactions.committed(request, result)
        elif request.field == "leases":
            self._leased(result)
        elif request.field == "registers":
            self._registered(request.subject, result)
        elif request.field == "begins":
            if isinstance(result, Error):
                self._transactions.fail(request.subject, result)
        else:
            if request.field == "aborts":
                self._transactions.close(request.subject)
            if request.waiter is not None:
                self._results.append((request.waiter, result))

    def _leased(self, result: Result) -> None:
        self._leasing = False
        if isinstance(result, Leased):
            self._ids.add(result.first, result.size, ran_out=bool(self._for_ids))
            if self.can_begin:
                self._wake(self._for_ids)
        elif isinstance(result, Error) and self._for_ids:
            if self._ids.refused():
                self._lease()
            else:
                self._wake(self._for_ids, result)

    def _register(self, topic: SendTopic) -> None:
        if not (topic.registered or topic.asked):
            topic.asked = True
            self._requests.ask("registers", NamedRequest(self._requests.number(), topic.name), subject=topic)

    def _register_again(self, name: str) -> None:
        """Register a topic again, because it may have been re-created; its transactional records wait for that."""
        topic = self._sending.topic(name)
        topic.registered = False
        if topic.has_transactional:
            self._register(topic)

    def _registered(self, topic: SendTopic, result: Result) -> None:
        if not isinstance(result, Error):
            self._sending.registered(topic)
            return
        for flight in self._sending.not_registered(topic):
            for run in flight.runs:
                self._transactions.fail(run.transaction, result)
            self._settle(flight)

    def _lease(self) -> None:
        if not self._leasing and self.welcomed and not self.draining:
            self._leasing = True
            self._requests.ask("leases", LeaseRequest(self._requests.number(), self._ids.want))

    def _wake(self, waiting: list[Waiter], result: Result | None = None) -> None:
        self._results += [(waiter, result) for waiter in waiting]
        waiting.clear()


def _refusals_first(answers: tuple[tuple[int, Result], ...]) -> Sequence[tuple[int, Result]]:
    refusals = [answer for answer in answers if isinstance(answer[1], Error)]
    if not refusals or len(refusals) == len(answers):
        return answers
    return [*refusals, *(answer for answer in answers if not isinstance(answer[1], Error))]


def _unanswered(request: PendingRequest, error: Error) -> Error:
    """Return the error of a request that will not be answered."""
    unknown = request.field == "commits"
    return OutcomeUnknown(request.subject.txn, str(error)) if unknown else error
