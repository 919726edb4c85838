"""What a session has asked of the service, and its open transactions

A request is repeated until it is answered. A transaction ends with a request: a commit is sent in the frame with the
last of its records or in a later one, an abort once all of its sends are settled. After a failed send only an abort is
possible. If the records do not go through the service, a commit waits for all sends as well.

A transaction whose records go through the service collects them until it commits. It sends them early, and all later
ones at once, if they are more than COLLECT_BYTES, at the first tick after a whole one, before an ordinary record of the
same topic, when callers wait for room, and if another process commits it. Then it is announced first if it has a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from broker_io.batch import ROW_BYTES, Batch
from broker_io.position import maker
from txnbuffer.client.path.record_path import (
    EndPlan,
    OpenTransaction,
    RecordPath,
    SendInFlight,
    SendTopic,
    Waiter,
)
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.coordinator.messages import FINISHED_PARTICIPANT, Begin, Commit, ProducerSequence, Result, State
from txnbuffer.errors import (
    Error,
    Fenced,
    ForeignTransaction,
    LimitExceeded,
    NotVisible,
    OutcomeUnknown,
    TransactionAborted,
    UnknownTransaction,
    UnregisteredTopic,
)
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import Abort, Query

Field: TypeAlias = Literal[
    "registers", "leases", "open_names", "delete_names", "joins", "members", "begins", "commits", "aborts", "queries"
]
"""A field of the client frame that has requests as rows."""
REQUESTS: frozenset[str] = frozenset(get_args(Field))


NumberedResult: TypeAlias = tuple[int, Result]


class PendingRequest(NamedTuple):
    """An unanswered request. `subject`: the transaction or topic that it is about."""

    field: Field
    row: Any
    waiter: Waiter
    subject: Any


as_pending = maker(PendingRequest)
as_commit = maker(Commit)


class Requests:
    """The unanswered requests of a session, by number; they are repeated after the connection was lost.

    `numbers` has that of the next request. `queued`: the rows of the next frame, by field. `wake` is called when there
    is something to send.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.unanswered: dict[int, PendingRequest] = {}
        self.numbers = itertools.count(1)
        self.queued: dict[Field, list[Any]] = {}
        self._sent: set[int] = set()  # unanswered requests sent over an earlier connection
        self._delayed: dict[int, None] = {}  # commits whose records have to be sent again first

    def ask(self, field: Field, row: Any, waiter: Waiter = None, subject: Any = None) -> int:
        """Put a request into the next frame; return its number, with which its row begins."""
        number: int = row[0]
        self.unanswered[number] = as_pending((field, row, waiter, subject))
        first = not self.queued
        self.queued.setdefault(field, []).append(row)
        if first:
            self.wake()
        return number

    def unsent(self, number: int) -> bool:
        """Return whether a request was not sent over any connection."""
        request = self.unanswered.get(number)
        if request is None or number in self._sent:
            return False
        return number in self._delayed or request.row in self.queued.get(request.field, [])

    def withdraw(self, number: int) -> bool:
        """Withdraw a request; False if it was already sent."""
        if not self.unsent(number):
            return False
        request = self.unanswered.pop(number)
        if number in self._delayed:
            del self._delayed[number]
        else:
            self.queued[request.field].remove(request.row)
        return True

    def again(self) -> None:
        """Put all unanswered requests into the next frame, in the order of their numbers; a commit whose records have
        to be sent again is delayed.
        """
        queued = {row[0] for rows in self.queued.values() for row in rows}.union(self._delayed)
        self._sent = (self._sent & set(self.unanswered)) | (set(self.unanswered) - queued)
        self.queued.clear()
        self._delayed.clear()
        for number, request in self.unanswered.items():
            if request.field == "commits" and request.subject.unsent:
                self._delayed[number] = None
            else:
                self.queued.setdefault(request.field, []).append(request.row)

    def not_taken(self, number: int) -> None:
        """The service has not read a commit if it was sent over this connection only: it is as if it was not sent."""
        request = self.unanswered.get(number)
        if request is not None and number not in self._sent and request.row not in self.queued.get("commits", ()):
            self._delayed[number] = None

    def records_sent(self, number: int) -> None:
        """The records of a commit are in the next frame; if it was delayed, it is in that frame too."""
        if number in self._delayed:
            del self._delayed[number]
            self.queued.setdefault("commits", []).append(self.unanswered[number].row)

    def without_commits(self, answers: Sequence[NumberedResult]) -> tuple[list[NumberedResult], list[NumberedResult]]:
        """Return the answers to other requests, and those to commits."""
        others: list[NumberedResult] = []
        commits: list[NumberedResult] = []
        for answer in answers:
            request = self.unanswered.get(answer[0])
            (commits if request is not None and request.field == "commits" else others).append(answer)
        return others, commits

    def stop_waiting(self, *, visible: bool) -> list[PendingRequest]:
        """Remove waiters and return their requests; those of commits that wait for visibility only with `visible`."""
        stopped = []
        for number, request in self.unanswered.items():
            keeps_waiting = request.field == "commits" and request.row.wait_visible and not visible
            if request.waiter is not None and not keeps_waiting:
                stopped.append(request)
                self.unanswered[number] = request._replace(waiter=None)
        return stopped

    def drop_all(self) -> None:
        self.unanswered.clear()
        self.queued.clear()
        self._delayed.clear()

    def take(self) -> dict[str, Any]:
        """Return the fields of the next frame."""
        fields: dict[str, Any] = {}
        for field_, rows in self.queued.items():
            if rows:
                fields[field_] = tuple(rows)
        self.queued.clear()
        return fields


COLLECT_BYTES = 64 * 1024
"""Maximum bytes of records that a transaction collects until it commits."""

Answer: TypeAlias = "tuple[Waiter, Result | None]"
"""A waiter and its result; None if it only waited for a condition."""

LOST = (UnknownTransaction, ForeignTransaction, UnregisteredTopic)
"""Errors after which a new transaction can succeed, because the service lost state of this one."""


@dataclass(eq=False)
class Transactions:
    """The open transactions of a session. The results of waiters are appended to `results`.

    `register` registers a topic if necessary.
    """

    _requests: Requests
    _results: list[Answer]
    _path: RecordPath
    _register: Callable[[SendTopic], None]
    _open: dict[int, OpenTransaction] = field(default_factory=dict)
    _tick: int = 0

    def ids(self) -> tuple[TxnId, ...]:
        """The ids of the open transactions."""
        return tuple(transaction.txn for transaction in self._open.values())

    def begin(self, txn: TxnId, timeout: float | None, sequence: ProducerSequence | None) -> OpenTransaction:
        collects = self._path.through_service
        transaction = self._open[txn.least] = OpenTransaction(txn, self._tick, timeout, sequence, collects)
        if timeout is not None or (sequence is not None and (sequence.is_participant or not collects)):
            self._announce(transaction)
        return transaction

    def send(self, topic: SendTopic, rows: SendColumns, transaction: OpenTransaction) -> None:
        """Collect records of a transaction, or queue them."""
        first = transaction.count(topic.name, len(rows.values))
        if transaction.collects:
            size = rows.size + ROW_BYTES * len(rows.values)
            if transaction.collected_bytes + size <= COLLECT_BYTES:
                transaction.collected.append((topic, rows, first))
                transaction.collected_bytes += size
                self._path.unacknowledged += size
                topic.collecting[transaction.txn.least] = transaction
                return
            self._send_early(transaction)
        self._path.add(topic, rows, transaction, None, first)
        self._requests.wake()

    def send_batch(self, topic: SendTopic, records: Batch, transaction: OpenTransaction, set_bytes: int) -> None:
        """Queue records of a transaction as a send of their own."""
        self._send_early(transaction)
        first = transaction.count(topic.name, len(records))
        self._path.add_batch(topic, records, transaction, set_bytes, first)
        self._requests.wake()

    def send_all_early(self) -> None:
        """Queue everything that is collected, because the service has to acknowledge it before others can send."""
        for topic in self._path.topics.values():
            self.send_topic_early(topic)

    def send_topic_early(self, topic: SendTopic) -> None:
        """Queue what is collected for a topic before an ordinary record."""
        for transaction in [*topic.collecting.values()]:
            self._send_early(transaction)

    def _send_early(self, transaction: OpenTransaction) -> None:
        """Queue what a transaction has collected, and later records at once."""
        if not transaction.collects:
            return
        if transaction.failure is not None:
            self._queue(transaction, drop=True)
            return
        if transaction.sequence is not None and not transaction.announced:
            self._announce(transaction)
        self._queue(transaction)

    def _queue(self, transaction: OpenTransaction, *, drop: bool = False) -> None:
        """Queue what a transaction has collected, and later records at once; or `drop` it, as it cannot commit."""
        transaction.collects = drop and transaction.collects
        collected, idle = transaction.collected, not self._path.ready
        if not collected:
            return
        self._path.unacknowledged -= transaction.collected_bytes
        transaction.collected, transaction.collected_bytes = [], 0
        for topic, rows, first in collected:
            topic.collecting.pop(transaction.txn.least, None)
            if drop:
                transaction.pending -= len(rows.values)
                transaction.unsent -= len(rows.values)
                continue
            if not topic.registered:
                self._register(topic)
            self._path.add(topic, rows, transaction, None, first)
        if idle:
            self._requests.wake()

    def drop_collected(self) -> None:
        """Drop everything that is collected."""
        for transaction in self._open.values():
            self._queue(transaction, drop=True)

    def fail_collected(self, topic: SendTopic, error: Error) -> None:
        """Fail the transactions that have collected records for a topic, because it cannot be registered."""
        for transaction in [*topic.collecting.values()]:
            self.fail(transaction, error)

    def tick(self) -> None:
        """Announce the transactions that are open for more than a tick, and send what they have collected."""
        for transaction in self._open.values():
            if transaction.start >= self._tick:
                break
            if not transaction.ending:
                self._send_early(transaction)
                if not transaction.announced:
                    self._announce(transaction)
        self._tick += 1

    def end(self, transaction: OpenTransaction, plan: EndPlan) -> None:
        """Commit or abort a transaction; a commit that rides waits only until all records are in frames."""
        transaction.ending = True
        transaction.then = plan
        if transaction.failure is not None or not (plan.commit or plan.ready):
            self._queue(transaction, drop=True)
        elif plan.ready:
            self._send_early(transaction)
        else:
            self._queue(transaction)
        if not transaction.pending or (not transaction.unsent and self._rides(transaction, plan)):
            self._end(transaction, plan)

    def all_sent(self, transactions: Sequence[OpenTransaction]) -> None:
        """All records of these are in frames, the last of them in the next one, which their commits may share."""
        for transaction in transactions:
            plan = transaction.then
            if plan is None:
                self._requests.records_sent(transaction.commit)
            elif plan.commit and transaction.failure is None:
                self._end(transaction, plan)

    def _rides(self, transaction: OpenTransaction, plan: EndPlan) -> bool:
        return self._path.through_service and plan.commit and transaction.failure is None

    def uncommitted(self) -> list[OpenTransaction]:
        """The transactions with records whose end was not requested."""
        return [one for one in self._open.values() if one.counts and not one.ending]

    def abort_open(self) -> None:
        """Abort the transactions whose end was not requested."""
        for transaction in [one for one in self._open.values() if not one.ending]:
            self.end(transaction, EndPlan(commit=False, waiter=None))

    @property
    def aborting(self) -> bool:
        """Whether an abort waits for sends to be settled, or for its answer."""
        plans = [one.then for one in self._open.values() if one.then is not None]
        planned = any(not (plan.commit or plan.ready) for plan in plans)
        return planned or any(request.field == "aborts" for request in self._requests.unanswered.values())

    def withdraw_commit(self, transaction: OpenTransaction, waiter: Waiter = None) -> bool:
        """Turn a commit that was not sent yet into an abort; False if it was sent. `waiter` gets the answer to it."""
        number, unanswered = self._commit_of(transaction), self._requests.unanswered
        if transaction.then is not None or self._requests.withdraw(number):
            self.end(transaction, EndPlan(commit=False, waiter=waiter))
            return True
        if number:
            unanswered[number] = unanswered[number]._replace(waiter=waiter)
        else:
            self._results.append((waiter, transaction.answer or OutcomeUnknown(transaction.txn, "its answer was lost")))
        return False

    def commit_sent(self, transaction: OpenTransaction) -> bool:
        """Whether a commit was sent and is not answered."""
        number = self._commit_of(transaction)
        return bool(number) and not self._requests.unsent(number)

    def _commit_of(self, transaction: OpenTransaction) -> int:
        """The number of the request for the commit; 0 if there is none that is not answered."""
        return transaction.commit if transaction.commit in self._requests.unanswered else 0

    def settle(self, flight: SendInFlight) -> None:
        """The records of a send are durable or have failed. End the transactions that waited for them."""
        for transaction, records in flight.runs:
            transaction.pending -= records
            if not transaction.pending and transaction.then is not None:
                self._end(transaction, transaction.then)
        for waiter in flight.waiters:
            self._results.append((waiter, None))

    def fail(self, transaction: OpenTransaction, error: Error) -> None:
        """Make a transaction unable to commit. Fenced replaces an earlier error."""
        if transaction.failure is None or isinstance(error, Fenced):
            transaction.failure = refusal(transaction, error)
        self._queue(transaction, drop=True)

    def adopted(self, txn: TxnId, state: State | Error) -> None:
        """Handle the state of a transaction in the welcome of a new connection."""
        transaction = self._open.get(txn.least)
        if transaction is None or (transaction.ending and transaction.then is None):
            return  # its end was requested; the answer decides
        if isinstance(state, Error):
            self.fail(transaction, state)
        elif state is not State.OPEN:
            self.fail(transaction, TransactionAborted(txn, "it ended while there was no connection"))

    def committed(self, request: PendingRequest, result: Result) -> None:
        """Handle the answer to a commit."""
        transaction: OpenTransaction = request.subject
        reported = result
        if isinstance(result, UnregisteredTopic):
            # Nothing has committed; a new transaction registers the topic again.
            reported = refusal(transaction, result)
        elif isinstance(result, TransactionAborted) and transaction.failure is not None:
            reported = transaction.failure  # why the service misses records
        transaction.answer = reported
        self._results.append((request.waiter, reported))
        if isinstance(result, Error) and not isinstance(result, (TransactionAborted, NotVisible)):
            # The service rejected the commit, and may have left the transaction open.
            transaction.failure = result
            self.end(transaction, EndPlan(commit=False, waiter=None))
        else:
            self.close(transaction)

    def close(self, transaction: OpenTransaction) -> None:
        """Remove a transaction that has ended."""
        transaction.ending, transaction.then = True, None
        self._open.pop(transaction.txn.least, None)
        if transaction.announced:
            self._requests.unanswered.pop(transaction.announced, None)

    @property
    def waited_for(self) -> bool:
        """Whether a caller waits for a commit or abort that cannot be requested yet."""
        return any(one.then is not None and one.then.waiter is not None for one in self._open.values())

    def stop_waiting(self, error: Error) -> None:
        """Fail the callers that wait for sends to be settled; their transactions abort once the sends are."""
        for transaction in self._open.values():
            plan = transaction.then
            if plan is not None and plan.waiter is not None:
                self.fail(transaction, error)
                self._results.append((plan.waiter, transaction.failure if plan.commit else error))
                transaction.then = EndPlan(commit=False, waiter=None)

    def give_up(self, error: Error) -> None:
        """Close all transactions, because nothing can be requested any more; the service aborts them."""
        for transaction in list(self._open.values()):
            if transaction.then is not None and transaction.then.waiter is not None:
                self._results.append((transaction.then.waiter, refusal(transaction, error)))
            self.fail(transaction, error)
            self.close(transaction)

    def _announce(self, transaction: OpenTransaction) -> None:
        number = next(self._requests.numbers)
        begin = Begin(number, transaction.txn, transaction.timeout, None, transaction.sequence)
        transaction.announced = self._requests.ask("begins", begin, subject=transaction)

    def _end(self, transaction: OpenTransaction, plan: EndPlan) -> None:
        """Request the planned end."""
        transaction.then = None
        txn, topics, number = transaction.txn, tuple(transaction.counts), next(self._requests.numbers)
        sequence, waiter = transaction.sequence, plan.waiter
        if plan.commit and transaction.failure is None:
            _, _, wait_visible, positions, winners, _ = plan
            records = tuple(transaction.counts.values())
            row = as_commit((number, txn, topics, records, wait_visible, sequence, winners, (), positions))
            transaction.commit = self._requests.ask("commits", row, waiter, transaction)
            return
        if plan.ready and transaction.failure is None:
            if sequence is not None and sequence.is_participant:  # then it does not abort when its session ends
                transaction.sequence = sequence._replace(epoch=FINISHED_PARTICIPANT)
                self._requests.unanswered.pop(transaction.announced, None)
                self._announce(transaction)
            self._requests.ask("queries", Query(number, txn), waiter)
            return
        if plan.commit or plan.ready:
            self._results.append((waiter, transaction.failure))
            waiter = None
        written = () if transaction.collects else topics
        self._requests.ask("aborts", Abort(number, txn, written), waiter, transaction)


def refusal(transaction: OpenTransaction, error: Error) -> Error:
    """Return the error of a transaction that can only abort: TransactionAborted if a new transaction can succeed.

    LimitExceeded stays what it is, since it says when.
    """
    if isinstance(error, TransactionAborted | LimitExceeded) or not (error.retryable or isinstance(error, LOST)):
        return error
    aborted = TransactionAborted(transaction.txn, str(error))
    aborted.__cause__ = error
    return aborted
