"""The table of states: what each role does with each event and message

`step` is the one entrance: a time, an event, and the effects that follow from it, in order. An event that a role has no
entry for changes nothing. A message that it has no entry for breaks the link, and messages of another link are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker_io.errors import NotLive
from broker_io.filelog.replication import damage, following, joining, membership, promotion, retention, serving
from broker_io.filelog.replication.member import PairMember, Role
from broker_io.filelog.replication.messages import (
    AppendRequested,
    Applied,
    Checkpointed,
    Copied,
    CopyBegin,
    CopyRequest,
    DamagedTopics,
    DamageNoted,
    DiskSpace,
    Durable,
    Effect,
    EpochContent,
    Event,
    FilesMissing,
    Follow,
    ForceRequested,
    Hello,
    LinkDown,
    LinkUp,
    LockRead,
    PartialSynced,
    Received,
    Records,
    Rejoin,
    Renewed,
    Replaced,
    ReplacedFiles,
    RewriteDone,
    RewriteFinished,
    SessionEnded,
    Start,
    SwapAnswered,
    SwitchRequested,
    Synced,
    SyncFailed,
    Tick,
    WasCut,
)

Table = dict[type, Callable[[PairMember, Any], None]]


def _on_renewed(member: PairMember, event: Renewed) -> None:
    if member.session.renewed(event.session, event.sent):
        member.read_lock()


def _on_session_ended(member: PairMember, event: SessionEnded) -> None:
    if event.session == member.session.number:
        member.end_session()
        member.keep_session()


def _on_sync_failed(member: PairMember, event: SyncFailed) -> None:
    """What is durable is unknown until the log is opened again."""
    member.stop(event.reason)


def _see(member: PairMember, event: SwapAnswered | LockRead) -> None:
    """An answer to a request of a former role."""
    member.see(event.view)


def _refuse(_member: PairMember, _event: AppendRequested | SwitchRequested) -> None:
    """Raises NotLive."""
    raise NotLive("this member of the pair is not live: connect to the other one")


def _on_disk_space(member: PairMember, event: DiskSpace) -> None:
    member.full = event.full


def _ignore(member: PairMember, event: object) -> None:
    """A message that comes too early or too late."""


_ALL: Table = {
    LinkDown: following.on_link_down,
    LinkUp: following.on_link_up,
    Renewed: _on_renewed,
    SessionEnded: _on_session_ended,
    SwapAnswered: _see,
    LockRead: _see,
    SyncFailed: _on_sync_failed,
    DiskSpace: _on_disk_space,
    DamageNoted: damage.on_noted,
    DamagedTopics: damage.on_reported,
    Synced: following.on_synced,
    Applied: following.on_applied,
    PartialSynced: joining.on_partial_synced,
    WasCut: joining.on_cut,
    Replaced: joining.on_replaced,
    Checkpointed: retention.on_checkpointed,
    ReplacedFiles: retention.on_replaced_files,
    RewriteFinished: retention.on_rewrite_finished,
    Hello: _ignore,
    AppendRequested: _refuse,
    SwitchRequested: _refuse,
}
_LIVE: Table = {
    **_ALL,
    LinkUp: serving.on_link_up,
    Tick: membership.on_tick,
    SessionEnded: membership.on_session_ended,
    LockRead: membership.on_view,
    SwapAnswered: membership.on_view,
    AppendRequested: serving.on_append,
    Synced: serving.on_synced,
    Applied: serving.on_applied,
    Hello: serving.on_hello,
    CopyRequest: serving.on_copy_request,
    Durable: serving.on_durable,
    RewriteDone: retention.on_rewrite_done,
    SwitchRequested: serving.on_switch,
}
TABLE: dict[Role, Table] = {
    Role.BACKUP: {
        **_ALL,
        Start: promotion.on_start,
        Tick: following.on_tick,
        LockRead: promotion.on_lock_read,
        ForceRequested: promotion.on_force,
        FilesMissing: joining.on_files_missing,
        DiskSpace: following.on_disk_space,
        Follow: following.on_follow,
        Records: following.on_records,
        Rejoin: joining.on_rejoin,
    },
    Role.JOINING: {
        **_ALL,
        Tick: joining.on_tick,
        LockRead: joining.on_lock_read,
        ForceRequested: promotion.on_force,
        CopyBegin: joining.on_copy_begin,
        Copied: joining.on_copied,
    },
    Role.CLAIMING: {
        **_ALL,
        Tick: promotion.on_claim_tick,
        LockRead: promotion.on_claim_read,
        SwapAnswered: promotion.on_claim_answered,
        SessionEnded: promotion.on_claim_session_ended,
    },
    Role.OPENING: {
        **_ALL,
        Tick: promotion.on_opening_tick,
        LockRead: promotion.on_opening_view,
        SwapAnswered: promotion.on_opening_view,
        SessionEnded: membership.on_session_ended,
        WasCut: promotion.on_opening_cut,
        EpochContent: promotion.on_epoch_content,
        Synced: promotion.on_opening_synced,
        Applied: promotion.on_opening_applied,
    },
    Role.LIVE: _LIVE,
    Role.SWITCHING: _LIVE,
    Role.STOPPED: {},
}


def step(member: PairMember, event: Event, now: int) -> list[Effect]:
    """Give a member an event at a time of its clock, in nanoseconds; the effects, in order.

    Raises NotLive, DiskWatermark, NotInSync and NotPromotable for requests that can't be served; nothing has changed.
    """
    member.now = max(member.now, now)
    table = TABLE[member.role]
    if isinstance(event, Received):
        if event.link == member.link:
            handler = table.get(type(event.message))
            member.break_link() if handler is None else handler(member, event.message)
    elif handler := table.get(type(event)):
        handler(member, event)
    membership.review(member)
    retention.review(member)
    effects, member.effects = member.effects, []
    return effects
