"""What the parts of a coordinator share: its transactions, its logs, its answers."""

from __future__ import annotations

import heapq

from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.journal import GroupDurable, Journal
from txnbuffer.coordinator.markers import Markers
from txnbuffer.coordinator.messages import Answers, Effect, Result, StopAnswering
from txnbuffer.coordinator.outcomes import Outcomes
from txnbuffer.coordinator.progress import Progress
from txnbuffer.coordinator.transaction import Transaction, Waiter
from txnbuffer.errors import TIME_UP, OutcomeForgotten, TransactionAborted, UnknownTransaction
from txnbuffer.model import Outcome, TxnId


class Core:
    """`live`: transactions by `least`, from their first word until they are settled.

    `topics`: the registered ones; True: durably known as one that may have one-phase markers.
    `now`: seconds since 1970, never going back.
    """

    def __init__(
        self, shard: int, epoch: int, config: Config, history: History, group_durable: GroupDurable, now: float
    ) -> None:
        self.shard = shard
        self.epoch = epoch
        self.config = config
        self.now = now
        self.stopped: str | None = None
        self.live: dict[int, Transaction] = {}
        self.topics: dict[str, bool] = dict(history.topics)
        self.progress = Progress(history.low_water_mark, gaps=history.gaps(history.next_id(epoch)))
        self._skipped = [(one.skipped, one.first) for one in history.owners.values()]
        self.outcomes = Outcomes(config.remember)
        self.journal = Journal(epoch, history.next_group, config.max_group, config.max_message_bytes, group_durable)
        self.journal.now = now
        self.markers = Markers(shard, epoch, self.progress, config.max_message_bytes)
        self.effects: list[Effect] = []
        self._answers: dict[str, list[tuple[int, Result]]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def stop(self, reason: str) -> None:
        """Answer nothing more: what is under way is for the next owner to tell."""
        if self.stopped is None:
            self.stopped = reason
            self._answers.clear()
            self.effects = [StopAnswering(reason)]

    def answer(self, session: str, request: int, result: Result) -> None:
        answers = self._answers.get(session)
        if answers is None:
            self._answers[session] = [(request, result)]
        else:
            answers.append((request, result))

    def answer_outcome(self, waiter: Waiter, txn: TxnId, outcome: Outcome, reason: str) -> None:
        """A durable outcome: an error for whoever asked for a commit that became an abort."""
        session, request, commit = waiter
        if commit and outcome is Outcome.ABORT:
            self.answer(session, request, TransactionAborted(txn, reason))
        else:
            self.answer(session, request, outcome)

    def answer_ended(self, waiter: Waiter, txn: TxnId) -> None:
        """The transaction is settled: its outcome if that is remembered, never a guess."""
        outcome = self.outcomes.find(txn.least)
        if outcome is None:
            gone = never_leased(txn) if self.was_skipped(txn.least) else OutcomeForgotten(txn)
            self.answer(waiter[0], waiter[1], gone)
        else:
            self.answer_outcome(waiter, txn, outcome, self.why_aborted(txn))

    def was_skipped(self, least: int) -> bool:
        """Whether an id is known as one that no owner of this log leased, though owners leased higher ones."""
        return any(skipped <= least < first for skipped, first in self._skipped)

    def why_aborted(self, txn: TxnId) -> str:
        """As far as that is remembered."""
        return TIME_UP if self.outcomes.timed_out(txn.least) else "it had ended before"

    def watch(self, transaction: Transaction, deadline: float) -> None:
        """End a transaction that is still open then."""
        transaction.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, transaction.txn.least))
        if len(self._deadlines) > 1000 + 4 * len(self.live):  # most of those watched have ended
            live = self.live
            self._deadlines = [
                (due, least) for due, least in self._deadlines if least in live and live[least].deadline == due
            ]
            heapq.heapify(self._deadlines)

    def overdue(self) -> list[Transaction]:
        """Transactions whose time is up, each told once."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= self.now:
            deadline, least = heapq.heappop(self._deadlines)
            transaction = self.live.get(least)
            if transaction is not None and transaction.deadline == deadline:
                found.append(transaction)
        return found

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        if self.stopped is None:
            append = self.journal.take()
            if append is not None:
                effects.append(append)
            effects += self.markers.take()
        answers, self._answers = self._answers, {}
        effects += [Answers(session, tuple(items)) for session, items in answers.items()]
        return effects


def never_leased(txn: TxnId) -> UnknownTransaction:
    return UnknownTransaction(
        f"transaction {txn} was never leased by this log: if an older copy of it was put back, what the transaction "
        "wrote is gone; else the id is wrong"
    )
