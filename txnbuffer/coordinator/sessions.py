"""Sessions, the blocks of ids that they lease, and the permission to write to a transaction

A lease is durable before it is answered, and its ids are higher than all before. An id that a session returns, or has
not used when it ends, is aborted in the log and never leased again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import numpy as np
from pyroaring import BitMap64

from txnbuffer.coordinator.core import Core
from txnbuffer.coordinator.decisions import Lease, Retired, retired_blocks
from txnbuffer.coordinator.messages import Leased, State
from txnbuffer.coordinator.transaction import (
    Block,
    IdStatus,
    Retirement,
    Session,
    TransactionState,
    Waiter,
    is_local,
    principal_tag,
    within,
)
from txnbuffer.coordinator.transaction import block as block_of
from txnbuffer.errors import (
    Error,
    ForeignTransaction,
    InvalidRequest,
    TooManyTransactions,
    TransactionAborted,
    UnknownTransaction,
)
from txnbuffer.model import Outcome, TxnId

Abort = Callable[..., None]
"""Aborts an open transaction for a reason; then the topics that have its records, if they are known."""
Ongoing = Mapping[TxnId, Sequence[str]]
"""The transactions that are ongoing in the buffers of topics, and these topics."""

GONE = "its client is gone: the process that had opened the log for it has ended or has closed the log"

SIGNS = 6
"""How often in `session_timeout` the log records which clients are still there that have open transactions.

A new owner knows from it for how long a client has been away. Such an entry is the lease of an id that is returned at
once: so a lease is the last sign of life of its session, and every release reads it.
"""

PARTICIPANT_GRACE = 2.0
"""Seconds after which the unfinished participants of a client whose connection has ended abort.

The task of a stopped or failed job is killed, and its records would block readers for `session_timeout`; a network that
fails for longer only makes the job repeat the task. The clients of an earlier owner have `session_timeout` from their
last sign of life.
"""


@dataclass
class Sessions:
    """The sessions of a coordinator and their ids, with all blocks but the oldest whose ids have all ended.

    `abort` aborts an open transaction; `leased` is called with each durable lease.
    `outstanding_of`: the leased ids that have not ended, by the tag of their principal.
    """

    _core: Core
    _next_id: int
    _abort: Abort
    _leased: Callable[[Lease], None]
    by_name: dict[str, Session] = field(default_factory=dict)
    all_blocks: list[Block] = field(default_factory=list)
    _expiring: deque[Block] = field(default_factory=deque)
    _retiring: BitMap64 = field(default_factory=BitMap64)
    _retiring_waiters: dict[int, list[tuple[Waiter, TxnId]]] = field(default_factory=dict)
    outstanding_of: Counter[str] = field(default_factory=Counter)
    _signs_due: float = 0.0
    used_unleased: BitMap64 = field(default_factory=BitMap64)
    """Ids above all leases that have ended: a client used them without a lease."""

    def connect(self, name: str) -> Session:
        session = self.by_name.setdefault(name, Session(name))
        session.disconnected_since = session.participants_until = None
        return session

    def disconnect(self, name: str) -> None:
        session = self.by_name.get(name)
        if session is not None:
            session.disconnected_since = self._core.now
            session.participants_until = self._core.now + PARTICIPANT_GRACE

    # Leases

    def lease(self, session: Session, request: int, count: int) -> None:
        """Lease ids to a session: `count`, or in rare cases fewer."""
        core = self._core
        if count < 1:
            core.answer(session.name, request, InvalidRequest(f"the size of a lease must be at least 1, got {count}"))
            return
        if (refusal := self._lease_refusal(session, count)) is not None:
            core.answer(session.name, request, refusal)
            return
        self._lease(session, count, partial(self._lease_durable, request))

    def _lease(self, session: Session, count: int, durable: Callable[[Block], None]) -> None:
        core = self._core
        while self._next_id in self.used_unleased:
            self._next_id += 1
        taken = self.used_unleased & block_of(self._next_id, count)
        first, last = self._next_id, int(taken.min()) - 1 if taken else self._next_id + count - 1
        self._next_id = last + 1
        block = self.add(session, first, last, core.now)
        session.recorded = core.now
        entry = Lease(first, last - first + 1, session.name, int(core.now * 1000))
        core.journal.put(entry, partial(self._durable, block, entry, durable))

    def _durable(self, block: Block, entry: Lease, durable: Callable[[Block], None]) -> None:
        self._leased(entry)
        durable(block)

    def _lease_refusal(self, session: Session, count: int) -> TooManyTransactions | None:
        """Why a session may not lease so many ids.

        A known principal gets at most half of what the others leave, so that none can take the ids of all.
        """
        config, total, tag = self._core.config, self.outstanding_of.total(), principal_tag(session.name)
        limits = [("max_open_session", config.max_open_session, session.outstanding, "")]
        if tag:
            used = self.outstanding_of[tag]
            share = (config.max_open - (total - used)) // 2
            limits.append(("max_open", share, used, " for one principal, half of what the others leave,"))
        limits.append(("max_open", config.max_open, total, ""))
        for name, limit, used, whose in limits:
            if used + count > limit:
                text = (
                    f"{used} transactions are open or leased, the limit transactions.{name}{whose} is {limit}: end "
                    "some, or return ids"
                )
                return TooManyTransactions(text, f"transactions.{name}")
        return None

    def add(self, session: Session, first: int, last: int, since: float) -> Block:
        """Add a block of ids above all others."""
        count = last - first + 1
        block = Block(session, first, last, count, since + self._core.config.lease_timeout)
        self.all_blocks.append(block)
        self._expiring.append(block)
        session.blocks.append(block)
        session.ids.add_range(first, last + 1)
        session.outstanding += count
        self.outstanding_of[principal_tag(session.name)] += count
        return block

    def load(self, lease: Lease, since: float) -> None:
        """Load a block that an older owner leased; the ids of it that have ended are known.

        The session counts as disconnected since its last sign of life.
        """
        config = self._core.config
        seen = lease.granted_at / 1000 + 2 * config.session_timeout / SIGNS
        seen = min(max(seen, since - config.session_timeout + config.reconnect_seconds), since)
        session = self.by_name.setdefault(lease.session, Session(lease.session, seen))
        session.disconnected_since = max(seen, session.disconnected_since or seen)
        block = self.add(session, lease.first, lease.first + lease.size - 1, since)
        self.reduce(block, block.left - len(self._unended(block_of(lease.first, lease.size))))

    def _record_signs_of_life(self) -> None:
        """Record in the log which sessions with open transactions are connected, or have finished participants."""
        core, interval = self._core, self._core.config.session_timeout / SIGNS
        if core.now < self._signs_due:
            return
        self._signs_due = core.now + interval
        for transaction in [*core.live.values()]:
            session = transaction.session
            if session is None or transaction.state is not State.OPEN or session.recorded > core.now - interval:
                continue
            if not is_local(session.name) and (session.disconnected_since is None or transaction.finished):
                self._lease(session, 1, self._give_back)

    def _give_back(self, block: Block) -> None:
        self._retire(block.session, block_of(block.first, block.last - block.first + 1))

    def _lease_durable(self, request: int, block: Block) -> None:
        session = block.session
        if self.by_name.get(session.name) is session:
            session.block = block
            self._core.answer(session.name, request, Leased(block.first, block.last - block.first + 1))
        else:
            self._give_back(block)

    def locate(self, least: int) -> Block | None:
        """The block of an id; None if it was never leased, or its whole block ended long ago."""
        at = bisect_right(self.all_blocks, least, key=attrgetter("first")) - 1
        if at >= 0 and least <= self.all_blocks[at].last:
            return self.all_blocks[at]
        return None

    # Transactions

    def find(
        self, name: str, request: int, txn: TxnId, *, commit: bool, operator: bool = False
    ) -> TransactionState | None:
        """The live transaction that a session, or an operator, asks for.

        None: the request is answered, or waits for a durable outcome.
        """
        core, status = self._core, self.status(txn)
        waiter = name, request, commit
        refusal: Error = _foreign(txn, "end it there")
        if status is IdStatus.ANOTHER_SHARD:
            refusal = core.wrong_coordinator(txn)
        elif not operator and self.is_of_another_principal(name, txn, status):
            refusal = of_another_principal(txn)
        elif isinstance(status, TransactionState):
            owner, parent = status.session, status.parent and status.parent.session
            anyone = operator or status.state is not State.OPEN or status.participant_of is not None
            if anyone or owner is None or name in (owner.name, parent and parent.name):
                return status
        elif isinstance(status, Block):
            if operator or status.session.name == name:
                return self.start(txn, status)
        elif status is IdStatus.UNLEASED:
            refusal = _unknown(txn)
        else:
            if status is IdStatus.ENDED:
                core.answer_ended(waiter, txn)
            else:
                self._retiring_waiters.setdefault(txn.least, []).append((waiter, txn))
            return None
        core.answer(name, request, refusal)
        return None

    def status(self, txn: TxnId) -> TransactionState | Block | IdStatus:
        """The live transaction of an id, or the lease of an id that it may begin with, or why there is neither."""
        core, least = self._core, txn.least
        if txn.most != core.shard:
            return IdStatus.ANOTHER_SHARD
        if (transaction := core.live.get(least)) is not None:
            return transaction
        if core.progress.has_ended(least):
            return IdStatus.ENDED
        if least in self._retiring:
            return IdStatus.RETIRING
        return self.locate(least) or IdStatus.UNLEASED

    def owner(self, txn: TxnId, status: TransactionState | Block | IdStatus) -> Session | None:
        """The session that leased an id of this status, known for as long as the outcome is remembered."""
        known = self.locate(txn.least) if isinstance(status, IdStatus) else status
        return None if known is None else known.session

    def is_of_another_principal(self, name: str, txn: TxnId, status: TransactionState | Block | IdStatus) -> bool:
        """Whether the session of another principal leased an id; not if nobody is known to have leased it."""
        owner = self.owner(txn, status)
        return owner is not None and principal_tag(owner.name) != principal_tag(name)

    def open_transaction(self, txn: TxnId) -> TransactionState | None:
        """An open transaction, which may begin now; None if it has ended or is ending, or was never leased."""
        status = self.status(txn)
        if isinstance(status, Block):
            return self.start(txn, status)
        return status if isinstance(status, TransactionState) and status.state is State.OPEN else None

    def start(self, txn: TxnId, block: Block | None) -> TransactionState:
        """Create a live transaction, which is aborted if it is still open after the default timeout."""
        core = self._core
        transaction = TransactionState(txn, None if block is None else block.session, block)
        core.live[txn.least] = transaction
        core.watch(transaction, core.now + core.config.transaction_timeout)
        return transaction

    def unused(self, session: Session, ids: Iterable[TxnId]) -> dict[TxnId, Block]:
        """Those of these ids that a session has leased and nothing has begun with, as is usual, with their leases."""
        core, block = self._core, session.block
        found: dict[TxnId, Block] = {}
        if block is None:
            return found
        shard, live, retiring = core.shard, core.live, self._retiring
        mark, settled = core.progress.low_water_mark, core.progress.settled
        for txn in ids:
            least = txn.least
            if not block.first <= least <= block.last:
                other = self.locate(least)
                if other is None or other.session is not session:
                    continue
                block = other
            known = least in live or least <= mark or least in settled or least in retiring
            if txn.most == shard and not known:
                found[txn] = block
        return found

    def write_refusals(self, name: str, ids: Sequence[TxnId]) -> dict[TxnId, Error]:
        """Why a session may not write to these transactions; those that are its own, and open, have no entry."""
        session = self.by_name.get(name)
        unused: Mapping[TxnId, Block] = {} if session is None else self.unused(session, ids)
        refusals = {}
        for txn in ids:
            if txn not in unused and (refusal := self._write_refusal(name, txn)) is not None:
                refusals[txn] = refusal
        return refusals

    def _write_refusal(self, name: str, txn: TxnId) -> Error | None:
        """Why a session may not write to a transaction; None if it is the session's own, and open."""
        core, status = self._core, self.status(txn)
        if status is IdStatus.ANOTHER_SHARD:
            return core.wrong_coordinator(txn)
        if status is IdStatus.UNLEASED:
            return _unknown(txn)
        if status is IdStatus.ENDED:
            if self.is_of_another_principal(name, txn, status):
                return of_another_principal(txn)
            aborted = core.outcomes.find(txn.least) is Outcome.ABORT
            return TransactionAborted(txn, core.why_aborted(txn)) if aborted else _ended(txn)
        owner = self.owner(txn, status)
        if owner is None or owner.name != name:
            return _foreign(txn, "write with the one that leased it")
        if status is IdStatus.RETIRING:
            return TransactionAborted(txn, "its id was returned unused")
        if isinstance(status, TransactionState) and status.state in (State.ABORTING, State.ABORTED):
            return status.refusal or TransactionAborted(txn, status.reason or "it had ended before")
        if isinstance(status, Block) or (status.state is State.OPEN and status.plan is None):
            return None
        return _ended(txn)

    def reduce(self, block: Block, count: int) -> None:
        """This many ids of a block have ended."""
        block.left -= count
        block.ended = self._core.now
        block.session.outstanding -= count
        self.outstanding_of[principal_tag(block.session.name)] -= count

    # Returning ids

    def return_ids(self, session: Session, blocks: Iterable[tuple[int, int]]) -> None:
        """A session returns ids, as first ids and sizes; the ones that it has used stay."""
        ids = BitMap64()
        for first, size in blocks:
            ids |= within(session.ids, first - 1, first + size - 1)
        self._retire(session, ids)

    def _blocks_from(self, session: Session, first: int, last: int) -> Iterator[Block]:
        """The blocks of a session with ids from `first` to `last`."""
        blocks = session.blocks
        for at in range(bisect_left(blocks, first, key=attrgetter("last")), len(blocks)):
            if blocks[at].first > last:
                return
            yield blocks[at]

    @property
    def highest_id(self) -> int:
        """The highest id leased so far."""
        return self._next_id - 1

    def keep_only(self, session: Session, claimed: Iterable[int], up_to: int, reason: str) -> None:
        """Of a session's ids up to `up_to`: abort all open transactions but the claimed ones, and retire unused ids.

        A branch lives as long as its parent, and a finished participant until its number is committed.
        """
        kept = set(claimed)
        ids = within(session.ids, 0, up_to)
        for transaction in self._open_among(ids):
            if transaction.txn.least not in kept:
                self._abort(transaction, reason)
        self._retire(session, ids)

    def remove(self, session: Session) -> None:
        """Remove a session; `keep_only` aborts its open transactions."""
        if self.by_name.get(session.name) is session:
            del self.by_name[session.name]

    def gone(self) -> list[Session]:
        """The sessions whose client is gone: it was away for too long, or was in the process of an owner that ends."""
        return [one for one in self.by_name.values() if is_local(one.name) or self._is_over(one)]

    def _is_over(self, session: Session) -> bool:
        away = session.disconnected_since
        return away is not None and away <= self._core.now - self._core.config.session_timeout

    def _why(self, session: Session) -> str:
        return GONE if is_local(session.name) else f"its client was away for {self._core.config.session_timeout:g} s"

    def end(self, sessions: Iterable[Session], ongoing: Ongoing) -> None:
        """End sessions whose clients are gone, with all their ongoing transactions, branches among them."""
        ended = {id(session): self._why(session) for session in sessions}
        for txn, topics in ongoing.items():
            block = self.locate(txn.least)
            if block is not None and (why := ended.get(id(block.session))) is not None:
                transaction = self.open_transaction(txn)
                if transaction is not None:
                    self._abort(transaction, why, tuple(topics))
        for session in sessions:
            self._end(session)

    def _end(self, session: Session) -> None:
        self.remove(session)
        self.keep_only(session, (), self.highest_id, self._why(session))

    def tick(self) -> None:
        """End sessions whose client was disconnected for too long, and leases that were not used in time."""
        core = self._core
        for session in self.by_name.values():
            session.blocks = self.blocks(session)
            session.ids = self._unended(session.ids)
            if session.participants_until is not None and session.participants_until <= core.now:
                session.participants_until = None
                self._abort_participants(session)
        for session in [*self.by_name.values()]:
            if self._is_over(session):
                self._end(session)
        self._record_signs_of_life()
        expired: dict[Session, BitMap64] = {}
        while self._expiring and self._expiring[0].expires <= core.now:
            block = self._expiring.popleft()
            if block.left:
                expired.setdefault(block.session, BitMap64()).add_range(block.first, block.last + 1)
        for session, ids in expired.items():
            self._retire(session, ids)
        del self.all_blocks[: len([*itertools.takewhile(self._is_forgettable, self.all_blocks)])]

    def _is_forgettable(self, block: Block) -> bool:
        """Whether all ids of a block have ended, and nobody asks any more who leased them."""
        keeps_owner = principal_tag(block.session.name) and block.ended + self._core.config.remember > self._core.now
        return block.left == 0 and not keeps_owner

    def _abort_participants(self, session: Session) -> None:
        for transaction in self._open_among(session.ids):
            if transaction.participant_of is not None:
                self._abort(transaction, f"its client was away for {PARTICIPANT_GRACE:g} s")

    def _open_among(self, ids: BitMap64) -> Iterator[TransactionState]:
        """The open transactions that end with their session: no branches, and no finished participants."""
        live = self._core.live
        for least in [least for least in self._unended(ids) if least in live]:
            transaction = live[least]
            if transaction.state is State.OPEN and transaction.parent is None and not transaction.finished:
                yield transaction

    def blocks(self, session: Session) -> list[Block]:
        """The blocks of a session that have ids left."""
        return [block for block in session.blocks if block.left]

    def retired(self, retirement: Retirement) -> None:
        """The ABORT of unused ids is durable: they are settled, since nobody wrote with them."""
        core = self._core
        self._retiring -= retirement.ids
        core.progress.settled.update(retirement.ids)
        core.outcomes.update(retirement.ids, Outcome.ABORT, core.now)
        for block in self._blocks_from(retirement.session, retirement.ids.min(), retirement.ids.max()):
            self.reduce(block, retirement.ids.range_cardinality(block.first, block.last + 1))
        waiting = self._retiring_waiters
        for least in retirement.ids if waiting else ():
            for waiter, txn in waiting.pop(least, ()):
                core.answer_outcome(waiter, txn, Outcome.ABORT, "its id was returned unused")

    def _retire(self, session: Session, leased: BitMap64) -> None:
        """Abort those ids of a session that are not used."""
        ids = self._unended(leased) - self._retiring
        live = self._core.live
        for least in [least for least in ids if least in live]:
            ids.remove(least)
        for some, blocks in in_blocks(ids, retired_blocks(self._core.config.max_message_bytes)):
            self._retiring |= some
            self._core.journal.retire(Retirement(session, some), blocks)

    def _unended(self, ids: BitMap64) -> BitMap64:
        progress = self._core.progress
        unended = ids - progress.settled
        unended.remove_range(0, progress.low_water_mark + 1)
        return unended


def in_blocks(ids: BitMap64, most: int) -> Iterator[tuple[BitMap64, list[Retired]]]:
    """A set of ids in parts of at most `most` blocks, each with these blocks."""
    blocks = blocks_of(ids) if ids else []
    for start in range(0, len(blocks), most):
        some = blocks[start : start + most]
        yield within(ids, some[0].first - 1, some[-1].first + some[-1].size - 1), some


def blocks_of(ids: BitMap64) -> list[Retired]:
    """A set of ids as blocks of consecutive ids."""
    column = np.array(ids.to_array(), np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=column[0] - 2) > 1)
    counts = np.diff(starts, append=len(column))
    return list(map(Retired, column[starts].tolist(), counts.tolist()))


def of_another_principal(txn: TxnId) -> ForeignTransaction:
    return ForeignTransaction(f"transaction {txn} belongs to another principal: ask with its own credentials")


def _foreign(txn: TxnId, instead: str) -> Error:
    return ForeignTransaction(f"transaction {txn} belongs to another session: {instead}")


def _unknown(txn: TxnId) -> Error:
    return UnknownTransaction(f"transaction {txn} was never leased: begin transactions with ids of a lease")


def _ended(txn: TxnId) -> Error:
    return InvalidRequest(f"transaction {txn} has ended or is ending: begin another one")
