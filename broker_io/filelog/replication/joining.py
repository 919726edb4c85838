"""A backup that can't just follow: it cuts its log, or gets a copy

Before anything durable is dropped three things must be true. The primary has taken the store out of `in_sync`. The
store has itself read the lock, after the primary asked it to rejoin, and found this primary in this epoch and itself
not in sync. And it has synced a mark that it is partial, with which it never becomes live. The mark is removed after
the last byte is synced and the end compared, and before the store says that anything is durable.

A copy is the first thing on a link: one that comes after records would take the state back.
"""

from __future__ import annotations

from broker_io.filelog.log.records import START, Index, StoreLog
from broker_io.filelog.replication import following
from broker_io.filelog.replication.member import Joining, PairMember, Role, Step
from broker_io.filelog.replication.messages import (
    CatchUp,
    Copied,
    CopyBegin,
    CopyRequest,
    Cut,
    FilesMissing,
    LockRead,
    MarkPartial,
    PartialSynced,
    Rejoin,
    Replace,
    Replaced,
    Tick,
    WasCut,
)


def on_rejoin(member: PairMember, message: Rejoin) -> None:
    """The primary asks this store to rejoin, as the first thing on a link: read the lock before anything else."""
    if not following.obeys(member, message.epoch):
        return
    if member.followed is not None:
        member.break_link()
        return
    joining = Joining(message.epoch, message.store, member.read_lock(), replace=message.plan is CatchUp.REPLACE)
    if message.plan is CatchUp.CUT:
        joining.cut_after = message.after
    member.role, member.joining = Role.JOINING, joining


def on_lock_read(member: PairMember, event: LockRead) -> None:
    """Go on only if the lock says what the primary says."""
    member.take_read(event.request, event.view)
    joining = member.joining
    if joining is None or joining.step is not Step.CHECK or event.request != joining.request:
        return
    record = event.view.record
    if (record.live, record.epoch) != (joining.store, joining.epoch) or member.store in record.in_sync:
        member.break_link()
        return
    joining.pair = record.pair
    joining.step, member.busy, member.log.partial = Step.MARK, True, True
    member.do(MarkPartial(True))


def on_tick(member: PairMember, event: Tick) -> None:
    """As a backup; a read of the lock without an answer is made again."""
    following.on_tick(member, event)
    joining = member.joining
    if joining is not None and joining.step is Step.CHECK and member.reading is not None:
        joining.request = member.reading


def on_partial_synced(member: PairMember, event: PartialSynced) -> None:
    """The mark is set: drop. Or it is removed: say what this store has now."""
    member.busy, joining = False, member.joining
    member.log.partial = event.partial
    if joining is None:
        following.greet(member)
    elif not event.partial:
        member.role, member.joining = Role.BACKUP, None
        following.greet(member)
    elif joining.cut_after is not None:
        joining.step = Step.CUT
        cut(member, joining.cut_after.lsn)
    elif joining.replace:
        joining.step, member.busy = Step.REPLACE, True
        member.do(Replace())
    else:
        _request_copy(member, joining)


def on_files_missing(member: PairMember, _event: FilesMissing) -> None:
    """Ask for a copy over a new link; the primary takes this store out of `in_sync` before."""
    member.lacking = True
    member.break_link()


def cut(member: PairMember, lsn: int) -> None:
    """Cut the log after an lsn; until that is done nothing is added to it."""
    member.busy = True
    member.log.cut(lsn)
    member.do(Cut(lsn))


def on_cut(member: PairMember, _event: WasCut) -> None:
    """What is left is a prefix of the primary's log: the store is whole again."""
    member.busy, joining = False, member.joining
    if joining is None:
        following.greet(member)
    elif joining.cut_after == member.log.index.end:
        _unmark(member, joining)
    else:
        member.break_link()


def on_replaced(member: PairMember, event: Replaced) -> None:
    """An empty store under a new id, which has its own session; the old directory was set aside."""
    member.busy = False
    member.end_session()
    member.keep_session()
    member.log = StoreLog(event.store, Index(), 0, 0, 0, START, partial=True)
    member.applying, member.noted, member.lacking = 0, 0, False
    if member.joining is None:
        following.greet(member)
    else:
        _request_copy(member, member.joining)


def _request_copy(member: PairMember, joining: Joining) -> None:
    joining.step = Step.COPY
    member.send(CopyRequest(joining.epoch, member.store))


def on_copy_begin(member: PairMember, message: CopyBegin) -> None:
    """A copy up to this mark follows; it is the one that was asked for, and the only one on this link."""
    joining = member.joining
    if joining is None:
        return
    same = (message.epoch, message.store) == (joining.epoch, joining.store)
    if same and message.epoch >= member.floor and joining.step is Step.COPY and joining.copy_at is None:
        joining.copy_at, joining.forks = message.at, message.forks
    else:
        member.break_link()


def on_copied(member: PairMember, event: Copied) -> None:
    """Every byte of the copy is synced, and its end is that of the primary's log."""
    joining = member.joining
    if joining is None or joining.step is not Step.COPY or event.at != joining.copy_at:
        return
    at = event.at
    member.log = StoreLog(
        member.store, Index(at), at.lsn, at.lsn, at.lsn, at, partial=True, forks=joining.forks, pair=joining.pair
    )
    member.applying, member.noted, member.lacking = at.lsn, at.lsn, False
    _unmark(member, joining)


def _unmark(member: PairMember, joining: Joining) -> None:
    joining.step, member.busy = Step.UNMARK, True
    member.do(MarkPartial(False))
