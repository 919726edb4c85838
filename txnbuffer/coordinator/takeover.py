"""What a new owner does about its predecessors' transactions.

Three things come before anything is said of an id that an older owner leased:
- a border on each topic that may have one-phase markers, and what ended there before it: from then on no
  marker of an older owner decides anything there;
- the markers of all decisions that stand in the log, but for those of topics that have stopped: they wait for these;
- the one-phase outcomes found are made our own.
What is asked meanwhile about older ids waits; ids of new leases are served at once.
"""

from __future__ import annotations

from collections.abc import Callable

from pyroaring import BitMap64

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.ending import Ending
from txnbuffer.coordinator.entries import Group
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.ids import bitmap_of, within
from txnbuffer.coordinator.journal import ids_of
from txnbuffer.coordinator.messages import WriteBorder
from txnbuffer.coordinator.retention import Retention
from txnbuffer.coordinator.rows import Rows
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.states import ENDED, State
from txnbuffer.coordinator.transaction import GroupRecord, Transaction
from txnbuffer.model import Outcome, TxnId


class TakeOver:
    """`horizon`: the highest id that an older owner leased. `ready`: all that comes first is done."""

    def __init__(self, core: Core, sessions: Sessions, ending: Ending, retention: Retention, history: History) -> None:
        self._core = core
        self._sessions = sessions
        self._ending = ending
        self._retention = retention
        self.horizon = history.highest_lease
        self._found = (BitMap64(), BitMap64())
        self._undone: set[int] = set()
        self._waiting: list[Callable[[], None]] = []
        self._borders = {topic for topic, one_phase in history.topics.items() if one_phase}
        self._load(history)
        core.effects += [WriteBorder(topic, core.markers.border()) for topic in sorted(self._borders)]
        self.ready = False
        self.advance()

    def waits(self, least: int) -> bool:
        """Whether nothing may be said of this id yet."""
        return not self.ready and least <= self.horizon

    def later(self, action: Callable[[], None]) -> None:
        """Do something once that is so."""
        self._waiting.append(action)

    def border_applied(self, topic: str, committed: BitMap64, aborted: BitMap64) -> None:
        """The topic's log is applied up to our border: these ids had ended there."""
        if topic in self._borders:
            self._borders.discard(topic)
            self._found[Outcome.COMMIT].update(committed)
            self._found[Outcome.ABORT].update(aborted)

    def topic_gone(self, topic: str) -> None:
        self._borders.discard(topic)

    def advance(self) -> None:
        """See whether all that comes first is done by now."""
        if self.ready or self._borders:
            return
        self._undone = {least for least in self._undone if self._ending.comes_to_an_end(least)}
        if self._undone:
            return
        self._adopt_outcomes()
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _adopt_outcomes(self) -> None:
        """One-phase outcomes of older owners. A topic that a COMMIT does not name may have ended it as ABORT."""
        core = self._core
        aborted, committed = self._found
        aborted = aborted - committed
        known = core.progress.settled.bitmap() | bitmap_of(core.live)
        for outcome, ids in ((Outcome.ABORT, aborted), (Outcome.COMMIT, committed)):
            new = within(ids - known, core.progress.low_water_mark, self.horizon)
            core.progress.one_phase[outcome].update(new)
            core.progress.settled.update(new)
            core.outcomes.update(new, outcome, core.now)
            for one in self._sessions.all_blocks():
                if one.first > self.horizon:
                    break
                self._sessions.reduce(one, new.range_cardinality(one.first, one.last + 1))

    # Reading the log

    def _load(self, history: History) -> None:
        core = self._core
        ended = history.ended.copy()
        ended.remove_range(0, history.low_water_mark + 1)
        core.progress.settled.update(ended)
        for mark in history.marks.values():
            core.outcomes.update(mark.aborted, Outcome.ABORT, mark.raised_at / 1000)
            core.outcomes.update(mark.committed, Outcome.COMMIT, mark.raised_at / 1000)
        undone = [pair for group in history.groups.values() for pair in self._load_group(group)]
        for lease in history.leases.values():
            self._sessions.load(lease, core.now)
        for record, transaction in undone:
            self._load_undone(record, transaction)
        taken = self._sessions.taken = core.progress.settled.bitmap() | bitmap_of(core.live)
        taken.remove_range(0, self.horizon + 1)

    def _load_group(self, group: Group) -> list[tuple[GroupRecord, Transaction]]:
        """Remember what a group decided; returns those of its transactions that are not settled."""
        core, undone = self._core, []
        decided_at = group.decided_at / 1000
        record = GroupRecord(group.number, decided_at, ids_of(group), 0)
        record.names = tuple(name for name, _ in group.names)
        record.consumers = tuple({commit.group: None for commit in group.positions})
        self._retention.add(record)
        aborted, committed, rows = Rows.of(group.rows).split(core.progress)
        for least, outcome, topics, records in rows:
            transaction = Transaction(TxnId(core.shard, least), None, None)
            transaction.topics, transaction.records = topics, records
            transaction.state = ENDED[outcome]
            undone.append((record, transaction))
        retired = BitMap64()
        for first, count in group.retired:
            retired.add_range(first, first + count)
        for outcome, ids in ((Outcome.ABORT, aborted), (Outcome.COMMIT, committed)):
            core.outcomes.update(ids, outcome, decided_at)
            core.progress.settled.update(ids)
        core.outcomes.update(retired, Outcome.ABORT, decided_at)
        core.progress.settled.update(retired)
        core.progress.settled.drop_up_to(core.progress.low_water_mark)
        return undone

    def _load_undone(self, record: GroupRecord, transaction: Transaction) -> None:
        transaction.block = self._sessions.locate(transaction.txn.least)
        transaction.group = record
        record.unsettled += 1
        self._core.live[transaction.txn.least] = transaction
        self._undone.add(transaction.txn.least)
        if transaction.state is State.ABORTED:
            transaction.reason = "it had ended before"
        self._ending.publish(transaction)
