"""The takeover by a new owner: finding its epoch, finishing older transactions, and the data-loss check

Finding the epoch: opening the exclusive writer of the decision log fences older owners. But their last appends, even an
`owner` entry, may still become durable before the new owner's first message. So the new owner writes its `owner` entry,
reads up to it, and writes another one with a higher epoch if the log has an epoch as high. It writes nothing else
before that.

Finishing older transactions: three steps come before any answer about an id that an older owner leased:
- an epoch marker on each topic that may have one-phase markers, and the transactions that ended there before it; from
  then on no marker of an older owner decides anything there;
- the markers of all decisions in the log, except on topics that have stopped;
- the adoption of the one-phase outcomes that were found.
Requests about older ids wait for this; ids of new leases are served at once.

The data-loss check: a decision, and the epoch of its owner, are durable in the log before any marker mentions them. If
a marker mentions more than the log has, entries of the log are lost. An owner would then lease ids again, and records
that commit under these would never be visible. Records alone prove no loss, since any client can write any id, unless
the log is blank: topics are registered before their first transactional record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyroaring import BitMap64

from broker_io.batch import Message
from broker_io.position import LEDGERS_OF_A_HISTORY
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.state import CoordinatorState
from txnbuffer.coordinator.completion import TransactionCompletion
from txnbuffer.coordinator.core import Core, group_record, ids_of
from txnbuffer.coordinator.decisions import Group, LowWaterMark, Owner, OwnerEpoch, encode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.messages import ENDED_STATE, LARGEST_LIMIT, State, WriteEpochMarker
from txnbuffer.coordinator.retention import OutcomeRetention
from txnbuffer.coordinator.sessions import Sessions
from txnbuffer.coordinator.transaction import TransactionState, bitmap_of, within
from txnbuffer.model import MAX_LEAST, Outcome, TxnId


class TakeOver:
    """Finishes the transactions of older owners.

    `horizon` is the highest id that an older owner leased. `ready`: the takeover is complete. `awaited_markers` has the
    topics whose log is not applied up to our epoch marker yet.
    """

    def __init__(
        self,
        core: Core,
        sessions: Sessions,
        completion: TransactionCompletion,
        retention: OutcomeRetention,
        history: History,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._completion = completion
        self._retention = retention
        self.horizon = history.highest_lease
        self._one_phase_outcomes = (BitMap64(), BitMap64())
        self._unsettled: set[int] = set()
        self._waiting: list[Callable[[], None]] = []
        self.awaited_markers = {topic for topic, one_phase in history.topics.items() if one_phase}
        self._load(history)
        for topic in sorted(self.awaited_markers):
            self.topic_resumed(topic)
        self.ready = False
        self.advance()

    def must_wait(self, least: int) -> bool:
        """Whether requests about this id have to wait for the takeover."""
        return not self.ready and least <= self.horizon

    def execute(self, action: Callable[[], None], *, wait: bool) -> None:
        """Execute a request: at once, or when the takeover is complete if it has to wait for that."""
        if wait and not self.ready:
            self._waiting.append(action)
        else:
            action()

    def topic_resumed(self, topic: str) -> None:
        """The topic has a buffer, perhaps only now: write our epoch marker if that is not done."""
        if topic in self.awaited_markers:
            self._core.effects.append(WriteEpochMarker(topic, self._core.markers.epoch_marker()))

    def epoch_marker_applied(self, topic: str, committed: BitMap64, aborted: BitMap64) -> None:
        """The topic's log is applied up to our epoch marker, and these ids had ended there."""
        if topic in self.awaited_markers:
            self.awaited_markers.discard(topic)
            self._one_phase_outcomes[Outcome.COMMIT].update(committed)
            self._one_phase_outcomes[Outcome.ABORT].update(aborted)

    def advance(self) -> None:
        """Complete the takeover if all its steps are done."""
        if self.awaited_markers:
            return
        self._unsettled = {least for least in self._unsettled if self._completion.can_complete(least)}
        if self._unsettled:
            return
        self._adopt_outcomes()
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _adopt_outcomes(self) -> None:
        """Adopt one-phase outcomes of older owners. COMMIT wins: a topic that a commit does not name may have ABORT."""
        core = self._core
        aborted, committed = self._one_phase_outcomes
        aborted = aborted - committed
        known = core.progress.settled | bitmap_of(core.live)
        for outcome, ids in ((Outcome.ABORT, aborted), (Outcome.COMMIT, committed)):
            new = within(ids - known, core.progress.low_water_mark, self.horizon)
            core.progress.one_phase[outcome].update(new)
            core.progress.settled.update(new)
            core.outcomes.update(new, outcome, core.now)
            for one in self._sessions.all_blocks:
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
        unsettled = [transaction for group in history.groups.values() for transaction in self._load_group(group)]
        for lease in history.leases.values():
            self._sessions.load(lease, core.now)
        for transaction in unsettled:
            transaction.block = self._sessions.locate(transaction.txn.least)
            core.live[transaction.txn.least] = transaction
            self._unsettled.add(transaction.txn.least)
            if transaction.state is State.ABORTED:
                transaction.reason = "it had ended before"
            self._completion.publish(transaction)
        taken = self._sessions.used_unleased = core.progress.settled | bitmap_of(core.live)
        taken.remove_range(0, self.horizon + 1)

    def _load_group(self, group: Group) -> list[TransactionState]:
        """Remember the decisions of a group; returns its transactions that are not settled."""
        core = self._core
        aborted, committed, rows = group.rows.split(core.progress)
        record = group_record(group, len(rows))
        self._retention.groups.append(record)
        unsettled = []
        for least, outcome, topics, records in rows:
            transaction = TransactionState(TxnId(core.shard, least), None, None, ENDED_STATE[outcome])
            transaction.topics, transaction.records, transaction.group = topics, records, record
            unsettled.append(transaction)
        for first, count in group.retired:
            aborted.add_range(first, first + count)
        for outcome, ids in ((Outcome.ABORT, aborted), (Outcome.COMMIT, committed)):
            core.outcomes.update(ids, outcome, record.decided_at)
            core.progress.settled.update(ids)
        core.progress.settled.remove_range(0, core.progress.low_water_mark + 1)
        return unsettled


MAX_OWNERS = 1000
"""The most owners that an `owner` entry lists."""
ENTRY_BYTES = 2048
"""The bytes of an `owner` entry without its list, with an address and a name."""
SKIP_BITS = 24
"""An owner skips up to 1 / 2**24 of the remaining ids: after 2**24 owners, three fifths remain."""


@dataclass
class Acquisition:
    """How a new owner finds its epoch: append `entry()`, read the log up to it, call `read`, until that returns True.

    `epoch` is above the highest epoch in the log so far. `address` is where clients connect to the owner. `owner_id` is
    its random id. `known` has the owners in the log, by epoch; the entry lists the newest of them, as many as fit into
    `max_bytes`. `last` is the highest transaction id that they are known to have leased, if owners of a lost part of
    the log may have leased higher ones; None otherwise.
    """

    owner: str
    epoch: int
    address: str = ""
    owner_id: str = ""
    known: Mapping[int, OwnerEpoch] = field(default_factory=dict)
    max_bytes: int = LARGEST_LIMIT
    last: int | None = None

    def entry(self) -> Message:
        return encode(Owner(self.epoch, self.owner, self.address, self.owners))

    @property
    def owners(self) -> tuple[OwnerEpoch, ...]:
        """The newest owners, this one the last."""
        if not self.owner_id:
            return ()
        own = OwnerEpoch(self.epoch, self.owner_id)
        if self.last is not None:
            own = own._replace(skipped=self.last + 1, first=first_transaction_id(self.last, self.owner_id))
        older = sorted(one for one in self.known.values() if one.epoch < self.epoch)
        kept = [*older[1 - MAX_OWNERS :], own]
        while len(kept) > 1 and len(json.dumps(kept)) > self.max_bytes - ENTRY_BYTES:
            del kept[: len(kept) // 8 + 1]
        return tuple(kept)

    def read(self, highest: int, owners: Mapping[int, OwnerEpoch] | None = None, last: int | None = None) -> bool:
        """The content of the log before our entry: the highest epoch of other owners, these owners, and `last`.

        False: append another entry.
        """
        others = {
            at: one for at, one in (owners or {}).items() if one.id != self.owner_id and self.known.get(at) != one
        }
        if highest < self.epoch and not others and last == self.last:
            return True
        self.last = last
        self.known = {**self.known, **others}
        self.epoch = max(highest, self.epoch) + 1
        return False


def first_transaction_id(last: int, owner_id: str) -> int:
    """The first transaction id of an owner with this random id, above `last`.

    If a part of a log is lost, the ids that owners leased in it are somewhere above `last`. The range is so
    wide that the same id is hardly ever leased again, and each owner skips a part of the rest, so ids never run out.
    """
    return last + 1 + int(owner_id, 16) % (((MAX_LEAST - last) >> SKIP_BITS) + 1)


def first_epoch(number: int) -> int:
    """The first epoch of the owners of a history, given the number of a ledger of the decision log, or an epoch, in it.

    It is 0 in the first history. A restore or a forced promotion continues in a ledger whose number is a multiple of
    `LEDGERS_OF_A_HISTORY`, which becomes the epoch: above the epochs of all owners in the lost history, unless there
    were a million.
    """
    return number - number % LEDGERS_OF_A_HISTORY


Buffers = Mapping[str, TransactionBuffer]
"""The buffer of each topic, with its whole log applied."""

ID_MARGIN = 2**32
"""More ids than can be open: leased and not used, or used and not ended."""
IDS_PER_SECOND = 2**20
"""More ids than any log leases in a second."""


def missing_owner_evidence(history: History) -> str | None:
    """Why a log was not started by an owner, whose own entry is always the first; None if it was.

    If a log is deleted and re-created, appends of an owner of the old log may arrive in the new one. Their ids do not
    say how far the ids of the old log went. Call this before another owner writes its entry.
    """
    if history.owned or is_blank(history):
        return None
    return "it has entries but no owner: an owner of a deleted log of the same name wrote them"


def data_loss_evidence(history: History, epoch: int, shard: int, topics: Buffers) -> str | None:
    """Why entries of the log must be lost; None if there is no evidence. `epoch` is that of the next owner."""
    known = _ids(history)
    blank = is_blank(history)
    for topic, buffer in topics.items():
        if blank and any(opened.txn.most == shard for opened in buffer.ongoing.values()):
            return f"topic {topic} has transactions of this coordinator, but the log is blank"
        state = buffer.coordinators.get(shard)
        if state is None:
            continue
        if state.epoch >= epoch:
            return f"topic {topic} has markers of epoch {state.epoch}, but the log's next epoch is {epoch}"
        mark = history.low_water_mark
        if state.low_water_mark > mark:
            return f"topic {topic} has low-water mark {shard}:{state.low_water_mark}, but the log {shard}:{mark}"
        ended = state.committed | state.aborted
        ended.remove_range(0, mark + 1)
        if unknown := ended - known:
            return f"transaction {shard}:{unknown.min()} ended on topic {topic}, but the log does not have that id"
    return None


def recovery_entries(history: History, shard: int, topics: Buffers, owner: str) -> list[Message]:
    """Entries with which a log continues above all epochs and ids that it and the topics have.

    Transactions with lower ids that are ongoing on a topic count as ended without a decision, and abort.
    """
    epoch, highest = history.epoch, history.highest_id
    for buffer in topics.values():
        state = buffer.coordinators.get(shard, CoordinatorState())
        ended = state.committed | state.aborted
        epoch, highest = max(epoch, state.epoch), max(highest, state.low_water_mark, ended.max() if ended else 0)
    mark = LowWaterMark(history.next_mark, highest + ID_MARGIN, 0, BitMap64(), BitMap64())
    return [encode(Owner(epoch + 1, owner, "", tuple(sorted(history.owners.values())))), encode(mark)]


def initial_low_water_mark(history: History, now_ms: int) -> Message | None:
    """The entry that puts the ids of a new log above those of any former log of that name; None if it is not blank.

    In a namespace that was deleted, late appends to topics of the former log may reach the topics of the new one. With
    ids that are used again, they would count as records of a new transaction.
    """
    if not is_blank(history):
        return None
    return encode(LowWaterMark(history.next_mark, now_ms // 1000 * IDS_PER_SECOND, 0, BitMap64(), BitMap64()))


def is_blank(history: History) -> bool:
    """Whether the log has no entries except of owners."""
    return not (history.leases or history.groups or history.marks or history.topics)


def _ids(history: History) -> BitMap64:
    """All ids above the low-water mark that the log has."""
    ids = history.ended.copy()
    for lease in history.leases.values():
        ids.add_range(lease.first, lease.first + lease.size)
    for group in history.groups.values():
        ids |= ids_of(group)
    return ids
