"""The client's side of a session, without I/O: requests become frames, and frames become results

A `SessionCore` is used over many connections. Its caller calls `hello` for each new connection and `lost` when the
connection is lost, passes it the frames of the service (`receive`), and sends the frames that `take_frame` returns. A
request has a *waiter*, which `take_results` returns with the result.

- Transaction ids are leased in advance, so that `begin` does not wait.
- A topic is registered before its first transactional send; its records wait until then.
- After a reconnect the client names its open transactions, and sends unacknowledged sends and unanswered requests
  again. Ordinary sends fail with SendUnknown instead, because the service could not recognize a duplicate.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from broker_io.batch import Batch
from broker_io.errors import DiskFailed
from txnbuffer.client.path.record_path import (
    OpenTransaction,
    RecordPath,
    SendResult,
    SendTopic,
    Waiter,
    send_unknown,
)
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.client.session.session_requests import (
    Answer,
    NumberedResult,
    PendingRequest,
    Requests,
    Transactions,
    refusal,
)
from txnbuffer.coordinator.messages import Leased, ProducerSequence, Result
from txnbuffer.errors import (
    CoordinatorStopped,
    Error,
    OutcomeUnknown,
    SendUnknown,
    TooManyTransactions,
    UnknownSession,
    UnregisteredTopic,
)
from txnbuffer.model import as_txn_id
from txnbuffer.rpc.frames import (
    ClientFrame,
    IdBlock,
    LeaseRequest,
    NamedRequest,
    ServerFrame,
    SessionHello,
    Welcome,
)

SMALLEST, LARGEST = 16, 8192


IDLE_TICKS = 5
"""Ticks without a new transaction after which unused ids are returned to the service."""


class SessionCore:
    """The state of a session, whose records take `path`.

    `broken`: the error because of which the caller must open a new connection. `progress` grows with each answer and
    acknowledgement. `transactions` ends transactions, and `requests` asks the service for anything else. `ids`: leased
    transaction ids that are not used yet, while transactions can begin.
    """

    def __init__(self, path: RecordPath, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called when there may be another frame to send."""
        self.session = ""
        self.max_message_bytes = 0
        self.broken: Error | None = None
        self.draining = False
        self.welcomed = False
        self._shard = 0
        self.ids: deque[int] = deque()
        self._want = 64
        """The size of the next lease; it grows when ids run out."""
        self._leasing = False
        self._returned: tuple[IdBlock, ...] = ()
        self.requests = Requests(wake)
        self.results: list[Answer] = []
        self.transactions = Transactions(self.requests, self.results, path, self._register)
        self._path = path
        self._for_ids: list[Waiter] = []
        self._for_room: list[Waiter] = []
        self._idle = 0
        self.progress = 0

    # The connection

    def hello(self) -> ClientFrame:
        """Return the first frame of a new connection."""
        self.lost()
        return ClientFrame(hello=SessionHello(self.session, self.transactions.ids()))

    def lost(self) -> None:
        """Handle the loss of the connection."""
        self.welcomed = self.draining = False
        self.broken = None
        # The service reclaims unused ids when the session reconnects.
        self.ids.clear()
        self._returned = ()
        for flight in self._path.lost():
            text = f"the connection was lost while sending to {flight.send.topic!r}: records may or may not be stored"
            self.results += [(waiter, SendUnknown(text)) for waiter in flight.waiters]
        for transaction in self._path.not_taken:
            self.requests.not_taken(transaction.commit)

    def receive(self, frame: ServerFrame) -> None:
        """Handle a frame from the service."""
        if frame.welcome is not None:
            self._welcome(frame.welcome)
        if frame.draining:
            self.draining = True
            self.ids.clear()
        self.progress += bool(frame.answers)
        # Answers come before failures: the error of a begin is more specific than the errors of its sends. Those of
        # commits come last: why a send failed is more specific than that the service misses its records.
        # Errors come before other answers: a frame has no order, and a transaction keeps its first error.
        answers, commits = self.requests.without_commits(frame.answers)
        self._answer(sorted(answers, key=_by_error) if len(answers) > 1 else answers)
        self._path.receive(frame)
        self._take_sent()
        self._answer(commits)
        if frame.goodbye is not None:
            self.broken = frame.goodbye

    def reject(self, number: int, error: Error) -> None:
        """Handle a request that cannot be sent, as if the service had answered it with this error."""
        self._answer(((number, error),))

    @property
    def has_frame(self) -> bool:
        """Whether `take_frame` may return a frame."""
        return bool(self.requests.queued or self._path.ready or self._returned)

    def take_frame(self) -> ClientFrame | None:
        """Return the next frame to send; None if there is nothing."""
        self._take_sent()
        if not self.welcomed:
            return None
        sends = self._path.take()
        self.transactions.all_sent(self._path.all_sent)
        parts = self.requests.take()
        returned, self._returned = self._returned, ()
        if not (parts or sends or returned):
            return None
        return ClientFrame(sends=sends, returned=returned, **parts)

    def take_results(self) -> list[Answer]:
        """Return the new results, each once."""
        results = self.results[:]
        self.results.clear()
        return results

    def give_up(self, error: Error) -> None:
        """Fail all requests, because no service can be reached or the service rejects this client."""
        self.transactions.drop_collected()
        self.results += [(waiter, error) for waiter in self._path.drop_all()]
        for number, request in self.requests.unanswered.items():
            if request.waiter is not None:
                never_committed = request.field == "commits" and self.requests.unsent(number)
                failure = refusal(request.subject, error) if never_committed else _unanswered(request, error)
                self.results.append((request.waiter, failure))
        self.requests.drop_all()
        self.transactions.give_up(error)
        self._leasing = False
        self._wake(self._for_ids, error)
        self._wake(self._for_room, error)

    @property
    def waited_for(self) -> bool:
        """Whether a caller waits for a result."""
        asked = any(request.waiter is not None for request in self.requests.unanswered.values())
        return asked or bool(self._for_ids or self._for_room) or self.transactions.waited_for

    def stop_waiting(self, error: Error, *, visible: bool) -> None:
        """Fail the callers that wait, because there is no progress; their requests may still succeed.

        Commits that wait for visibility fail only with `visible`.
        """
        for request in self.requests.stop_waiting(visible=visible):
            self.results.append((request.waiter, _unanswered(request, error)))
        self.transactions.stop_waiting(error)
        self._wake(self._for_ids, error)
        self._wake(self._for_room, error)

    @property
    def unregistered(self) -> list[str]:
        """The topics whose registration was requested and is not answered."""
        return [topic.name for topic in self._path.topics.values() if topic.asked]

    # Transactions

    def wait_to_begin(self, waiter: Waiter) -> None:
        """Return `waiter` as a result when `begin` may be possible."""
        self._for_ids.append(waiter)
        self._lease()

    def begin(self, timeout: float | None = None, sequence: ProducerSequence | None = None) -> OpenTransaction:
        """Begin a transaction; only while there are `ids`."""
        txn = as_txn_id((self._shard, self.ids.popleft()))
        self._idle = 0
        if not self._leasing and len(self.ids) * 2 < self._want:
            self._lease()
        return self.transactions.begin(txn, timeout, sequence)

    @property
    def room(self) -> int:
        """How many more bytes of records the service accepts now; may be negative."""
        return self._path.room

    @property
    def has_room(self) -> bool:
        """Whether the service accepts more records now."""
        return self._path.unacknowledged < self._path.credits

    def wait_for_room(self, waiter: Waiter) -> None:
        """Return `waiter` as a result when the service accepts more records."""
        self.transactions.send_all_early()
        self._for_room.append(waiter)

    def send(self, topic: str, rows: SendColumns, transaction: OpenTransaction | None, waiter: Waiter = None) -> bool:
        """Send records of an open transaction or ordinary ones (None), whose waiter gets None once they are durable.

        Returns `has_room`.
        """
        found = self._path.topics.get(topic) or self._path.topic(topic)
        if transaction is not None:
            if not found.registered:
                self._register(found)
            self.transactions.send(found, rows, transaction)
            if not self._path.through_service and found.has_group and self.welcomed:
                self._path.take()
        else:
            if found.collecting:
                self.transactions.send_topic_early(found)
            self._path.add(found, rows, None, waiter)
        return self._path.unacknowledged < self._path.credits

    def send_batch(self, topic: str, records: Batch, transaction: OpenTransaction, set_bytes: int) -> None:
        """Send records of an open transaction as a Batch; `set_bytes` as in SendColumns."""
        found = self._path.topic(topic)
        self._register(found)
        self.transactions.send_batch(found, records, transaction, set_bytes)

    def forget(self, waiter: Waiter) -> None:
        """Remove a waiter for ids or room."""
        for waiting in (self._for_ids, self._for_room):
            if waiter in waiting:
                waiting.remove(waiter)

    def tick(self) -> None:
        """Announce long transactions, send their records, and return unused ids. Call it about once a second."""
        self.transactions.tick()
        self._idle += 1
        if self.welcomed and not self.transactions.ids() and self._idle > IDLE_TICKS:
            self._returned += tuple(_blocks(self.ids))
            self.ids.clear()

    # Frames of the service

    def _welcome(self, welcome: Welcome) -> None:
        self.session, self._shard = welcome.session, welcome.shard
        self.max_message_bytes = self._path.limit(welcome.max_message_bytes)
        self.welcomed = True
        for txn, state in welcome.states:
            self.transactions.adopted(txn, state)
        self.requests.again()
        self._lease()

    def _take_sent(self) -> None:
        """Handle what became of sends."""
        for result in self._path.take_results():
            if result.error is not None:
                self._fail(result, result.error)
            if result.settled:
                self.transactions.settle(result.flight)
                self.progress += 1
        if self._for_room and self.has_room:
            self._wake(self._for_room)

    def _fail(self, result: SendResult, error: Error) -> None:
        flight, _, txn, _ = result
        if isinstance(error, UnregisteredTopic) or (flight.runs and txn is None):
            self._register_again((flight.send.topic,))
        for transaction, _ in flight.runs:
            if txn is None or transaction.txn == txn:
                self.transactions.fail(transaction, error)
        if isinstance(error, DiskFailed):  # it may have failed after the records were durable
            error = send_unknown(flight.send.topic, error)
        self.results += [(waiter, error) for waiter in flight.waiters]
        flight.waiters.clear()

    def _answer(self, answers: Iterable[NumberedResult]) -> None:
        for number, result in answers:
            if isinstance(result, (UnknownSession, CoordinatorStopped)):
                self.broken = result
            elif (request := self.requests.unanswered.pop(number, None)) is None:
                continue
            elif request.field == "commits":
                if isinstance(result, UnregisteredTopic):
                    self._register_again(request.subject.counts)
                self.transactions.committed(request, result)
            elif request.field == "leases":
                self._leased(result)
            elif request.field == "registers":
                self._registered(request.subject, result)
            elif request.field == "begins":
                if isinstance(result, Error):
                    self.transactions.fail(request.subject, result)
            else:
                if request.field == "aborts" and request.subject is not None:  # else another session began it
                    self.transactions.close(request.subject)
                if request.waiter is not None:
                    self.results.append((request.waiter, result))

    def _leased(self, result: Result) -> None:
        self._leasing = False
        if isinstance(result, Leased):
            if self._for_ids:
                self._want = min(self._want * 2, LARGEST)
            if not self.draining:
                self.ids.extend(range(result.first, result.first + result.size))
                self._wake(self._for_ids)
        elif isinstance(result, Error) and self._for_ids:
            if isinstance(result, TooManyTransactions) and self._want > SMALLEST:
                self._want = max(self._want // 4, SMALLEST)
                self._lease()
            else:
                self._wake(self._for_ids, result)

    def _register(self, topic: SendTopic) -> None:
        if not (topic.registered or topic.asked):
            topic.asked = True
            self.requests.ask("registers", NamedRequest(next(self.requests.numbers), topic.name), subject=topic)

    def topic_deleted(self, name: str) -> None:
        """A topic was deleted: register it again before its next transactional records."""
        if name in self._path.topics:
            self._register_again((name,))

    def _register_again(self, names: Iterable[str]) -> None:
        """Register topics again, because they may have been re-created; their transactional records wait for that."""
        for topic in map(self._path.topic, names):
            topic.registered = False
            if topic.has_transactional:
                self._register(topic)

    def _registered(self, topic: SendTopic, result: Result) -> None:
        if not isinstance(result, Error):
            self._path.registered(topic)
            return
        self.transactions.fail_collected(topic, result)
        for flight in self._path.not_registered(topic):
            for transaction, _ in flight.runs:
                self.transactions.fail(transaction, result)
            self.transactions.settle(flight)

    def _lease(self) -> None:
        if not self._leasing and self.welcomed and not self.draining:
            self._leasing = True
            self.requests.ask("leases", LeaseRequest(next(self.requests.numbers), self._want))

    def _wake(self, waiting: list[Waiter], result: Result | None = None) -> None:
        self.results += [(waiter, result) for waiter in waiting]
        waiting.clear()


def _blocks(ids: Iterable[int]) -> Iterator[IdBlock]:
    """Return ids as blocks of consecutive ones."""
    for _, block in itertools.groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        numbers = [least for _, least in block]
        yield IdBlock(numbers[0], len(numbers))


def _by_error(answer: tuple[int, Result]) -> bool:
    return not isinstance(answer[1], Error)


def _unanswered(request: PendingRequest, error: Error) -> Error:
    """Return the error of a request that will not be answered."""
    unknown = request.field == "commits"
    return OutcomeUnknown(request.subject.txn, str(error)) if unknown else error
