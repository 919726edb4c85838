"""What was asked of the service and is not answered: kept until it is, over as many connections as it takes.

The transactions that a client has open, and how they come to their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from txnbuffer.client.outbox import OpenTransaction, TransactionRun, Waiter
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
"""The part of a client's frame that a request is a row of."""


class PendingRequest(NamedTuple):
    """`subject`: the transaction or topic that it is about."""

    field: Field
    row: Any
    waiter: Waiter
    subject: Any


class Requests:
    def __init__(self) -> None:
        self.unanswered: dict[int, PendingRequest] = {}
        self._number = 0
        self._queued: dict[Field, list[Any]] = {}
        self._sent: set[int] = set()  # those of `unanswered` that went over an older connection

    def number(self) -> int:
        """The number of the next request."""
        self._number += 1
        return self._number

    def ask(self, field: Field, row: Any, waiter: Waiter = None, subject: Any = None) -> None:
        """Put a request, a row that begins with its number, into the next frame."""
        self.unanswered[row[0]] = PendingRequest(field, row, waiter, subject)
        self._queue(field, row)

    def answered(self, number: int) -> PendingRequest | None:
        return self.unanswered.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Take a request back; False: it is on its way already."""
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
        """Put all that is unanswered into the next frame, in the order in which it was asked."""
        queued = {row[0] for rows in self._queued.values() for row in rows}
        self._sent = (self._sent & set(self.unanswered)) | (set(self.unanswered) - queued)
        self._queued.clear()
        for request in self.unanswered.values():
            self._queue(request.field, request.row)

    def stop_waiting(self, *, visible: bool) -> list[PendingRequest]:
        """Nobody waits any more, as if none had been given; those who did. `visible`: for visibility neither."""
        told = []
        for number, request in self.unanswered.items():
            patient = request.field == "commits" and request.row.wait_visible and not visible
            if request.waiter is not None and not patient:
                told.append(request)
                self.unanswered[number] = request._replace(waiter=None)
        return told

    def drop_all(self) -> None:
        self.unanswered.clear()
        self._queued.clear()

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for an answer."""
        return any(request.waiter is not None for request in self.unanswered.values())

    def take(self) -> dict[str, Any]:
        """The parts of the next frame."""
        queued, self._queued = self._queued, {}
        return {field: tuple(rows) for field, rows in queued.items() if rows}

    def _queue(self, field: Field, row: Any) -> None:
        rows = self._queued.get(field)
        if rows is None:
            self._queued[field] = [row]
        else:
            rows.append(row)


Answer: TypeAlias = "tuple[Waiter, Result | None]"
"""A waiter and its result; None: it was waited for something that has no result, and it is there."""

LOST = (UnknownTransaction, ForeignTransaction, UnregisteredTopic)
"""Errors that say that the service lost what it knew; a new transaction does not meet them."""


class EndPlan(NamedTuple):
    """How a transaction is to end, once its sends are settled; `ready`: not now, but tell how it stands."""

    commit: bool
    waiter: Waiter
    wait_visible: bool = False
    positions: tuple[ConsumerPosition, ...] = ()
    winners: tuple[Branch, ...] = ()
    ready: bool = False


class Transactions:
    """`results` takes what waiters are to be told."""

    def __init__(self, requests: Requests, results: list[Answer]) -> None:
        self._requests = requests
        self._results = results
        self._open: dict[int, OpenTransaction] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> tuple[TxnId, ...]:
        return tuple(transaction.txn for transaction in self._open.values())

    def begin(self, txn: TxnId, timeout: float | None, naming: ProducerSequence | None) -> OpenTransaction:
        transaction = OpenTransaction(txn, self._tick, timeout, naming)
        self._open[txn.least] = transaction
        if timeout is not None or naming is not None:
            self._announce(transaction)
        return transaction

    def tick(self) -> None:
        """Announce what is open for longer than a tick; most transactions have ended by then."""
        for transaction in self._open.values():
            if transaction.start >= self._tick:
                break
            if not (transaction.announced or transaction.ending):
                self._announce(transaction)
        self._tick += 1

    def end(self, transaction: OpenTransaction, plan: EndPlan) -> None:
        """Commit or abort it, once its sends are settled."""
        transaction.ending = True
        transaction.then = plan
        if not transaction.pending:
            self._end(transaction)

    def withdraw_commit(self, transaction: OpenTransaction) -> bool:
        """Make a commit that is not on its way yet an abort; False: it may happen."""
        if transaction.then is None:
            asked = self._requests.unanswered.items()
            ours = (
                number for number, request in asked if request.field == "commits" and request.subject is transaction
            )
            if not self._requests.withdraw(next(ours, 0)):
                return False
        self.end(transaction, EndPlan(commit=False, waiter=None))
        return True

    def settle(self, runs: Sequence[TransactionRun]) -> None:
        """These records are durable, or failed and told."""
        for transaction, records in runs:
            transaction.pending -= records
            if not transaction.pending and transaction.then is not None:
                self._end(transaction)

    def fail(self, transaction: OpenTransaction, error: Error) -> None:
        """From now on it can only abort; that it was fenced is why, whatever came of that before."""
        if transaction.failure is None or isinstance(error, Fenced):
            transaction.failure = refusal(transaction, error)

    def adopted(self, txn: TxnId, state: State | Error) -> None:
        """What the service says of a transaction after the connection was lost."""
        transaction = self._open.get(txn.least)
        if transaction is None or (transaction.ending and transaction.then is None):
            return  # its end was asked for, and the answer will tell
        if isinstance(state, Error):
            self.fail(transaction, state)
        elif state is not State.OPEN:
            self.fail(transaction, TransactionAborted(txn, "it ended while the connection was lost"))

    def committed(self, request: PendingRequest, result: Result) -> None:
        """The answer to a commit."""
        transaction: OpenTransaction = request.subject
        # Where a topic is not registered nothing of it happens, and another one registers it anew.
        told = refusal(transaction, result) if isinstance(result, UnregisteredTopic) else result
        self._results.append((request.waiter, told))
        if isinstance(result, Error) and not isinstance(result, (TransactionAborted, NotVisible)):
            # The service refused to commit, and may have left it open.
            transaction.failure = result
            self.end(transaction, EndPlan(commit=False, waiter=None))
        else:
            self.close(transaction)

    def close(self, transaction: OpenTransaction) -> None:
        """The transaction is over."""
        transaction.ending, transaction.then = True, None
        self._open.pop(transaction.txn.least, None)
        if transaction.announced:
            self._requests.unanswered.pop(transaction.announced, None)

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for an end that can't be asked for yet."""
        return any(one.then is not None and one.then.waiter is not None for one in self._open.values())

    def stop_waiting(self, error: Error) -> None:
        """Nobody waits any more for sends to be settled: whatever was to come, they abort then."""
        for transaction in self._open.values():
            plan: EndPlan | None = transaction.then
            if plan is not None and plan.waiter is not None:
                self.fail(transaction, error)
                self._results.append((plan.waiter, transaction.failure if plan.commit else error))
                transaction.then = EndPlan(commit=False, waiter=None)

    def give_up(self, error: Error) -> None:
        """No end can be asked for any more: the service will abort them all."""
        for transaction in list(self._open.values()):
            if transaction.then is not None and transaction.then.waiter is not None:
                self._results.append((transaction.then.waiter, refusal(transaction, error)))
            self.fail(transaction, error)
            self.close(transaction)

    def _announce(self, transaction: OpenTransaction) -> None:
        transaction.announced = self._requests.number()
        begin = Begin(transaction.announced, transaction.txn, transaction.timeout, None, transaction.naming)
        self._requests.ask("begins", begin, subject=transaction)

    def _finish(self, transaction: OpenTransaction) -> None:
        """One of many for a number is whole: it outlives its session."""
        naming: ProducerSequence | None = transaction.naming
        if naming is not None and naming.is_participant:
            transaction.naming = naming._replace(epoch=FINISHED_PARTICIPANT)
            self._requests.unanswered.pop(transaction.announced, None)
            self._announce(transaction)

    def _end(self, transaction: OpenTransaction) -> None:
        """All its sends are settled: ask for the end that was planned."""
        plan: EndPlan = transaction.then
        transaction.then = None
        number, waiter = self._requests.number(), plan.waiter
        topics = tuple(transaction.counts)
        if plan.commit and transaction.failure is None:
            records, naming = tuple(transaction.counts.values()), transaction.naming
            extras = (naming, plan.winners, (), plan.positions)
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
    """Why a transaction can only abort: TransactionAborted where doing it again can help."""
    if isinstance(error, TransactionAborted) or not (error.retryable or isinstance(error, LOST)):
        return error
    aborted = TransactionAborted(transaction.txn, str(error))
    aborted.__cause__ = error
    return aborted
