"""The state that all parts of a coordinator share, with its two queues: decisions for the log, markers for topics

Decisions become durable in the order of the calls, and many are in one message. One marker carries the ends of many
transactions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from pyroaring import BitMap64

from broker_io.batch import Message
from txnbuffer.coordinator.decisions import (
    FIXED,
    PROOF_KEY,
    RETIRED,
    Consumers,
    DecisionRows,
    Entry,
    Group,
    Name,
    NamedCommit,
    PositionCommit,
    Retired,
    Row,
    encode,
    marker_items,
    names_bytes,
    positions_bytes,
    rows_bytes,
    size_of,
    tombstone,
)
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import (
    AppendDecisions,
    AppendMarker,
    CoordinatorConfig,
    Effect,
    Result,
    StopAnswering,
)
from txnbuffer.coordinator.transaction import (
    GroupRecord,
    Outcomes,
    Retirement,
    Session,
    SettledIds,
    TransactionState,
    Waiter,
    bitmap_of,
)
from txnbuffer.errors import TIME_UP, ForeignTransaction, OutcomeForgotten, TransactionAborted, UnknownTransaction
from txnbuffer.model import Marker, MarkerItem, Outcome, TxnId

OnDurable = Callable[[], None]
Decisions = Sequence[tuple[Row, TransactionState]]
GroupDurable = Callable[[GroupRecord, list[TransactionState], list[Retirement]], None]


@dataclass
class DecisionJournal:
    """Collects entries and decisions until `take` returns them as messages.

    Entries become durable in the order of the calls, so each may rely on all before it. Decisions are collected in
    groups. A group has at most `max_group` rows and topics, and its message at most `max_bytes`. `group_durable` is
    called for each group once it is durable; `now` is the time in seconds since 1970. `queued`: there is something to
    take.
    """

    _epoch: int
    next_group: int
    _max_group: int
    max_bytes: int
    _group_durable: GroupDurable
    now: float = 0.0
    queued: bool = False
    _messages: list[Message] = field(default_factory=list)
    _callbacks: list[OnDurable] = field(default_factory=list)
    _under_way: deque[tuple[int, list[OnDurable]]] = field(default_factory=deque)
    _token: int = 0

    def __post_init__(self) -> None:
        self._start_group()

    def decide(
        self, decisions: Decisions, names: Sequence[NamedCommit] = (), positions: Sequence[PositionCommit] = ()
    ) -> int:
        """Write the decisions of one transaction into one group, together with the other changes by its commit.

        Returns the number of the group. Raises TooLarge, and decides nothing, if they don't fit into one group.
        """
        rows = [*map(itemgetter(0), decisions)]
        rows_and_topics = len(rows) + sum(map(len, map(attrgetter("topics"), rows)))
        extra = names_bytes(names) if names else 0
        extra += positions_bytes(positions) if positions else 0
        added = rows_bytes(rows, self._topics, self._rows[-1].least if self._rows else 0) + extra
        if self._bytes + added > self.max_bytes or self._size + rows_and_topics > self._max_group:
            self._seal()
            self._topics.clear()
            added = rows_bytes(rows, self._topics, 0) + extra
            if FIXED + added > self.max_bytes:  # which is an upper bound
                size = size_of(encode(self._group(rows, (), names, positions)))
                if size > self.max_bytes:
                    self._start_group()
                    raise TooLarge(size)
        self._size += rows_and_topics
        self._bytes += added
        self._rows += rows
        self._transactions += map(itemgetter(1), decisions)
        self._names += names
        self._positions += positions
        self.queued = True
        return self.next_group

    def abort(self, decisions: Decisions) -> None:
        """Write ABORT decisions, which always fit.

        Decisions that are too large for one group are written into several, a row that is too large without its
        topics: the buffers there query the outcome.
        """
        try:
            self.decide(decisions)
        except TooLarge:
            for row, transaction in decisions:
                try:
                    self.decide([(row, transaction)])
                except TooLarge:
                    self.decide([(row._replace(topics=(), records=()), transaction)])

    def retire(self, retirement: Retirement, blocks: Sequence[Retired]) -> None:
        """Abort unused ids, in at most `retired_blocks` blocks."""
        added = RETIRED * len(blocks)
        if self._bytes + added > self.max_bytes:
            self._seal()
        self._bytes += added
        self._retired += blocks
        self.queued = True
        self._retirements.append(retirement)

    def put(self, entry: Entry, on_durable: OnDurable | None = None) -> None:
        """Append an entry after all decisions so far; `on_durable` is called once it is durable."""
        self._seal()
        if isinstance(entry, Name | Consumers):
            entry = entry._replace(since=self.next_group)
        self._messages.append(encode(entry))
        self.queued = True
        if on_durable is not None:
            self._callbacks.append(on_durable)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys from the log. What makes them obsolete must be durable."""
        if keys:
            self._seal()
            self._messages += map(tombstone, keys)
            self.queued = True

    def prove_ownership(self, on_durable: OnDurable) -> None:
        """Call `on_durable` once a new message is durable, which proves that the log had no newer owner."""
        self.forget([PROOF_KEY])
        self._callbacks.append(on_durable)

    def take(self) -> AppendDecisions:
        """The messages to append now."""
        self.queued = False
        self._seal()
        self._token += 1
        append = AppendDecisions(self._token, tuple(self._messages))
        self._under_way.append((self._token, self._callbacks))
        self._messages, self._callbacks = [], []
        return append

    def durable(self, token: int) -> None:
        """All appends up to this one are durable, since the log keeps their order."""
        while self._under_way and self._under_way[0][0] <= token:
            _, callbacks = self._under_way.popleft()
            for callback in callbacks:
                callback()

    def _start_group(self) -> None:
        self._size, self._bytes = 0, FIXED
        self._topics: set[str] = set()
        self._rows: list[Row] = []
        self._transactions: list[TransactionState] = []
        self._names: list[NamedCommit] = []
        self._positions: list[PositionCommit] = []
        self._retired: list[Retired] = []
        self._retirements: list[Retirement] = []

    def _seal(self) -> None:
        """Close the group, so that later entries come after it."""
        if not (self._rows or self._retired):
            return
        group = self._group(self._rows, self._retired, self._names, self._positions)
        self.next_group += 1
        transactions, retirements = self._transactions, self._retirements
        record = group_record(group, len(transactions))
        self._start_group()
        self._messages.append(encode(group))
        self._callbacks.append(lambda: self._group_durable(record, transactions, retirements))

    def _group(
        self,
        rows: Sequence[Row],
        retired: Sequence[Retired],
        names: Sequence[NamedCommit],
        positions: Sequence[PositionCommit],
    ) -> Group:
        now = int(self.now * 1000)
        columns = DecisionRows.of(rows)
        return Group(self.next_group, self._epoch, now, columns, tuple(retired), tuple(names), tuple(positions))


def group_record(group: Group, unsettled: int) -> GroupRecord:
    """What an owner has to know of a group in the log."""
    names = tuple(commit.name for commit in group.names)
    consumers = tuple({commit.group: None for commit in group.positions})
    return GroupRecord(group.number, group.decided_at / 1000, ids_of(group), unsettled, names, consumers)


class TooLarge(Exception):
    """The decisions of one transaction need a group of `size` bytes, which is above the limit."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes")
        self.size = size


def ids_of(group: Group) -> BitMap64:
    """All ids that a group decides."""
    ids = bitmap_of(group.rows.least)
    for first, count in group.retired:
        ids.add_range(first, first + count)
    return ids


MAX_ITEMS = 10_000
"""The most transactions in one marker, if topics accept messages of that size."""

Queue = tuple[str, bool]
"""A topic, and whether the decision log has the decisions."""


@dataclass
class Markers:
    """The markers that topics still need, by topic, until they are durable there.

    Each marker carries the owner's epoch and the durable low-water mark, and has at most `max_bytes`.
    """

    _shard: int
    _epoch: int
    _progress: SettledIds
    _max_bytes: int
    waiting: dict[Queue, list[MarkerItem]] = field(default_factory=dict)
    _failed: dict[Queue, list[MarkerItem]] = field(default_factory=dict)
    _under_way: dict[int, tuple[Queue, tuple[MarkerItem, ...]]] = field(default_factory=dict)
    _answered: dict[str, BitMap64] = field(default_factory=dict)
    _token: int = 0

    def __post_init__(self) -> None:
        self._most = min(MAX_ITEMS, marker_items(self._max_bytes))

    def add(self, topic: str, decided: bool, item: MarkerItem) -> None:
        self.waiting.setdefault((topic, decided), []).append(item)

    def answer_query(self, topic: str, item: MarkerItem) -> None:
        """Answer an outcome query of a topic's buffer with a marker: once, until the buffer has applied the marker."""
        answered = self._answered.setdefault(topic, BitMap64())
        if item.txn.least not in answered:
            answered.add(item.txn.least)
            self.add(topic, True, item)

    def queries_settled(self, topic: str, ends: Iterable[tuple[TxnId, Outcome]]) -> None:
        """The topic's buffer has applied these ends of transactions, so it does not query them again."""
        answered = self._answered.get(topic)
        if answered is not None:
            answered.difference_update(BitMap64([txn.least for txn, _ in ends if txn.most == self._shard]))
            if not answered:
                del self._answered[topic]

    def epoch_marker(self) -> Marker:
        """A marker without transactions, which announces the owner's epoch."""
        return Marker(self._shard, self._epoch, self._progress.low_water_mark, True, ())

    def take(self) -> list[AppendMarker]:
        """The markers to append now."""
        waiting, self.waiting = self.waiting, {}
        mark, most = self._progress.low_water_mark, self._most
        taken: list[AppendMarker] = []
        for queue, items in waiting.items():
            topic, decided = queue
            for start in range(0, len(items), most):
                some = tuple(items[start : start + most])
                self._token += 1
                self._under_way[self._token] = (queue, some)
                marker = Marker(self._shard, self._epoch, mark, decided, some)
                taken.append(AppendMarker(self._token, topic, marker))
        return taken

    def durable(self, token: int) -> tuple[Queue, tuple[MarkerItem, ...]] | None:
        """A marker is durable: return its topic and transactions, or None if it was reported before."""
        return self._under_way.pop(token, None)

    def failed(self, token: int) -> None:
        """A marker may or may not be durable: the next `tick` writes it again, which changes nothing if it is."""
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
                    self.queries_settled(topic, [(item.txn, item.outcome)])  # a later query is answered again

    def forget_topic(self, topic: str) -> None:
        """The topic is deleted: drop the markers that it still needed."""
        for queues in (self.waiting, self._failed):
            for decided in (False, True):
                queues.pop((topic, decided), None)

    def forget_answers(self, topic: str) -> None:
        """The topic was deleted or re-created, and the answers to its queries are gone with it."""
        self._answered.pop(topic, None)


MAX_EXECUTED = 1_000
"""Answers of a session that are kept in case it repeats the requests; the oldest ones go first."""


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
        self.progress = SettledIds(history.low_water_mark, gaps=history.gaps(history.next_id(epoch)))
        self._owners = [*history.owners.values()]
        self.outcomes = Outcomes(config.remember)
        self.journal = DecisionJournal(
            epoch, history.next_group, config.max_group, config.max_message_bytes, group_durable, now
        )
        self.markers = Markers(shard, epoch, self.progress, config.max_message_bytes)
        self.effects: list[Effect] = []
        self.answers: dict[str, list[tuple[int, Result]]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def stop(self, reason: str) -> None:
        """Answer nothing more: the next owner finds out how the open requests ended."""
        if self.stopped is None:
            self.stopped = reason
            self.answers.clear()
            self.effects = [StopAnswering(reason)]

    def answer(self, session: str, request: int, result: Result) -> None:
        self.answers.setdefault(session, []).append((request, result))

    def answer_again(self, session: Session, request: int) -> bool:
        """Answer a request of `answer_when_durable` as before if the session repeats it; return whether it does.

        A client repeats a request after a lost connection. If one that fences earlier holders were executed twice, the
        client might take the first answer, and be fenced by the second execution.
        """
        if request not in session.executed:
            return False
        if (result := session.executed[request]) is not None:
            self.answer(session.name, request, result)
        return True

    def answer_when_durable(self, session: Session, request: int, result: Result) -> OnDurable:
        """Return what answers the request once its entry is durable."""
        while len(session.executed) >= MAX_EXECUTED:
            del session.executed[next(iter(session.executed))]
        session.executed[request] = None

        def answer() -> None:
            session.executed[request] = result
            self.answer(session.name, request, result)

        return answer

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

    def wrong_coordinator(self, txn: TxnId) -> ForeignTransaction:
        """The refusal of a request about a transaction of another coordinator."""
        return ForeignTransaction(
            f"transaction {txn} belongs to coordinator {txn.most}, this is {self.shard}: send the request there"
        )

    def was_skipped(self, least: int) -> bool:
        """Whether no owner of this log leased the id, although owners leased higher ones."""
        return any(owner.skipped <= least < owner.first for owner in self._owners)

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


def never_leased(txn: TxnId) -> UnknownTransaction:
    return UnknownTransaction(
        f"transaction {txn} was never leased by this log: if an older copy of the log was restored, or a promotion "
        "of a pair forced, the records of the transaction are lost; otherwise the id is wrong"
    )
