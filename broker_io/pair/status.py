"""What operators see of a pair's node, in plain values"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from broker_io.replication.member import PairMember, PeerStage, Role
from broker_io.replication.serving import required

SAMPLES = 4096
SECOND = 1_000_000_000


class PeerStatus(NamedTuple):
    """The backup of a live on the present link: its stage, and the last records that it has and has applied."""

    store: str
    stage: str
    durable: int
    applied: int


class PairStatus(NamedTuple):
    """A node of a pair; stores are named by hex digits, records by lsn, times are in seconds.

    `in_sync` and `live` are what the lock has shown last, `epoch` the greatest that this node knows of. `lag_*` is how
    much more a live has than its backup has applied, and a backup has than it has applied itself. `window_used` are
    bytes of `window` that are sent and not applied. `lease_left` is 0 for a node that is not live. `problem` is the
    last error of lock, link or store.
    """

    role: str
    epoch: int
    store: str
    partial: bool
    live: str
    in_sync: tuple[str, ...]
    end: int
    durable: int
    commit: int
    applied: int
    peer: PeerStatus | None
    linked: bool
    waits_for_backup: bool
    lag_records: int
    lag_bytes: int
    lag_seconds: float
    window: int
    window_used: int
    lease_left: float
    problem: str


class LagSamples:
    """When the log of a node had which end: how old the first record is that the other one has not applied."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()

    def sample(self, member: PairMember, now: int) -> None:
        """Note the end of the log, a few times in a second."""
        end, samples = member.log.index.end.lsn, self._samples
        if samples and samples[-1][0] > end:
            samples.clear()  # the log was cut, or copied
        if not samples or samples[-1][0] < end:
            samples.append((end, now))
        applied = applied_of_backup(member)
        while samples and samples[0][0] <= applied:
            samples.popleft()
        if len(samples) > SAMPLES:
            self._samples = deque([*samples][::2])

    def seconds(self, now: int) -> float:
        """Seconds since the oldest record came that is not applied on the backup; 0 if all are."""
        return (now - self._samples[0][1]) / SECOND if self._samples else 0.0


def applied_of_backup(member: PairMember) -> int:
    """The last record that the backup is known to have applied; of a live without one everything that is committed."""
    if member.role not in (Role.LIVE, Role.SWITCHING):
        return member.log.applied
    peer = member.peer
    return peer.applied if peer is not None and peer.stage is PeerStage.FOLLOWING else member.log.commit


def status_of(member: PairMember, now: int, lag: LagSamples, problem: str) -> PairStatus:
    log, peer, terms = member.log, member.peer, member.settings.terms
    serving = member.role in (Role.LIVE, Role.SWITCHING)
    record = member.known.record if member.known is not None else None
    end, applied = log.index.end.lsn, applied_of_backup(member)
    lag_bytes = log.index.bytes_between(max(min(applied, end), log.index.base.lsn), end)
    session = member.session
    holds = serving and session.holds_at(now, terms)
    return PairStatus(
        role=member.role.value,
        epoch=member.leading.epoch if serving else member.floor,
        store=log.store.hex(),
        partial=log.partial,
        live=record.live.hex() if record is not None else "",
        in_sync=tuple(store.hex() for store in record.in_sync) if record is not None else (),
        end=end,
        durable=log.durable,
        commit=log.commit,
        applied=log.applied,
        peer=None if peer is None else PeerStatus(peer.store.hex(), peer.stage.value, peer.durable or 0, peer.applied),
        linked=member.link is not None,
        waits_for_backup=serving and len(required(member)) < member.settings.min_in_sync,
        lag_records=max(0, end - applied),
        lag_bytes=lag_bytes,
        lag_seconds=lag.seconds(now),
        window=member.settings.window_bytes,
        window_used=lag_bytes if peer is not None else 0,
        lease_left=(session.sent + terms.held_for - now) / SECOND if holds else 0.0,
        problem=problem,
    )
