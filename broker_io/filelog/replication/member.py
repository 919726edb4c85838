"""A member of a pair: its state, and what all roles share

The rules are functions over this state: `following` and `joining` for a backup, `promotion` for one that becomes live,
`serving` and `membership` for a primary. `states` says which of them handles which event in which role. A member knows
the time from its events only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_io.errors import Error
from broker_io.filelog.log.records import Fork, Mark, Store, StoreLog
from broker_io.filelog.replication.lease import LockSession, Terms, Watch
from broker_io.filelog.replication.lock import LockView, PairMembership, Swap
from broker_io.filelog.replication.messages import (
    Apply,
    BreakLink,
    Effect,
    EndSession,
    Message,
    ReadLock,
    Renew,
    RewriteFinished,
    SendMessage,
    StepDown,
    Stop,
)

MIB = 1024 * 1024
SECOND = 1_000_000_000


class Role(enum.Enum):
    """BACKUP follows or waits for a primary; JOINING drops, cuts or copies; CLAIMING has sent a swap that would make it
    live; OPENING has won its epoch and begins it; LIVE serves; SWITCHING serves until the backup has everything.
    """

    BACKUP = "backup"
    JOINING = "joining"
    CLAIMING = "claiming"
    OPENING = "opening"
    LIVE = "live"
    SWITCHING = "switching"
    STOPPED = "stopped"


class Settings(NamedTuple):
    """What a pair is configured with; times in nanoseconds.

    - `min_in_sync`: how many stores must have an append before it is acknowledged; with 2 a primary alone takes none.
    - `founder`: may become live where the lock has no record.
    - `member_timeout`: a member of `in_sync` that is silent for so long is taken out.
    - `answer_timeout`: an answer of the lock that is missing for so long is taken as lost.
    - `window_bytes`: what may be sent and not durable on a backup that catches up, and not applied by one in sync.
    - `keep_bytes`: what is kept, of the journal and of replaced files, for a backup that is copied to or catches up.
    - `stall`: a backup that catches up and comes no nearer for so long is required at once.
    """

    terms: Terms
    min_in_sync: int = 1
    founder: bool = False
    member_timeout: int = 2 * SECOND
    answer_timeout: int = SECOND
    window_bytes: int = 64 * MIB
    keep_bytes: int = 1024 * MIB
    stall: int = 5 * SECOND


class Step(enum.Enum):
    """What a joining backup waits for: its own read of the lock; the mark that it is partial; a cut; a new store; the
    copy; the removal of the mark.
    """

    CHECK = "check"
    MARK = "mark"
    CUT = "cut"
    REPLACE = "replace"
    COPY = "copy"
    UNMARK = "unmark"


@dataclass
class Followed:
    """The primary that a backup follows on the present link; its log and ours were compared up to `compared`."""

    epoch: int
    store: Store
    compared: int
    commit: int


@dataclass
class Joining:
    """A backup that gets the log of a primary: under which plan, and how far it is."""

    epoch: int
    store: Store
    request: int
    step: Step = Step.CHECK
    cut_after: Mark | None = None
    replace: bool = False
    copy_at: Mark | None = None
    forks: tuple[Fork, ...] = ()
    pair: bytes = b""


@dataclass
class Claim:
    """A swap that would make this member live, and its requests without an answer."""

    swap: Swap
    requests: tuple[int, ...]
    sent: int


class PeerStage(enum.Enum):
    """A primary's view of its backup: it has to leave `in_sync` first; it rejoins; it is copied to; it follows."""

    LEAVING = "leaving"
    REJOINING = "rejoining"
    COPYING = "copying"
    FOLLOWING = "following"


@dataclass
class Peer:
    """The backup of a primary on the present link.

    `sent` is the last record sent, `durable` and `applied` what it said, if anything, since the logs were compared.
    `required`: commits wait for it, because it is about to join, once it has applied record `join_after`. `copied`: it
    got a copy on this link and has not said yet that this is durable. `lag` is its smallest lag in bytes, since
    `lag_since`.
    """

    store: Store
    stage: PeerStage
    sent: int = 0
    durable: int | None = None
    applied: int = 0
    full: bool = False
    required: bool = False
    join_after: int = 0
    copied: bool = False
    rejoin: Message | None = None
    lag: int | None = None
    lag_since: int = 0


@dataclass
class Leading:
    """What a member knows as primary of an epoch. `begins` is the mark before its epoch record, `opened` that record's
    lsn; `heard` when the backup was heard last.
    """

    epoch: int
    membership: PairMembership
    begins: Mark
    forced: bool
    heard: int
    opened: int | None = None
    answered: int = 0


@dataclass(eq=False)
class PairMember:
    """One member of a pair.

    - `known`: the newest record of the lock that it read, with its lease; `reading`: the request of the present read,
      since `read_since`; `informed`: the lock was read since the session began.
    - `record_lost`: the lock has shown a record to this process, and has none any more.
    - `busy`: the store is being marked, cut, copied or replaced; nothing else may begin.
    - `damaged`: the topics with damaged files in this store; `damaged_there`: those of the other one, as it said last.
      `yields_since`: since then it lets the other one become live first.
    - `lacking`: what is to be applied needs a file that can't be had any more.
    - `force_until`: how long the request of a forced promotion is valid. `deferred_until`: after a switch the other one
      may claim first; that is over once it is live.
    - `replaced`: files that wait to be removed; `rewrites`: results of compactions of this store and its backup.
    - `applying`: up to which lsn Apply was asked for; `noted`: the last commit index that was noted.
    """

    settings: Settings
    log: StoreLog
    role: Role = Role.BACKUP
    now: int = 0
    session: LockSession = field(default_factory=LockSession)
    watch: Watch = field(default_factory=Watch)
    known: LockView | None = None
    link: int | None = None
    requests: int = 0
    reading: int | None = None
    read_since: int = 0
    informed: bool = False
    record_lost: bool = False
    busy: bool = False
    full: bool = False
    lacking: bool = False
    damaged: tuple[str, ...] = ()
    damaged_there: tuple[str, ...] = ()
    yields_since: int | None = None
    force_until: int = 0
    deferred_until: int = 0
    followed: Followed | None = None
    joining: Joining | None = None
    claimed: Claim | None = None
    led: Leading | None = None
    peer: Peer | None = None
    noted: int = 0
    replaced: tuple[tuple[str, int], ...] = ()
    rewrites: tuple[tuple[Store, RewriteFinished], ...] = ()
    applying: int = 0
    effects: list[Effect] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self.log.store

    @property
    def serves(self) -> bool:
        """Whether this member is live, also while it waits for its backup to take over."""
        return self.role in (Role.LIVE, Role.SWITCHING)

    @property
    def floor(self) -> int:
        """The lowest epoch that this member obeys: that of its log, of the lock, of its own swap that may happen."""
        known = self.known.record.epoch if self.known else 0
        claimed = self.claimed.swap.record.epoch if self.claimed else 0
        return max(self.log.index.end.epoch, self.log.manifest.epoch, known, claimed)

    @property
    def claim(self) -> Claim:
        """The claim of a member that is CLAIMING. Raises Error if there is none, which is a defect."""
        if self.claimed is None:
            raise Error(f"{self.role.value}: no epoch is claimed")
        return self.claimed

    @property
    def leading(self) -> Leading:
        """The epoch of a member that is OPENING, LIVE or SWITCHING. Raises Error if there is none, a defect."""
        if self.led is None:
            raise Error(f"{self.role.value}: no epoch is led")
        return self.led

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, message: Message) -> None:
        if self.link is not None:
            self.do(SendMessage(self.link, message))

    def request(self) -> int:
        """The number of the next request to the lock; answers are matched by it."""
        self.requests += 1
        return self.requests

    def read_lock(self) -> int:
        self.reading, self.read_since = self.request(), self.now
        self.do(ReadLock(self.reading))
        return self.reading

    def see(self, view: LockView) -> None:
        """Remember the newest record that the lock has shown."""
        self.record_lost = view.record.version == 0 and self.known is not None and self.known.record.version > 0
        if self.known is None or view.record.version >= self.known.record.version:
            self.known = view

    def take_read(self, request: int, view: LockView) -> bool:
        """A read of the lock was answered; whether it is the one that this member waits for."""
        self.see(view)
        if request != self.reading:
            return False
        self.reading, self.informed = None, True
        return True

    def break_link(self) -> None:
        """End the link, and what was known through it."""
        if self.link is not None:
            self.do(BreakLink(self.link))
        self.unlink()

    def unlink(self) -> None:
        """Forget what was known through the link."""
        self.link = self.followed = self.peer = None
        if self.role is Role.JOINING:
            self.role, self.joining = Role.BACKUP, None

    def apply_to(self, lsn: int) -> None:
        """Apply what is committed and durable here up to an lsn."""
        lsn = min(lsn, self.log.commit, self.log.durable)
        if lsn > max(self.log.applied, self.applying):
            self.applying = lsn
            self.do(Apply(lsn))

    def keep_session(self) -> bool:
        """Renew the session three times in its life, or begin one; whether it does that now."""
        session, terms = self.session, self.settings.terms
        if session.renewing_since is not None and self.now < session.renewing_since + self.settings.answer_timeout:
            return False
        due = session.number is None or self.now >= session.sent + terms.ttl // 3
        if due:
            session.renewing_since = self.now
            self.do(Renew(session.number, self.now))
        return due

    def end_session(self) -> None:
        """Give the session up; a lease that it had is never used again, and what was read in it may be over."""
        if self.session.number is not None:
            self.do(EndSession(self.session.number))
        self.session, self.reading, self.informed = LockSession(), None, False

    def step_down(self, reason: str) -> None:
        """Stop being live; serving again takes another epoch."""
        self.role, self.led = Role.BACKUP, None
        self.do(StepDown(reason))
        self.break_link()
        self.end_session()
        self.keep_session()

    def stop(self, reason: str, error: Error | None = None) -> None:
        self.role = Role.STOPPED
        self.do(Stop(reason, error))
