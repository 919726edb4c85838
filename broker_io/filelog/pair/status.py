"""What operators see of a pair's node, in plain values"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from broker_io.filelog.log.records import LogRecord
from broker_io.filelog.replication.lock import RECORD_LOST, ineligible
from broker_io.filelog.replication.member import PairMember, PeerStage, Role
from broker_io.filelog.replication.serving import lacks_backup, switch_refusal

MOST_LATE_RECORDS = 4096
SECOND = 1_000_000_000
DECIMALS = 2
"""Of seconds in a status: nobody acts on less than 10 ms."""


class LateRecord(NamedTuple):
    """Operations that are not applied on the backup, up to an lsn, and when the oldest of them came."""

    lsn: int
    operations: int
    since: int


class BackupLag:
    """How far a backup is behind: what came to this node's log and is not applied there.

    At a primary "there" is its backup as far as that has said, at a backup it is this node. `count` gives the number of
    operations in the content of a record.
    """

    def __init__(self, count: Callable[[bytes], int]) -> None:
        self._count = count
        self._late: deque[LateRecord] = deque()
        self._operations = 0

    @property
    def operations(self) -> int:
        return self._operations

    def add(self, records: Sequence[LogRecord], now: int) -> None:
        """Count records that follow."""
        if self._late and self._late[-1].lsn >= records[0].lsn:
            self.clear()  # the log was cut, or copied
        for record in records:
            count = self._count(record.content)
            self._late.append(LateRecord(record.lsn, count, now))
            self._operations += count
        if len(self._late) > MOST_LATE_RECORDS:
            self._merge()

    def _merge(self) -> None:
        """Count two neighbours as one, which keeps sums and the age of the oldest."""
        late = [*self._late]
        pairs = zip(late[::2], late[1::2], strict=False)
        merged = [LateRecord(new.lsn, old.operations + new.operations, old.since) for old, new in pairs]
        self._late = deque(merged + (late[-1:] if len(late) % 2 else []))

    def clear(self) -> None:
        self._late.clear()
        self._operations = 0

    def applied(self, member: PairMember) -> None:
        """Forget what is applied by now."""
        lsn = _applied_there(member)
        while self._late and self._late[0].lsn <= lsn:
            self._operations -= self._late.popleft().operations

    def seconds(self, now: int) -> float:
        """The age of the oldest record that is not applied there; 0 if all are."""
        return (now - self._late[0].since) / SECOND if self._late else 0.0


def _applied_there(member: PairMember) -> int:
    """The last record that the backup is known to have applied; what is committed if it said that to no primary."""
    if not member.serves:
        return member.log.applied
    peer = member.peer
    if peer is None or peer.stage is not PeerStage.FOLLOWING or peer.durable is None:
        return member.log.commit
    return peer.applied


def not_promotable(member: PairMember) -> str:
    """Why a backup without a primary that it follows does not become live; empty if it may, or that is not known."""
    if member.record_lost:
        return RECORD_LOST
    if member.role is not Role.BACKUP or member.followed is not None or member.known is None:
        return ""
    return ineligible(member.known.record, member.log, founder=member.settings.founder)


def waits_for(member: PairMember) -> str:
    """Who is live instead of a member, or what it waits for if nobody is; empty for one that serves."""
    role, known = member.role, member.known
    if member.serves:
        return ""
    if role is Role.STOPPED:
        return "this member has stopped"
    if role is Role.CLAIMING:
        return "nobody is live: this member has asked the lock to become live"
    if role is Role.OPENING:
        return "this member becomes live, and completes what it has received"
    if role is Role.JOINING or member.followed is not None:
        return "the other member is live"
    if known is None:
        return "it is not known who is live: the lock has not answered yet"
    if member.record_lost:
        return f"nobody can become live: {RECORD_LOST}"
    if known.lease is not None and known.lease.store != member.store:
        return "the other member has the lease of the primary, which has to end, and there is no link to it"
    why = not_promotable(member)
    return f"nobody is live: this member can't become live, because {why}" if why else "nobody is live yet"


def status_of(member: PairMember, lag: BackupLag, now: int) -> dict[str, Any]:
    """Facts about a pair as one node sees it, ready for JSON.

    Stores are hexadecimal digits, records are lsns, times are in seconds. `live` and `in_sync` are what the lock has
    shown last, `epoch` is the greatest that this node knows of. `lag_*` is what the backup has not applied yet, as a
    primary knows, or of itself if this is a backup; `window_used` are bytes of `window` that are sent and not
    applied. `lease_left` is 0 for a node that is not live. `waits_for` is empty for a node that serves,
    `cannot_switch` unless it would refuse a planned switch now.
    """
    log, peer, settings = member.log, member.peer, member.settings
    serving = member.serves
    record = member.known.record if member.known is not None else None
    end, base = log.index.end.lsn, log.index.base.lsn
    applied = _applied_there(member)
    lag_bytes = log.index.bytes_between(max(min(applied, end), base), end)
    session = member.session
    lease = session.sent + settings.terms.valid_for - now if serving and session.number is not None else 0
    return {
        "role": member.role.value,
        "epoch": member.leading.epoch if serving else member.floor,
        "store": log.store.hex(),
        "partial": log.partial,
        "live": record.live.hex() if record is not None else "",
        "in_sync": [store.hex() for store in record.in_sync] if record is not None and not member.record_lost else [],
        "end": end,
        "durable": log.durable,
        "commit": log.commit,
        "applied": log.applied,
        "peer": None
        if peer is None
        else {
            "store": peer.store.hex(),
            "stage": peer.stage.value,
            "durable": peer.durable or 0,
            "applied": peer.applied,
        },
        "linked": member.link is not None,
        "waits_for": waits_for(member),
        "waits_for_backup": lacks_backup(member),
        "cannot_switch": switch_refusal(member) if serving else "",
        "lag_records": max(end - applied, 0),
        "lag_operations": lag.operations,
        "lag_bytes": lag_bytes,
        "lag_seconds": round(lag.seconds(now), DECIMALS),
        "window": settings.window_bytes,
        "window_used": lag_bytes if peer is not None else 0,
        "lease_left": round(max(lease, 0) / SECOND, DECIMALS),
    }
