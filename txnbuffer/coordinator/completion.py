"""Completion of transactions: the decision, its markers, its answers, and when they are settled"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import starmap
from operator import itemgetter

from broker_io.errors import MessageTooLarge
from txnbuffer.coordinator.core import Core, Decisions, TooLarge
from txnbuffer.coordinator.decisions import NamedCommit, PositionCommit, Row, as_row
from txnbuffer.coordinator.groups import ConsumerGroups
from txnbuffer.coordinator.messages import (
    DECIDING_STATE,
    ENDED_STATE,
    INTENDED_OUTCOME,
    OUTCOME_OF_STATE,
    TERMINAL,
    AwaitApplied,
    Commit,
    State,
)
from txnbuffer.coordinator.producers import NamedProducers
from txnbuffer.coordinator.retention import OutcomeRetention
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.transaction import Block, GroupRecord, Retirement, TransactionState
from txnbuffer.errors import TIME_UP, Error, NotVisible
from txnbuffer.model import MarkerItem, Outcome, TxnId, as_marker_item


@dataclass
class TransactionCompletion:
    """Commits and aborts transactions.

    A transaction is settled when its outcome and all its markers are durable, and no client waits for it to be visible.
    """

    _core: Core
    _sessions: Sessions
    _producers: NamedProducers
    _consumer_groups: ConsumerGroups
    _retention: OutcomeRetention
    stopped: dict[str, Error] = field(default_factory=dict)
    """The topics whose buffer has stopped, with the error; nothing becomes visible there."""
    _waited_for: deque[tuple[float, TransactionState]] = field(default_factory=deque)

    # Deciding

    def commit(self, transaction: TransactionState, plan: Commit) -> None:
        """Decide COMMIT for a transaction whose commit request is valid."""
        core = self._core
        if plan.sequence is None and not plan.positions and self._decided_by_marker(transaction, Outcome.COMMIT):
            return
        refusal = None if plan.sequence is None else self._producers.refusal(plan.sequence)
        if refusal is None and plan.positions:
            refusal = self._consumer_groups.refusal(plan.positions)
        if refusal is not None:
            self.abort(transaction, str(refusal), refusal=refusal)
            return
        winners, members = {transaction.txn.least}, [transaction]
        if transaction.branches:
            winners.update(branch.txn.least for branch in plan.winners)
            members += [branch for branch in transaction.branches if branch.state is State.OPEN]
        rows = [
            (_row(member, Outcome.COMMIT if member.txn.least in winners else Outcome.ABORT), member)
            for member in members
        ]
        names = () if plan.sequence is None else (NamedCommit(plan.sequence.name, plan.sequence.number),)
        positions = [*starmap(PositionCommit, map(itemgetter(0, 1, 4), plan.positions))]
        try:
            number = core.journal.decide(rows, names, positions)
        except TooLarge as error:
            refusal = self._too_large(rows, positions, error.size)
            self.abort(transaction, str(refusal), refusal=refusal)
            return
        for row, member in rows:
            member.advance(DECIDING_STATE[row.outcome])
            if row.outcome is Outcome.ABORT:
                member.reason = f"its transaction {transaction.txn} committed without it"
            elif plan.wait_visible and member.topics:
                member.unseen = set(member.topics)
                transaction.hidden += 1
        if plan.sequence is not None:
            self._producers.commit(plan.sequence, number)
        if positions:
            self._consumer_groups.commit(positions, number)
        self._decided(members)

    def _too_large(self, rows: Decisions, positions: Sequence[PositionCommit], size: int) -> MessageTooLarge:
        transaction = rows[0][1]
        named = len({topic for row, _ in rows for topic in row.topics})
        extra = f", {len(rows)} branches" * (len(rows) > 1) + f", {len(positions)} positions" * (len(positions) > 0)
        return MessageTooLarge(
            f"the commit of {transaction.txn} names {named} topics{extra} and needs {size} bytes in the decision "
            f"log, the limit is {self._core.config.max_message_bytes}: commit fewer topics in one transaction, or "
            "raise log.max_message_bytes of the service"
        )

    def abort(
        self,
        transaction: TransactionState,
        reason: str,
        topics: tuple[str, ...] = (),
        *,
        by_marker: bool = False,
        refusal: Error | None = None,
    ) -> None:
        """Decide ABORT for an open transaction and all its branches.

        `topics` are those known to have its records. `by_marker`: its client says that there are no others, so one
        marker can be the decision. `refusal` is the answer to its commit request.
        """
        parent = transaction.parent
        if parent is not None and parent.plan is not None and parent.state is State.OPEN:
            transaction = parent  # its commit requires this branch
        if transaction.plan is None:
            transaction.topics, transaction.records = topics, (0,) * len(topics)
        transaction.reason, transaction.refusal = reason, refusal
        if by_marker and self._decided_by_marker(transaction, Outcome.ABORT):
            return
        rows = [(_row(transaction, Outcome.ABORT), transaction)]
        for branch in transaction.branches or ():
            if branch.state is State.OPEN:
                branch.reason = f"its transaction {transaction.txn} was aborted"
                rows.append((_row(branch, Outcome.ABORT), branch))
        for _, member in rows:
            member.advance(DECIDING_STATE[Outcome.ABORT])
        self._core.journal.abort(rows)
        self._decided([member for _, member in rows])

    def _decided(self, members: Sequence[TransactionState]) -> None:
        """Decisions are queued: if what is queued now becomes durable together, their markers go with them."""
        if self._core.config.atomic:
            for member in members:
                self.publish(member)

    def _decided_by_marker(self, transaction: TransactionState, outcome: Outcome) -> bool:
        """Let a marker decide an open transaction, and return whether it can.

        It can with one topic, registered for one-phase markers, if no other id depends on the transaction.
        """
        core, topics = self._core, transaction.topics
        if not core.config.one_phase or len(topics) != 1 or not core.topics.get(topics[0]):
            return False
        if transaction.state is not State.OPEN:
            return False
        named = transaction.name is not None or transaction.participant_of is not None
        if named or transaction.parent is not None or transaction.branches:
            return False
        transaction.state = DECIDING_STATE[outcome]
        transaction.one_phase = True
        item = as_marker_item((transaction.txn, outcome, transaction.records[0]))
        core.markers.waiting.setdefault((topics[0], False), []).append(item)
        return True

    # Events of logs and buffers

    def group_durable(
        self, record: GroupRecord, transactions: list[TransactionState], retirements: list[Retirement]
    ) -> None:
        """A group of decisions is durable: write the markers, and answer."""
        self._retention.groups.append(record)
        for transaction in transactions:
            transaction.advance(ENDED_STATE[INTENDED_OUTCOME[transaction.state]])
            transaction.group = record
            if transaction.unfinished is None:
                self.publish(transaction)
        for transaction in transactions:
            if transaction.hidden:
                self._waited_for.append((self._core.now + self._core.config.visible_timeout, transaction))
                self._await(transaction)
                self.answer_if_due(transaction)
        self._answer([transaction for transaction in transactions if not transaction.hidden])
        self._settle_due(transactions)
        for retirement in retirements:
            self._sessions.retired(retirement)

    def publish(self, transaction: TransactionState) -> None:
        """Queue the markers of a decided transaction for all its topics."""
        outcome = INTENDED_OUTCOME[transaction.state]
        transaction.unfinished, waiting = set(transaction.topics), self._core.markers.waiting
        for topic, records in zip(transaction.topics, transaction.records, strict=True):
            waiting.setdefault((topic, True), []).append(as_marker_item((transaction.txn, outcome, records)))

    def marker_durable(self, token: int) -> None:
        """A marker is durable. A one-phase marker decides only when the topic's buffer has applied it."""
        done = self._core.markers.durable(token)
        if done is None or not done[0][1]:
            return
        (topic, _), items = done
        live, ended = self._core.live, []
        for item in items:
            transaction = live.get(item.txn.least)
            if transaction is not None and transaction.unfinished is not None:
                transaction.unfinished.discard(topic)
                ended.append(transaction)
        self._settle_due(ended)

    def marker_wanted(self, topic: str, decided: bool, item: MarkerItem) -> bool:
        """Whether a marker that may not be durable has to be written again."""
        transaction = self._core.live.get(item.txn.least)
        if transaction is None:
            return False
        if decided:
            return transaction.unfinished is not None and topic in transaction.unfinished
        return transaction.one_phase

    def markers_applied(self, topic: str, ends: Sequence[tuple[TxnId, Outcome]]) -> None:
        """The topic's buffer has applied markers, with these ends of transactions."""
        core, live = self._core, self._core.live
        one_phase: list[TransactionState] = []
        decided: list[TransactionState] = []
        core.markers.queries_settled(topic, ends)
        for txn, outcome in ends:
            transaction = live.get(txn.least) if txn.most == core.shard else None
            if transaction is None:
                continue
            if transaction.one_phase:
                if INTENDED_OUTCOME[transaction.state] is not outcome:
                    core.stop(f"transaction {txn} was ended as {outcome.name} on {topic} by another owner")
                    return
                transaction.state = ENDED_STATE[outcome]
                del live[txn.least]
                one_phase.append(transaction)
            elif transaction.state not in TERMINAL:
                core.stop(f"transaction {txn} was ended on {topic} by another owner")
                return
            else:
                decided.append(transaction)
        if one_phase:
            self._answer(one_phase)
            self._settle(one_phase)
        if decided:
            self._applied(decided, topic)

    def _applied(self, transactions: Sequence[TransactionState], topic: str) -> None:
        for transaction in transactions:
            if transaction.unfinished is not None:
                transaction.unfinished.discard(topic)
            if transaction.unseen:
                transaction.unseen.discard(topic)
                if not transaction.unseen:
                    parent = transaction if transaction.parent is None else transaction.parent
                    parent.hidden -= 1
                    self.answer_if_due(parent)
                    self._settle_due((parent,))
        self._settle_due(transactions)

    def topic_stopped(self, topic: str, why: Error) -> None:
        """The topic's buffer has stopped: no commit waits to become visible there."""
        self.stopped[topic] = why
        for transaction in list(self._core.live.values()):
            if transaction.hidden:
                self.answer_if_due(transaction)

    def can_complete(self, least: int) -> bool:
        """Whether a decided transaction still waits for markers on topics that have not stopped."""
        transaction = self._core.live.get(least)
        return transaction is not None and not (transaction.unfinished or set()) <= self.stopped.keys()

    def topic_resumed(self, topic: str) -> None:
        """A stopped topic has a buffer again."""
        self.stopped.pop(topic, None)

    def topic_recreated(self, topic: str, ongoing: Set[TxnId]) -> None:
        """A topic was re-created: only its ongoing transactions still need markers there."""
        for transaction in list(self._core.live.values()):
            if transaction.state in TERMINAL and transaction.txn not in ongoing:
                self._applied((transaction,), topic)

    def topic_deleted(self, topic: str) -> None:
        """A topic was deleted: it needs no markers, and no commit waits to become visible there."""
        self.topic_resumed(topic)
        for transaction in list(self._core.live.values()):
            if transaction.one_phase and topic in transaction.topics:
                transaction.advance(ENDED_STATE[INTENDED_OUTCOME[transaction.state]])
                self._answer((transaction,))
                self._settle_due((transaction,))
            elif transaction.state in TERMINAL:
                self._applied((transaction,), topic)

    # Answering and settling

    def answer_if_due(self, transaction: TransactionState) -> None:
        """Answer the waiting requests if the outcome is durable, and visible where they asked for that."""
        if not transaction.waiters or transaction.state not in TERMINAL:
            return
        if not transaction.hidden:
            self._answer((transaction,))
        elif (topic := next((one for one in _unseen(transaction) if one in self.stopped), None)) is not None:
            self._answer_not_visible(transaction, topic, f"it has stopped ({self.stopped[topic]})")

    def tick(self) -> None:
        """Answer with NotVisible after `visible_timeout`, whatever delays the buffer."""
        core, waited_for = self._core, self._waited_for
        while waited_for and waited_for[0][0] <= core.now:
            transaction = waited_for.popleft()[1]
            if transaction.hidden:
                why = f"its markers were not read there within {core.config.visible_timeout:.0f} s"
                self._answer_not_visible(transaction, next(_unseen(transaction)), why)
                waited_for.append((core.now + core.config.visible_timeout, transaction))
        if core.config.shards > 1:
            for _, transaction in waited_for:
                self._await(transaction)

    def _await(self, transaction: TransactionState) -> None:
        """Ask the other shards for the markers that their buffers have to apply."""
        core = self._core
        for member in (transaction, *(transaction.branches or ())) if core.config.shards > 1 else ():
            if member.unseen:
                core.effects.append(AwaitApplied(member.txn.least, tuple(sorted(member.unseen))))

    def _answer_not_visible(self, transaction: TransactionState, topic: str, why: str) -> None:
        error = NotVisible(transaction.txn, topic, why)
        waiters, transaction.waiters = transaction.waiters or (), None
        for session, request, _ in waiters:
            self._core.answer(session, request, error)

    def _answer(self, transactions: Iterable[TransactionState]) -> None:
        """Answer the waiting requests of transactions that have ended."""
        core = self._core
        for transaction in transactions:
            waiters, transaction.waiters = transaction.waiters or (), None
            outcome = OUTCOME_OF_STATE[transaction.state]
            for waiter in waiters:
                session, request, commit = waiter
                if outcome is Outcome.COMMIT:
                    core.answers.setdefault(session, []).append((request, outcome))
                elif commit and transaction.refusal is not None:
                    core.answer(session, request, transaction.refusal)
                else:
                    core.answer_outcome(waiter, transaction.txn, outcome, transaction.reason)

    def _settle_due(self, transactions: Iterable[TransactionState]) -> None:
        """Settle those that have nothing left to do."""
        live, settled = self._core.live, []
        for transaction in transactions:
            if transaction.unfinished or transaction.unseen or transaction.hidden:
                continue
            if live.pop(transaction.txn.least, None) is not None:
                settled.append(transaction)
        self._settle(settled)

    def _settle(self, transactions: Sequence[TransactionState]) -> None:
        """Remember how transactions have ended that are not live any more."""
        by_outcome: dict[Outcome, list[TransactionState]] = {}
        for transaction in transactions:
            by_outcome.setdefault(OUTCOME_OF_STATE[transaction.state], []).append(transaction)
        for outcome, some in by_outcome.items():
            self._remember(some, outcome)

    def _remember(self, transactions: Sequence[TransactionState], outcome: Outcome) -> None:
        core = self._core
        ids: list[int] = []
        timed_out: list[int] = []
        one_phase: list[int] = []
        ended: dict[Block, int] = {}
        for transaction in transactions:
            least = transaction.txn.least
            ids.append(least)
            if transaction.reason == TIME_UP:
                timed_out.append(least)
            if transaction.one_phase:
                one_phase.append(least)
            if transaction.group is not None:
                transaction.group.unsettled -= 1
            if transaction.name is not None or transaction.participant_of is not None:
                self._producers.settled(transaction)
            if transaction.block is not None:
                ended[transaction.block] = ended.get(transaction.block, 0) + 1
        core.outcomes.update(ids, outcome, core.now, timed_out)
        core.progress.settled.update(ids)
        core.progress.one_phase[outcome].update(one_phase)
        for block, count in ended.items():
            self._sessions.reduce(block, count)


def _row(transaction: TransactionState, outcome: Outcome) -> Row:
    return as_row((transaction.txn.least, outcome, transaction.topics, transaction.records))


def _unseen(transaction: TransactionState) -> Iterator[str]:
    """The topics where a commit is not visible yet, and a client waits for it."""
    for member in (transaction, *(transaction.branches or ())):
        yield from sorted(member.unseen or ())
