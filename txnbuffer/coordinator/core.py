"""What the parts of a coordinator share: its transactions, its logs, its answers.

Markers on their way to the topics, many transactions in each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from pyroaring import BitMap64

from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.journal import DecisionJournal, GroupDurable
from txnbuffer.coordinator.messages import (
    AppendMarker,
    CoordinatorConfig,
    Effect,
    Result,
    SessionResults,
    StopAnswering,
)
from txnbuffer.coordinator.progress import Outcomes, Progress
from txnbuffer.coordinator.sizes import marker_items
from txnbuffer.coordinator.transaction import TransactionState, Waiter
from txnbuffer.errors import TIME_UP, OutcomeForgotten, TransactionAborted, UnknownTransaction
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId

MAX_ITEMS = 10_000
"""Transactions in one marker, if the topics take messages as large as that."""

Queue = tuple[str, bool]
"""A topic, and whether the decisions stand in the decision log."""


class Markers:
    """Every marker carries the epoch, and the low-water mark that is durable by then; none has over `max_bytes`."""

    def __init__(self, shard: int, epoch: int, progress: Progress, max_bytes: int) -> None:
        self._shard = shard
        self._epoch = epoch
        self._progress = progress
        self._most = min(MAX_ITEMS, marker_items(max_bytes))
        self._waiting: dict[Queue, list[MarkerItem]] = {}
        self._failed: dict[Queue, list[MarkerItem]] = {}
        self._under_way: dict[int, tuple[Queue, tuple[MarkerItem, ...]]] = {}
        self._answered: dict[str, BitMap64] = {}
        self._token = 0

    def add(self, topic: str, decided: bool, item: MarkerItem) -> None:
        queue = (topic, decided)
        items = self._waiting.get(queue)
        if items is None:
            self._waiting[queue] = [item]
        else:
            items.append(item)

    def answer_query(self, topic: str, item: MarkerItem) -> None:
        """Answer a question about what is ongoing in a topic: once, however often it is asked until that is read."""
        answered = self._answered.setdefault(topic, BitMap64())
        if item.txn.least not in answered:
            answered.add(item.txn.least)
            self.add(topic, True, item)

    def queries_settled(self, topic: str, ids: Iterable[int]) -> None:
        """The topic's buffer has read how these ended: nobody asks about them any more."""
        answered = self._answered.get(topic)
        if answered is not None:
            answered.difference_update(BitMap64(ids))
            if not answered:
                del self._answered[topic]

    def epoch_marker(self) -> Marker:
        return Marker(self._shard, self._epoch, self._progress.low_water_mark, True, ())

    def take(self) -> Iterator[AppendMarker]:
        """What is to be appended now."""
        waiting, self._waiting = self._waiting, {}
        mark = self._progress.low_water_mark
        for queue, items in waiting.items():
            topic, decided = queue
            for start in range(0, len(items), self._most):
                some = tuple(items[start : start + self._most])
                self._token += 1
                self._under_way[self._token] = (queue, some)
                yield AppendMarker(self._token, topic, Marker(self._shard, self._epoch, mark, decided, some))

    def durable(self, token: int) -> tuple[Queue, tuple[MarkerItem, ...]] | None:
        """What a marker said that is durable now; None if that is known already."""
        return self._under_way.pop(token, None)

    def failed(self, token: int) -> None:
        """A marker's fate is unknown: it is written again at the next `retry`, which changes nothing if it landed."""
        lost = self._under_way.pop(token, None)
        if lost is not None:
            queue, items = lost
            self._failed.setdefault(queue, []).extend(items)

    def retry(self, wanted: Callable[[str, bool, MarkerItem], bool]) -> None:
        """Queue again what failed and is still wanted."""
        failed, self._failed = self._failed, {}
        for (topic, decided), items in failed.items():
            for item in items:
                if wanted(topic, decided, item):
                    self.add(topic, decided, item)
                else:
                    self.queries_settled(topic, (item.txn.least,))  # who still asks is answered again

    def forget_topic(self, topic: str) -> None:
        """The topic is gone, and what was to be written to it."""
        self.forget_answers(topic)
        for queues in (self._waiting, self._failed):
            for decided in (False, True):
                queues.pop((topic, decided), None)

    def forget_answers(self, topic: str) -> None:
        """The topic is another one: what was told there is gone."""
        self._answered.pop(topic, None)


class Core:
    """`live`: transactions by `least`, from their first word until they are settled.

    `topics`: the registered ones; True: durably known as one that may have one-phase markers.
    `now`: seconds since 1970, never going back.
    """

    def __init__(
        self,
        shard: int,
        epoch: int,
        config: CoordinatorConfig,
        history: History,
        group_durable: GroupDurable,
        now: float,
    ) -> None:
        self.shard = shard
        self.epoch = epoch
        self.config = config
        self.now = now
        self.stopped: str | None = None
        self.live: dict[int, TransactionState] = {}
        self.topics: dict[str, bool] = dict(history.topics)
        self.progress = Progress(history.low_water_mark, gaps=history.gaps(history.next_id(epoch)))
        self._skipped = [(one.skipped, one.first) for one in history.owners.values()]
        self.outcomes = Outcomes(config.remember)
        self.journal = DecisionJournal(
            epoch, history.next_group, config.max_group, config.max_message_bytes, group_durable
        )
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

    def watch(self, transaction: TransactionState, deadline: float) -> None:
        """End a transaction that is still open then."""
        transaction.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, transaction.txn.least))
        if len(self._deadlines) > 1000 + 4 * len(self.live):  # most of those watched have ended
            live = self.live
            self._deadlines = [
                (due, least) for due, least in self._deadlines if least in live and live[least].deadline == due
            ]
            heapq.heapify(self._deadlines)

    def overdue(self) -> list[TransactionState]:
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
        effects += [SessionResults(session, tuple(items)) for session, items in answers.items()]
        return effects


def never_leased(txn: TxnId) -> UnknownTransaction:
    return UnknownTransaction(
        f"transaction {txn} was never leased by this log: if an older copy of it was put back, what the transaction "
        "wrote is gone; else the id is wrong"
    )
