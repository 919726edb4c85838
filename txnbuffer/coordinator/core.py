"""The state that all parts of a coordinator share: its transactions, its logs, its results, and its queue of markers

One marker carries the ends of many transactions.
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
"""The most transactions in one marker, if topics accept messages of that size."""

Queue = tuple[str, bool]
"""A topic, and whether the decision log has the decisions."""


class Markers:
    """The markers that topics still need, by topic, until they are durable there.

    Each marker carries the owner's epoch and the durable low-water mark, and has at most `max_bytes`.
    """

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
        """Answer an outcome query of a topic's buffer with a marker: once, until the buffer has applied the marker."""
        answered = self._answered.setdefault(topic, BitMap64())
        if item.txn.least not in answered:
            answered.add(item.txn.least)
            self.add(topic, True, item)

    def queries_settled(self, topic: str, ids: Iterable[int]) -> None:
        """The topic's buffer has applied the ends of these transactions, so it does not query them again."""
        answered = self._answered.get(topic)
        if answered is not None:
            answered.difference_update(BitMap64(ids))
            if not answered:
                del self._answered[topic]

    def epoch_marker(self) -> Marker:
        """A marker without transactions."""
        return Marker(self._shard, self._epoch, self._progress.low_water_mark, True, ())

    def take(self) -> Iterator[AppendMarker]:
        """The markers to append now."""
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
        """A marker is durable: return its topic and transactions, or None if it was reported before."""
        return self._under_way.pop(token, None)

    def failed(self, token: int) -> None:
        """A marker may or may not be durable: the next `retry` writes it again, which changes nothing if it is."""
        lost = self._under_way.pop(token, None)
        if lost is not None:
            queue, items = lost
            self._failed.setdefault(queue, []).extend(items)

    def retry(self, wanted: Callable[[str, bool, MarkerItem], bool]) -> None:
        """Queue the failed markers again, except for transactions that no longer need one."""
        failed, self._failed = self._failed, {}
        for (topic, decided), items in failed.items():
            for item in items:
                if wanted(topic, decided, item):
                    self.add(topic, decided, item)
                else:
                    self.queries_settled(topic, (item.txn.least,))  # a later query is answered again

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted: drop the markers that it still needed."""
        self.forget_answers(topic)
        for queues in (self._waiting, self._failed):
            for decided in (False, True):
                queues.pop((topic, decided), None)

    def forget_answers(self, topic: str) -> None:
        """The topic was deleted or re-created, and the answers to its queries are gone with it."""
        self._answered.pop(topic, None)


class Core:
    """The shared state of a coordinator.

    `live` has the transactions by `least`, from their first request until they are settled. `topics` has the registered
    topics; True: the decision log says that the topic may have one-phase markers. `now` is in seconds since 1970, and
    never goes back.
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
        """Answer nothing more: the next owner finds out how the open requests ended."""
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
        """Answer with a durable outcome, or with an error if the request was a commit and the outcome is an abort."""
        session, request, commit = waiter
        if commit and outcome is Outcome.ABORT:
            self.answer(session, request, TransactionAborted(txn, reason))
        else:
            self.answer(session, request, outcome)

    def answer_ended(self, waiter: Waiter, txn: TxnId) -> None:
        """Answer about a settled transaction: its outcome if it is remembered, an error otherwise."""
        outcome = self.outcomes.find(txn.least)
        if outcome is None:
            gone = never_leased(txn) if self.was_skipped(txn.least) else OutcomeForgotten(txn)
            self.answer(waiter[0], waiter[1], gone)
        else:
            self.answer_outcome(waiter, txn, outcome, self.why_aborted(txn))

    def was_skipped(self, least: int) -> bool:
        """Whether no owner of this log leased the id, although owners leased higher ones."""
        return any(skipped <= least < first for skipped, first in self._skipped)

    def why_aborted(self, txn: TxnId) -> str:
        """The reason of an abort, as far as it is remembered."""
        return TIME_UP if self.outcomes.timed_out(txn.least) else "it had ended before"

    def watch(self, transaction: TransactionState, deadline: float) -> None:
        """Set a transaction's deadline: if it is still open then, `overdue` returns it."""
        transaction.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, transaction.txn.least))
        if len(self._deadlines) > 1000 + 4 * len(self.live):  # most of those watched have ended
            live = self.live
            self._deadlines = [
                (due, least) for due, least in self._deadlines if least in live and live[least].deadline == due
            ]
            heapq.heapify(self._deadlines)

    def overdue(self) -> list[TransactionState]:
        """Transactions whose deadline has passed, each returned once; `Coordinator.tick` aborts those still open."""
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
        f"transaction {txn} was never leased by this log: if an older copy of the log was restored, the records of the "
        "transaction are lost; otherwise the id is wrong"
    )
