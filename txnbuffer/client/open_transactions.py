"""The open transactions of a session, and its unanswered requests

A request that is not answered when the connection is lost is sent again over the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from txnbuffer.client.outbox import OpenTransaction, TransactionSlice, Waiter
from txnbuffer.coordinator.messages import (
    FINISHED_PARTICIPANT,
    Begin,
    Branch,
    Commit,
    ConsumerPosition,
    ProducerSequence,
    Result,
    State,
)
from txnbuffer.errors import (
    Error,
    Fenced,
    ForeignTransaction,
    NotVisible,
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


class PendingRequest(NamedTuple):
    """An unanswered request. `subject`: the transaction or topic that it is about."""

    field: Field
    row: Any
    waiter: Waiter
    subject: Any


class Requests:
    """The unanswered requests of a session, by number."""

    def __init__(self) -> None:
        self.unanswered: dict[int, PendingRequest] = {}
        self._number = 0
        self._queued: dict[Field, list[Any]] = {}
        self._sent: set[int] = set()  # unanswered requests sent over an earlier connection

    def number(self) -> int:
        """Return the number of the next request."""
        self._number += 1
        return self._number

    def ask(self, field: Field, row: Any, waiter: Waiter = None, subject: Any = None) -> None:
        """Put a request into the next frame; the row begins with the number of the request."""
        self.unanswered[row[0]] = PendingRequest(field, row, waiter, subject)
        self._queue(field, row)

    def answered(self, number: int) -> PendingRequest | None:
        """Remove and return an answered request."""
        return self.unanswered.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Withdraw a request; False if it was already sent."""
        request = self.unanswered.get(number)
        if request is None:
            return False
        rows = self._queued.get(request.field, [])
        if number in self._sent or request.row not in rows:
            return False
        rows.remove(request.row)
        del self.unanswered[number]
        return True

    def again(self) -> None:
        """Put all unanswered requests into the next frame, in the order of their numbers."""
        queued = {row[0] for rows in self._queued.values() for row in rows}
        self._sent = (self._sent & set(self.unanswered)) | (set(self.unanswered) - queued)
        self._queued.clear()
        for request in self.unanswered.values():
            self._queue(request.field, request.row)

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
        self._queued.clear()

    @property
    def aborting(self) -> bool:
        """Whether the abort of a transaction is not answered."""
        return any(request.field == "aborts" for request in self.unanswered.values())

    @property
    def waited_for(self) -> bool:
        """Whether a caller waits for an answer."""
        return any(request.waiter is not None for request in self.unanswered.values())

    def take(self) -> dict[str, Any]:
        """Return the fields of the next frame."""
        queued, self._queued = self._queued, {}
        return {field: tuple(rows) for field, rows in queued.items() if rows}

    def _queue(self, field: Field, row: Any) -> None:
        rows = self._queued.get(field)
        if rows is None:
            self._queued[field] = [row]
        else:
            rows.append(row)


Answer: TypeAlias = "tuple[Waiter, Result | None]"
"""A waiter and its result; None if it only waited for a condition."""

LOST = (UnknownTransaction, ForeignTransaction, UnregisteredTopic)
"""Errors after which a new transaction can succeed, because the service lost state of this one."""


class EndPlan(NamedTuple):
    """How a transaction ends once its sends are settled. `ready`: finish its branch and query its state instead."""

    commit: bool
    waiter: Waiter
    wait_visible: bool = False
    positions: tuple[ConsumerPosition, ...] = ()
    winners: tuple[Branch, ...] = ()
    ready: bool = False


class Transactions:
    """The open transactions of a session. The results of waiters are appended to `results`."""

    def __init__(self, requests: Requests, results: list[Answer]) -> None:
        self._requests = requests
        self._results = results
        self._open: dict[int, OpenTransaction] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> tuple[TxnId, ...]:
        return tuple(transaction.txn for transaction in self._open.values())

    def begin(self, txn: TxnId, timeout: float | None, sequence: ProducerSequence | None) -> OpenTransaction:
        transaction = OpenTransaction(txn, self._tick, timeout, sequence)
        self._open[txn.least] = transaction
        if timeout is not None or sequence is not None:
            self._announce(transaction)
        return transaction

    def tick(self) -> None:
        """Announce to the service the transactions that are open for more than a tick; most have ended by then."""
        for transaction in self._open.values():
            if transaction.start >= self._tick:
                break
            if not (transaction.announced or transaction.ending):
                self._announce(transaction)
        self._tick += 1

    def end(self, transaction: OpenTransaction, plan: EndPlan) -> None:
        """Commit or abort a transaction once its sends are settled."""
        transaction.ending = True
        transaction.then = plan
        if not transaction.pending:
            self._end(transaction)

    def abort_open(self) -> None:
        """Abort the transactions whose end was not requested."""
        for transaction in [one for one in self._open.values() if not one.ending]:
            self.end(transaction, EndPlan(commit=False, waiter=None))

    @property
    def abort_planned(self) -> bool:
        """Whether an abort waits for sends to be settled."""
        plans = [one.then for one in self._open.values() if one.then is not None]
        return any(not (plan.commit or plan.ready) for plan in plans)

    def withdraw_commit(self, transaction: OpenTransaction) -> bool:
        """Turn a commit that was not sent yet into an abort; False if it was sent."""
        if transaction.then is None:
            asked = self._requests.unanswered.items()
            commits = (
                number for number, request in asked if request.field == "commits" and request.subject is transaction
            )
            if not self._requests.withdraw(next(commits, 0)):
                return False
        self.end(transaction, EndPlan(commit=False, waiter=None))
        return True

    def settle(self, runs: Sequence[TransactionSlice]) -> None:
        """These records are durable or have failed. End the transactions that waited for them."""
        for transaction, records in runs:
            transaction.pending -= records
            if not transaction.pending and transaction.then is not None:
                self._end(transaction)

    def fail(self, transaction: OpenTransaction, error: Error) -> None:
        """Make a transaction unable to commit. Fenced replaces an earlier error."""
        if transaction.failure is None or isinstance(error, Fenced):
            transaction.failure = refusal(transaction, error)

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
        # If a topic is not registered, nothing has committed; a new transaction registers the topic again.
        reported = refusal(transaction, result) if isinstance(result, UnregisteredTopic) else result
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
            plan: EndPlan | None = transaction.then
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
        transaction.announced = self._requests.number()
        begin = Begin(transaction.announced, transaction.txn, transaction.timeout, None, transaction.sequence)
        self._requests.ask("begins", begin, subject=transaction)

    def _finish(self, transaction: OpenTransaction) -> None:
        """Announce a branch as finished, so that it does not abort when its session ends."""
        sequence: ProducerSequence | None = transaction.sequence
        if sequence is not None and sequence.is_participant:
            transaction.sequence = sequence._replace(epoch=FINISHED_PARTICIPANT)
            self._requests.unanswered.pop(transaction.announced, None)
            self._announce(transaction)

    def _end(self, transaction: OpenTransaction) -> None:
        """Request the planned end; all sends are settled."""
        plan: EndPlan = transaction.then
        transaction.then = None
        number, waiter = self._requests.number(), plan.waiter
        topics = tuple(transaction.counts)
        if plan.commit and transaction.failure is None:
            records, sequence = tuple(transaction.counts.values()), transaction.sequence
            extras = (sequence, plan.winners, (), plan.positions)
            commit = Commit(number, transaction.txn, topics, records, plan.wait_visible, *extras)
            self._requests.ask("commits", commit, waiter, transaction)
            return
        if plan.ready and transaction.failure is None:
            self._finish(transaction)
            self._requests.ask("queries", Query(number, transaction.txn), waiter, transaction)
            return
        if plan.commit or plan.ready:
            self._results.append((waiter, transaction.failure))
            waiter = None
        self._requests.ask("aborts", Abort(number, transaction.txn, topics), waiter, transaction)


def refusal(transaction: OpenTransaction, error: Error) -> Error:
    """Return the error of a transaction that can only abort: TransactionAborted if a new transaction can succeed."""
    if isinstance(error, TransactionAborted) or not (error.retryable or isinstance(error, LOST)):
        return error
    aborted = TransactionAborted(transaction.txn, str(error))
    aborted.__cause__ = error
    return aborted
