"""A primary builds records, ships them, and answers once they are committed and applied

A record goes to the backup and into the journal at the same time. It is committed when it is durable on every store
that may be in `in_sync`; what a backup says counts only on the link on which the logs were compared. Only then is it
applied, and only after that are clients answered, so no reader sees what a promotion could drop and a client reads its
own writes. One record is under way at a time: what waits meanwhile is the next one.

A read is evaluated first; then `reads` is asked, and the answer is sent if it says so.
"""

from __future__ import annotations

import enum

from broker_io.errors import DiskWatermark, Error, NotInSync, NotLive
from broker_io.filelog.log.records import Store, make_record
from broker_io.filelog.replication import damage, following
from broker_io.filelog.replication.lock import RECORD_LOST
from broker_io.filelog.replication.member import PairMember, Peer, PeerStage, Role
from broker_io.filelog.replication.messages import (
    AnswerClients,
    AppendRequested,
    Applied,
    CatchUp,
    CopyBegin,
    CopyRequest,
    Durable,
    Follow,
    Hello,
    LinkUp,
    Records,
    Rejoin,
    SendCopy,
    SendStored,
    SwitchRequested,
    Synced,
    WriteRecords,
)

MOST_NAMES = 3
"""Of topics in an error."""


class Gate(enum.Enum):
    """What to do with the answer to a read or a stream: send it, wait for the epoch to begin, or refuse it."""

    SEND = "send"
    WAIT = "wait"
    REFUSE = "refuse"


def reads(member: PairMember, now: int) -> Gate:
    """Whether the answer to a read, which was evaluated before this call, may be sent; for streams too.

    A member that has not begun its epoch may have fallen back to its commit index: a stream that asks for more would be
    rolled back for no reason.
    """
    if member.role in (Role.CLAIMING, Role.OPENING):
        return Gate.WAIT
    return Gate.SEND if member.serves and member.session.holds_at(now, member.settings.terms) else Gate.REFUSE


def refusal(member: PairMember, now: int) -> Error | None:
    """Why a primary takes no append now, before anything is sent or written; None if it does.

    A disk above its watermark raises at once; everything else passes.
    """
    if member.role is not Role.LIVE or not member.session.holds_at(now, member.settings.terms):
        return NotLive("this member of the pair is not live: connect to the other one")
    peer = member.peer
    if member.full or (peer is not None and peer.full and peer.store in required(member)):
        return DiskWatermark("less free space than the watermark on a member of the pair: free space there")
    return None


def has_room(member: PairMember) -> bool:
    """Whether the next record may be built: nothing is under way, and a backup in sync is not too far behind.

    The size of the next record does not count, so one above the window passes when nothing else waits.
    """
    log, peer = member.log, member.peer
    if log.commit < log.index.end.lsn:
        return False
    if peer is None or peer.durable is None or peer.store not in required(member):
        return True
    applied = max(peer.applied, log.index.base.lsn)
    return log.index.bytes_between(applied, log.index.end.lsn) < member.settings.window_bytes


def on_append(member: PairMember, event: AppendRequested) -> None:
    """Build a record. Raises NotLive, DiskWatermark; the caller has asked `has_room`."""
    if (error := refusal(member, member.now)) is not None:
        raise error
    log, leading, peer = member.log, member.leading, member.peer
    record = make_record(log.index.end, leading.epoch, log.commit, event.content)
    log.add(record)
    member.do(WriteRecords((record,), log.durable))
    if peer is not None and peer.stage is PeerStage.FOLLOWING and peer.sent == record.lsn - 1:
        peer.sent = record.lsn
        member.send(Records(leading.epoch, log.store, (record,), log.commit))


def required(member: PairMember) -> frozenset[Store]:
    """The stores that must have a record before it is committed."""
    peer = member.peer
    joining = {peer.store} if peer is not None and peer.required else set()
    return member.leading.membership.possible | joining


def lacks_backup(member: PairMember) -> bool:
    """Whether a primary commits nothing because fewer stores than `min_in_sync` are required."""
    return member.serves and len(required(member)) < member.settings.min_in_sync


def advance(member: PairMember) -> None:
    """Raise the commit index, and apply what it allows."""
    log, peer, needed = member.log, member.peer, required(member)
    lsn = log.durable
    for store in needed - {member.store}:
        durable = peer.durable if peer is not None and peer.store == store else None
        lsn = min(lsn, durable or 0)
    if len(needed) < member.settings.min_in_sync:
        lsn = min(lsn, member.leading.opened or 0)
    if lsn > log.commit:
        log.commit = lsn
        member.apply_to(lsn)
        if not has_room(member):
            send_commit(member)


def on_synced(member: PairMember, event: Synced) -> None:
    following.note_synced(member, event.lsn)


def on_applied(member: PairMember, event: Applied) -> None:
    """What is applied can be read here, so its clients may be answered, while the lease is valid.

    After the lease a forced promotion may drop it; without one the answer would be right, and its client asks again.
    """
    following.note_applied(member, event.lsn)
    log, leading = member.log, member.leading
    if log.applied > leading.answered and member.session.holds_at(member.now, member.settings.terms):
        leading.answered = log.applied
        member.do(AnswerClients(log.applied))


def on_link_up(member: PairMember, event: LinkUp) -> None:
    """Wait for the backup to say what it has."""
    member.unlink()
    member.link = event.link


def on_hello(member: PairMember, message: Hello) -> None:
    """A backup says what it has: let it follow, or see that it leaves `in_sync` and rejoins."""
    leading, old = member.leading, member.peer
    if message.epoch > leading.epoch:
        member.read_lock()
        return
    plan = plan_for(member, message)
    copied = old is not None and old.copied
    if old is not None and old.stage is PeerStage.FOLLOWING:
        member.break_link()
        return
    member.peer = peer = Peer(message.store, PeerStage.FOLLOWING, message.end.lsn, copied=copied, lag_since=member.now)
    if plan is CatchUp.TAIL:
        leading.heard = member.now
        member.send(Follow(leading.epoch, member.store, message.end, member.log.commit))
        damage.on_compared(member)
    else:
        peer.stage = PeerStage.LEAVING
        peer.sent = message.commit.lsn if plan is CatchUp.CUT else member.log.index.end.lsn
        peer.rejoin = Rejoin(leading.epoch, member.store, plan, message.commit)


def plan_for(member: PairMember, message: Hello) -> CatchUp:
    """How a backup gets our log, given what it has."""
    log, index = member.log, member.log.index
    if message.partial:
        return CatchUp.COPY
    if index.holds(message.end):
        return CatchUp.TAIL
    if index.holds(message.commit):
        return CatchUp.CUT
    older = message.commit.lsn < index.base.lsn and not log.is_beyond_a_fork(message.commit)
    return CatchUp.COPY if older else CatchUp.REPLACE


def on_copy_request(member: PairMember, message: CopyRequest) -> None:
    """Send a copy as of what is applied, once on a link and before any record."""
    peer, leading = member.peer, member.leading
    rejoining = peer is not None and peer.stage is PeerStage.REJOINING
    if peer is None or not rejoining or message.epoch != leading.epoch or member.link is None:
        member.break_link()
        return
    peer.stage, peer.store, peer.copied, peer.sent = PeerStage.COPYING, message.store, True, member.log.applied
    log = member.log
    member.do(SendCopy(member.link, CopyBegin(leading.epoch, member.store, log.mark_at(log.applied), log.forks)))


def on_durable(member: PairMember, message: Durable) -> None:
    """What the backup has synced counts if it is a part of our log, compared on this link, in this epoch."""
    peer, leading, log = member.peer, member.leading, member.log
    if peer is None or peer.stage is not PeerStage.FOLLOWING:
        return
    if (message.epoch, message.store) != (leading.epoch, peer.store) or not log.index.holds(message.mark):
        member.break_link()
        return
    durable = message.mark.lsn
    if durable > (peer.durable or 0) or durable >= peer.sent:
        leading.heard = member.now
    peer.durable = max(durable, peer.durable or 0)
    peer.applied, peer.full, peer.copied = message.applied, message.full, False


def ship(member: PairMember) -> None:
    """Send a backup the stored records that it lacks, a window at a time, and the commit index."""
    peer, log, link = member.peer, member.log, member.link
    if peer is None or peer.stage is not PeerStage.FOLLOWING or peer.durable is None or link is None:
        return
    end, last = log.index.end.lsn, peer.sent
    if peer.durable < log.index.base.lsn:
        member.break_link()
        return
    while last < end and log.index.bytes_between(peer.durable, last) < member.settings.window_bytes:
        last += 1
    if last > peer.sent:
        template = Records(member.leading.epoch, log.store, (), log.commit)
        member.do(SendStored(link, template, peer.sent, last))
        peer.sent = last


def send_commit(member: PairMember) -> None:
    """Send the commit index by itself."""
    peer = member.peer
    if peer is not None and peer.stage is PeerStage.FOLLOWING:
        member.send(Records(member.leading.epoch, member.store, (), member.log.commit))


def on_switch(member: PairMember, _event: SwitchRequested) -> None:
    """Take no more appends, until the backup has everything. Raises NotInSync if it is not in sync, or damaged."""
    if why := switch_refusal(member):
        raise NotInSync(why)
    member.role = Role.SWITCHING


def switch_refusal(member: PairMember) -> str:
    """Why a primary does not switch to its backup now; empty if it does."""
    peer, membership = member.peer, member.leading.membership
    if member.record_lost:
        return RECORD_LOST
    if peer is None or peer.durable is None or peer.store not in membership.record.in_sync or membership.pending:
        return "the backup is not in sync: wait until it is, then switch"
    if not (topics := damage.only_there(member)):
        return ""
    more = f" and {len(topics) - MOST_NAMES} more" if len(topics) > MOST_NAMES else ""
    return (
        f"the backup has damaged files of topics {', '.join(map(repr, topics[:MOST_NAMES]))}{more}, which are whole "
        "here: wait until they are repaired from this machine, then switch; `problem` of the backup in `txnbuf "
        "replication status` says what prevents the repair"
    )


def finish_switch(member: PairMember) -> None:
    """End the lease once everything is committed and answered; stay live if the backup is lost or damaged meanwhile."""
    log, leading, peer = member.log, member.leading, member.peer
    if peer is None or peer.store not in leading.membership.record.in_sync or damage.only_there(member):
        member.role = Role.LIVE
    elif log.commit == log.index.end.lsn and leading.answered == log.commit:
        member.deferred_until = member.now + member.settings.terms.ttl
        member.step_down("switched to the backup")
