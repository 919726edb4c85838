"""A store becomes live: by a swap to the next epoch, and never otherwise

Also a primary that restarts, or whose lease has lapsed, takes the next epoch: records of its epoch that it lost may be
on the backup. It need not wait for its own lease, which ends when it begins another session, and it has locked its
directory; a lease of another store has to end first.

From the moment when the swap is sent until it is settled the store takes nothing from its former primary. The swap sets
`in_sync` to the store alone, so after it everything in its log is committed. The epoch begins with a record that names
the log before it. The store serves once that record is durable and applied, if its lease is still valid then.

A forced promotion accepts loss. It waits for the lease and goes through the lock as well. The record of the lock keeps
the mark to which the log is cut until the epoch record is durable and a later swap confirms it, so a crash in between
leads to the same cut and the same kind of epoch record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from broker_io.errors import NotPromotable
from broker_io.filelog.log.records import Kind, Mark, make_record
from broker_io.filelog.replication import damage, following, joining
from broker_io.filelog.replication.lock import (
    LockRecord,
    LockView,
    PairMembership,
    Swap,
    dissolved_by,
    foreign,
    ineligible,
)
from broker_io.filelog.replication.member import Claim, Leading, PairMember, Role
from broker_io.filelog.replication.messages import (
    Applied,
    BuildEpoch,
    EpochContent,
    Event,
    LockRead,
    Serve,
    SessionEnded,
    SwapAnswered,
    SwapLock,
    Synced,
    WasCut,
    WriteRecords,
)


def on_start(member: PairMember, _event: Event) -> None:
    """Apply what is known to be committed, and begin a session; then the lock is read."""
    member.apply_to(member.log.commit)
    member.keep_session()


def on_force(member: PairMember, _event: Event) -> None:
    """Claim the next epoch once the lease has ended, if it does soon: a request must not come true much later.

    Raises NotPromotable for a store that lacks a part of its own log, or has none yet, or whose pair was dissolved.
    """
    if member.known is not None and member.known.record.dissolved:
        raise NotPromotable(dissolved_by(member.known.record, member.store))
    if member.log.partial:
        raise NotPromotable("this store is an incomplete copy: force the other one, or restore a backup")
    if member.log.index.end.epoch == 0:  # a founder that was emptied has a mark, but no record of an epoch
        raise NotPromotable("this store is empty, it never had a copy: force the other one, or restore a backup")
    member.force_until = member.now + 3 * member.settings.terms.ttl


class Chance(NamedTuple):
    """What a read of the lock says of the next epoch: whether the lease has ended, whether this store lets the other
    one go first because of its damage, and whether an operator forces this one.
    """

    record: LockRecord
    ended: bool
    yields: bool
    force: bool


WAITS: dict[str, Callable[[PairMember, Chance], bool]] = {
    "for the end of the lease": lambda _, chance: not chance.ended,
    "for a store without its damage": lambda _, chance: chance.yields and not chance.force,
    "for the backup to which it has switched": lambda member, chance: (
        member.now < member.deferred_until and chance.record.live == member.store and not chance.force
    ),
    "for the end of a change of its store": lambda member, _: member.busy,
    "for the sync of its log": lambda member, _: member.log.durable < member.log.index.end.lsn,
    "for a session": lambda member, _: not member.session.holds_at(member.now, member.settings.terms),
}
"""What a store waits for before it claims the next epoch, and whether it does."""


def on_lock_read(member: PairMember, event: LockRead) -> None:
    """Claim the next epoch if the lease has ended and this store may be promoted."""
    first = not member.informed
    if not member.take_read(event.request, event.view):
        return
    pair = b"" if member.log.is_new else member.log.pair
    if (error := foreign(event.view.record, pair)) is not None:
        member.stop(str(error), error)
        return
    if first:
        following.greet(member)
    record, log = event.view.record, member.log
    ended = member.watch.ended(event.view.lease, member.read_since, member.now, member.settings.terms)
    force = member.now < member.force_until
    chance = Chance(record, ended, _yields(member, record, ended=ended), force)
    if any(waits(member, chance) for waits in WAITS.values()):
        return
    # A founder whose record is lost does not know whether the other store was live meanwhile.
    reason = ineligible(record, log, founder=member.settings.founder and not member.record_lost)
    if not reason or (force and not log.partial and not record.dissolved):
        _claim(member, event.view, forced=bool(reason))


def _yields(member: PairMember, record: LockRecord, *, ended: bool) -> bool:
    """Whether a store lets the other one, if that is in sync, become live first: for one lease.

    It does if it has damage that the other one does not have.
    """
    if not (ended and damage.only_here(member) and len(record.in_sync) > 1):
        member.yields_since = None
        return False
    if member.yields_since is None:
        member.yields_since = member.now
    return member.now < member.yields_since + member.settings.terms.ttl


def _claim(member: PairMember, view: LockView, *, forced: bool) -> None:
    """Send the swap that makes this store live."""
    record, log, session = view.record, member.log, member.session.number
    if session is None:
        return
    if forced:  # a restart would show as much, before it learns of the cut
        log.commit = max(log.commit, min(log.named, log.durable))
    cut = log.mark_at(log.commit) if forced else _unfinished(member, record)
    # The log may be in a later epoch than the lock if the record of the lock was lost.
    epoch = max(record.epoch, log.index.end.epoch, log.manifest.epoch) + 1
    in_sync, pair = (log.store,), record.pair or log.pair
    wanted = LockRecord(record.version + 1, epoch, log.store, in_sync, cut or log.index.end, cut, pair)
    member.break_link()
    member.role = Role.CLAIMING
    member.claimed = Claim(Swap(wanted, session, view.lease), (), 0)
    _send(member, member.claim)


def _unfinished(member: PairMember, record: LockRecord) -> Mark | None:
    """The cut of a forced promotion of this store whose epoch record is not in its log."""
    done = record.forced in [fork.before for fork in member.log.forks]
    return None if done or record.live != member.store else record.forced


def _send(member: PairMember, claim: Claim) -> None:
    request = member.request()
    claim.requests, claim.sent = (*claim.requests, request), member.now
    member.do(SwapLock(request, claim.swap))


def on_claim_tick(member: PairMember, _event: Event) -> None:
    """An answer that is missing is settled by the same swap once more, and by what a read shows."""
    member.keep_session()
    claim = member.claim
    if member.now >= claim.sent + member.settings.answer_timeout:
        _send(member, claim)
        member.read_lock()


def on_claim_answered(member: PairMember, event: SwapAnswered) -> None:
    """The claim is won by a success, and lost once no request of it can succeed.

    One that was refused may leave others without an answer, which could still arrive much later; they end with the
    session. So a primary that was only slow, and makes no swap, is followed again.
    """
    member.see(event.view)
    claim = member.claim
    if event.request not in claim.requests:
        return
    if event.accepted:
        _won(member, claim.swap.record)
        return
    claim.requests = tuple(each for each in claim.requests if each != event.request)
    if _decided_by(member, event.view):
        return
    if claim.requests:
        member.end_session()
        member.keep_session()
    _lost(member)


def on_claim_read(member: PairMember, event: LockRead) -> None:
    member.take_read(event.request, event.view)
    _decided_by(member, event.view)


def _decided_by(member: PairMember, view: LockView) -> bool:
    """Whether the lock, as it shows itself, says what became of the claim; the lease says whose swap it was."""
    claim = member.claim
    if view.record.version < claim.swap.record.version:
        return False
    ours = view.record == claim.swap.record and view.lease is not None and view.lease.session == claim.swap.session
    if ours:
        _won(member, view.record)
    else:
        _lost(member)
    return True


def on_claim_session_ended(member: PairMember, event: SessionEnded) -> None:
    """Swaps of a session that has ended are refused; one may have succeeded before, which the next read shows."""
    if event.session == member.session.number:
        member.end_session()
        member.keep_session()
        _lost(member)


def _lost(member: PairMember) -> None:
    member.role, member.claimed = Role.BACKUP, None
    following.greet(member)


def _won(member: PairMember, record: LockRecord) -> None:
    """This store is live in its own epoch; cut its log after a forced promotion, then begin."""
    member.role, member.claimed, member.force_until = Role.OPENING, None, 0
    end = member.log.index.end
    forced = record.forced is not None
    member.led = Leading(record.epoch, PairMembership(record), record.forced or end, forced, member.now)
    if record.forced is not None and record.forced != end:
        joining.cut(member, record.forced.lsn)
    else:
        _begin(member, member.leading)


def on_opening_cut(member: PairMember, _event: WasCut) -> None:
    member.busy = False
    _begin(member, member.leading)


def _begin(member: PairMember, leading: Leading) -> None:
    """Everything in the log is committed now; the epoch record follows it."""
    log = member.log
    log.commit = log.index.end.lsn
    member.apply_to(log.commit)
    member.do(BuildEpoch(leading.epoch, leading.begins, leading.forced))


def on_epoch_content(member: PairMember, event: EpochContent) -> None:
    log, leading = member.log, member.leading
    if event.epoch != leading.epoch or leading.opened is not None:
        return
    kind = Kind.FORCED if leading.forced else Kind.EPOCH
    record = make_record(log.index.end, leading.epoch, log.commit, event.content, kind)
    log.add(record)
    leading.opened = leading.answered = record.lsn
    member.do(WriteRecords((record,), log.durable))


def on_opening_synced(member: PairMember, event: Synced) -> None:
    """The epoch record is durable on the only store in sync, and so committed."""
    following.note_synced(member, event.lsn)
    log, opened = member.log, member.leading.opened
    if opened is not None and log.durable >= opened:
        log.commit = opened
        member.apply_to(opened)


def on_opening_applied(member: PairMember, event: Applied) -> None:
    following.note_applied(member, event.lsn)
    opened = member.leading.opened
    if opened is not None and member.log.applied >= opened:
        if member.leading.membership.record.forced is None:
            serve(member)
        else:
            _confirm(member, member.leading)


def _confirm(member: PairMember, leading: Leading) -> None:
    """Tell the lock that the epoch record of a forced promotion is durable."""
    record, session = leading.membership.record, member.session.number
    if session is None or leading.opened is None:
        return
    wanted = record._replace(version=record.version + 1, reached=member.log.mark_at(leading.opened), forced=None)
    swap, request = Swap(wanted, session, None), member.request()
    leading.membership.send(request, swap, member.now)
    member.do(SwapLock(request, swap))


def on_opening_tick(member: PairMember, _event: Event) -> None:
    """A lease that lapses before the epoch has begun ends it; a missing confirmation is sent again."""
    leading = member.leading
    if not member.session.holds_at(member.now, member.settings.terms):
        member.step_down("the lease lapsed before the epoch had begun")
        return
    member.keep_session()
    membership = leading.membership
    if membership.pending and member.now >= membership.sent + member.settings.answer_timeout:
        _confirm(member, leading)
        member.read_lock()


def on_opening_view(member: PairMember, event: LockRead | SwapAnswered) -> None:
    """The lock has confirmed a forced promotion, or says that another store is live."""
    member.see(event.view)
    membership, record = member.leading.membership, event.view.record
    if record.version < membership.record.version:
        return
    if (record.live, record.epoch) != (member.store, member.leading.epoch):
        member.step_down(f"epoch {record.epoch} has begun on another store")
        return
    membership.settle(record)
    opened = member.leading.opened
    if opened is not None and member.log.applied >= opened and record.forced is None:
        serve(member)


def serve(member: PairMember) -> None:
    """Become live, on a new link, if the lease is still valid."""
    leading = member.leading
    if not member.session.holds_at(member.now, member.settings.terms):
        member.step_down("the lease lapsed before the epoch had begun")
        return
    member.break_link()
    member.role, leading.heard = Role.LIVE, member.now
    member.do(Serve())
