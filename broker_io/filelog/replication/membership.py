"""A primary decides which stores are in sync, and keeps its lease

A member of `in_sync` that does not answer for a while is taken out by a swap, whatever the policy: without the swap
nothing more would be committed. The policy says how many stores an append needs.

A backup that catches up is required from a moment that the primary chooses. Once everything committed is durable on it
the swap is sent, and from then on both are required, whether an answer comes or not. If the backup is lost before the
swap was sent, it is required no longer.
"""

from __future__ import annotations

from broker_io.filelog.log.records import Store
from broker_io.filelog.replication import retention, serving
from broker_io.filelog.replication.lock import LockRecord, Swap
from broker_io.filelog.replication.member import PairMember, Peer, PeerStage, Role
from broker_io.filelog.replication.messages import LockRead, SessionEnded, SwapAnswered, SwapLock, Tick


def on_tick(member: PairMember, _event: Tick) -> None:
    """Stop if the lease has lapsed; else renew it and show the backup that this primary is there.

    A renewal does not show whether the lock still has its record, without which no backup can take over.
    """
    if not member.session.holds_at(member.now, member.settings.terms):
        member.step_down("the lease lapsed")
        return
    if member.keep_session():
        member.read_lock()
    serving.send_commit(member)


def on_session_ended(member: PairMember, event: SessionEnded) -> None:
    if event.session == member.session.number:
        member.step_down("the lease ended")


def on_view(member: PairMember, event: LockRead | SwapAnswered) -> None:
    """The lock as it is: it settles swaps, or says that another epoch has begun."""
    member.see(event.view)
    leading = member.leading
    record, membership = event.view.record, leading.membership
    if record.version < membership.record.version:
        return
    if (record.live, record.epoch) != (member.store, leading.epoch):
        member.step_down(f"epoch {record.epoch} has begun on another store")
        return
    membership.settle(record)


def review(member: PairMember) -> None:
    """After every event of a primary: rejoin, require, swap, ship and commit what can be."""
    if not member.serves:
        return
    leading, peer = member.leading, member.peer
    membership = leading.membership
    if peer is not None:
        if peer.stage is PeerStage.LEAVING and peer.store not in membership.possible and peer.rejoin is not None:
            peer.stage = PeerStage.REJOINING
            member.send(peer.rejoin)
        _require(member, peer)
    waits = membership.pending and member.now < membership.sent + member.settings.answer_timeout
    wanted = _wanted(member, membership.record)
    if not waits and (membership.pending or wanted != membership.record.in_sync):
        _swap(member, wanted)
    serving.advance(member)
    serving.ship(member)
    retention.append_swaps(member)
    if member.role is Role.SWITCHING:
        serving.finish_switch(member)


def _require(member: PairMember, peer: Peer) -> None:
    """Require a backup that has come near, or comes no nearer: appends then wait for it."""
    if peer.stage is not PeerStage.FOLLOWING or peer.durable is None or peer.required:
        return
    index, settings = member.log.index, member.settings
    lag = index.bytes_between(max(peer.durable, index.base.lsn), index.end.lsn)
    if peer.lag is None or lag < peer.lag:
        peer.lag, peer.lag_since = lag, member.now
    peer.required = lag <= settings.window_bytes or member.now >= peer.lag_since + settings.stall
    peer.join_after = index.end.lsn


def _wanted(member: PairMember, record: LockRecord) -> tuple[Store, ...]:
    """The stores that should be in sync."""
    peer, leading = member.peer, member.leading
    if member.now >= leading.heard + member.settings.member_timeout:
        return (member.store,)
    if peer is not None and _may_join(member, peer):
        return tuple(sorted((member.store, peer.store)))
    leaves = peer is not None and peer.stage is PeerStage.LEAVING
    replaced = peer is not None and peer.required and not {member.store, peer.store}.issuperset(record.in_sync)
    return (member.store,) if leaves or replaced else record.in_sync


def _may_join(member: PairMember, peer: Peer) -> bool:
    """Whether a backup can be promoted, once it is in sync: it has what is committed, and its files.

    What puts the files of a compaction in place before the backup is required does not wait for it to have them; it has
    them once it has applied that.
    """
    if not peer.required or peer.durable is None or peer.durable < member.log.commit:
        return False
    return peer.store in member.leading.membership.record.in_sync or peer.applied >= peer.join_after


def _swap(member: PairMember, in_sync: tuple[Store, ...]) -> None:
    """Swap the record for one with these stores, or with the same ones, which settles a swap without an answer."""
    leading, session, log = member.leading, member.session.number, member.log
    if session is None:
        return
    membership = leading.membership
    record = membership.record
    reached = log.mark_at(log.commit)
    wanted = record._replace(version=record.version + 1, in_sync=in_sync, reached=reached, forced=None)
    swap = Swap(wanted, session, None)
    request = member.request()
    membership.send(request, swap, member.now)
    member.do(SwapLock(request, swap))
