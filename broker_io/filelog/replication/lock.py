"""The lock outside a pair: its record, swaps of it, and what a primary must assume while an answer is missing

The record says who is live, and which stores have every committed record (`in_sync`): only these may be promoted. If
there are none, the pair was dissolved: `live` is the store that went on without a pair, and no store is promoted any
more, not even by force. The record changes by swaps. A swap names the version of the record that it replaces, so an old
one that arrives late finds another version, even if everything else is as it was. `epoch` grows with each promotion.

A swap whose answer is lost may have happened, or may still happen. It is decided only by a later swap of the same
primary that succeeded, or by a read that shows a version above the one that it names: a read of the old version proves
nothing. Until then everything is required of every store that may be in `in_sync`.

A store has one session with the lock at a time: beginning one ends the former one, with its lease. So once a process
has a session, no swap of a former process of its store can happen, and a read after that shows what became of them.

`accepts` is the rule of every lock, whatever keeps it. A lock is linearizable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker_io.errors import CallerError
from broker_io.filelog.log.records import START, Mark, Store, StoreLog
from broker_io.filelog.replication.lease import LockLease


class LockRecord(NamedTuple):
    """The record of a lock: `reached` is the log's mark which every store in `in_sync` had at the last swap.

    `forced` is the mark to which a forced promotion cuts the log, until its epoch record is durable. `pair` is the id
    of the pair, which its founder drew.
    """

    version: int
    epoch: int
    live: Store
    in_sync: tuple[Store, ...]
    reached: Mark
    forced: Mark | None
    pair: bytes = b""

    @property
    def dissolved(self) -> bool:
        return self.version > 0 and not self.in_sync


NOT_FOUNDED = (
    "no pair was founded yet: start the machine that has the log with --found, once; if there is a pair, check the "
    "name of the lock"
)
RECORD_LOST = (
    "the lock has no record of this pair any more, so no other machine can become live: check the name of the lock; if "
    "the record is lost, stop both services, and start the machine that was live last with --found, once"
)
NO_RECORD = LockRecord(0, 0, b"", (), START, None)
"""What a lock shows before a pair was founded."""


class LockView(NamedTuple):
    """What a read of a lock shows: the record, and the lease of the primary unless it has ended."""

    record: LockRecord
    lease: LockLease | None


class Swap(NamedTuple):
    """A swap of the record of `record.version - 1`, sent by a session, which replaces the lease `over` if there is one.

    The lease of the record's primary is that of the session afterwards.
    """

    record: LockRecord
    session: int
    over: LockLease | None


def accepts(view: LockView, swap: Swap, *, session_alive: bool) -> bool:
    """Whether a lock carries a swap out: the version is the one that it names, and its sender is still there.

    A store that is gone could be made live by a swap that arrives late; its session ends before that.
    """
    lease = view.lease
    free = lease is None or lease == swap.over or lease.session == swap.session
    return session_alive and free and view.record.version == swap.record.version - 1


def foreign(record: LockRecord, pair: bytes) -> CallerError | None:
    """The error of a store of another pair than the lock's, which must neither join nor be live.

    A log that was not copied yet has no id.
    """
    if record.pair == pair or not (record.pair and pair):
        return None
    return CallerError(
        "this directory belongs to another pair than this lock: name the lock of its own pair, or name "
        "an empty directory here"
    )


def dissolved_by(record: LockRecord, store: Store) -> str:
    """What a store has to know of the end of its pair."""
    if record.live == store:
        return "the pair was dissolved, and this store has the log: repeat `txnbuf replication dissolve` to complete it"
    return "the pair was dissolved: the other store has the log, so remove this one"


def ineligible(record: LockRecord, log: StoreLog, *, founder: bool) -> str:
    """Why a store must not be promoted; empty if it may."""
    if log.partial:
        return "its copy of the log is incomplete"
    if record == NO_RECORD:
        return "" if founder else NOT_FOUNDED if log.is_new else RECORD_LOST
    if record.dissolved:
        return dissolved_by(record, log.store)
    if log.store not in record.in_sync:
        return "it is not in sync"
    reached, index = record.reached, log.index
    if index.base.lsn <= reached.lsn and not index.holds(reached):
        return f"its log lacks record {reached.lsn}, which it had: the directory was restored from an older copy"
    return ""


@dataclass
class PairMembership:
    """The lock's record as a primary knows it, and its swaps that may still happen, by request."""

    record: LockRecord
    pending: tuple[tuple[int, Swap], ...] = ()
    sent: int = 0
    """When the newest swap was sent."""

    @property
    def possible(self) -> frozenset[Store]:
        """Every store that may be in `in_sync`."""
        stores = {*self.record.in_sync}
        for _, swap in self.pending:
            stores.update(swap.record.in_sync)
        return frozenset(stores)

    def send(self, request: int, swap: Swap, now: int) -> None:
        self.pending, self.sent = (*self.pending, (request, swap)), now

    def settle(self, record: LockRecord) -> None:
        """The lock has this record: swaps of an older version can't happen any more."""
        if record.version >= self.record.version:
            self.record = record
        self.pending = tuple(each for each in self.pending if each[1].record.version > self.record.version)
