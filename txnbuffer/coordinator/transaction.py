"""The transactions of a coordinator: the live ones with their sessions, and the ids and outcomes of the settled ones"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from pyroaring import BitMap64

from txnbuffer.coordinator.messages import NEXT, Commit, Result, State
from txnbuffer.errors import Error
from txnbuffer.model import Outcome, TxnId

Waiter = tuple[str, int, bool]
"""A session and its request that waits for an outcome; True: the request is a commit, so that an ABORT is an error."""


TAG_SIZE = 16
"""Characters of the name of a session that name its principal, with access control."""
TAG_BEGIN = "p"
"""How these begin. Without access control names are hexadecimal digits, or begin with `LOCAL_BEGIN`."""


def principal_tag(session: str) -> str:
    """What names the principal in the name of a session; "" without access control."""
    return session[:TAG_SIZE] if session.startswith(TAG_BEGIN) else ""


LOCAL_BEGIN = "l"
"""How the name of a session begins whose client is in the process of the owner, and so ends with it."""


def is_local(session: str) -> bool:
    """Whether the client of the session of this name is, or was, in the process of the owner."""
    return session.startswith(LOCAL_BEGIN)


@dataclass(slots=True, eq=False)
class Session:
    """The session of a client. `outstanding`: the number of its leased ids that have not ended.

    `recorded`: when its last sign of life was recorded in the log. `participants_until`: when its unfinished
    participants abort, because its connection has ended. `block`: its last lease, while it is connected; `blocks`: all
    its leases in which ids may be left, ascending; `ids`: these ids, and perhaps some that have ended.
    """

    name: str
    disconnected_since: float | None = None
    participants_until: float | None = None
    outstanding: int = 0
    recorded: float = 0.0
    block: Block | None = None
    blocks: list[Block] = field(default_factory=list)
    ids: BitMap64 = field(default_factory=BitMap64)
    executed: dict[int, Result | None] = field(default_factory=dict)
    """Its last requests that fence others, with their answers; None: not answered yet. See `Core.answer_again`."""


@dataclass(slots=True, eq=False)
class Block:
    """The leased ids `first` to `last` of a session; `left` of them have not ended. `ended`: when the last one did."""

    session: Session
    first: int
    last: int
    left: int
    expires: float
    ended: float = 0.0


@dataclass(slots=True, eq=False)
class GroupRecord:
    """A group of decisions in the log: its ids, and the number of its transactions that are not settled.

    `names` and `consumers` are the named producers and consumer groups that its commits change.
    """

    number: int
    decided_at: float
    ids: BitMap64
    unsettled: int
    names: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(eq=False)
class TransactionState:
    """A transaction from its first request until it is settled.

    - `plan`: its commit request, while records are counted; `checks` counts are missing.
    - `parent`: the transaction that this is a branch of; `branches`: the branches of this one.
    - `participant_of`: the name and number of which this is a participant; `finished`: it is complete, and outlives its
      session.
    - `unfinished`: topics whose marker is not durable; `unseen`: topics whose buffer has not applied it, if a client
      waits for that; `hidden`: how many of this transaction and its branches have unseen topics.
    - `one_phase`: its marker is the decision.
    - `refusal`: the answer to its commit request if it aborts.
    """

    txn: TxnId
    session: Session | None
    block: Block | None
    state: State = State.OPEN
    deadline: float = 0.0
    topics: tuple[str, ...] = ()
    records: tuple[int, ...] = ()
    waiters: list[Waiter] | None = None
    one_phase: bool = False
    plan: Commit | None = None
    checks: int = 0
    parent: TransactionState | None = None
    branches: list[TransactionState] | None = None
    name: str | None = None
    participant_of: tuple[str, int] | None = None
    finished: bool = False
    unfinished: set[str] | None = None
    unseen: set[str] | None = None
    hidden: int = 0
    group: GroupRecord | None = None
    reason: str = ""
    refusal: Error | None = None

    def advance(self, state: State) -> None:
        """Change the state, as the state table allows; anything else is a bug."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"transaction {self.txn} can't go from {self.state.name} to {state.name}")
        self.state = state

    def wait(self, session: str, request: int, *, commit: bool) -> None:
        waiter = (session, request, commit)
        if self.waiters is None:
            self.waiters = [waiter]
        elif waiter not in self.waiters:
            self.waiters.append(waiter)


class IdStatus(Enum):
    """Why an id has no live transaction, and can't begin one: `RETIRING` if its ABORT is on its way to the log."""

    ANOTHER_SHARD = auto()
    ENDED = auto()
    RETIRING = auto()
    UNLEASED = auto()


@dataclass(slots=True, eq=False)
class Retirement:
    """Unused ids of a session whose ABORT is on its way to the log."""

    session: Session
    ids: BitMap64


def bitmap_of(ids: Iterable[int]) -> BitMap64:
    return BitMap64(np.fromiter(ids, np.uint64))


def block(first: int, count: int) -> BitMap64:
    """`count` ids from `first` on."""
    ids = BitMap64()
    ids.add_range(first, first + count)
    return ids


def end_of_run(ids: BitMap64, below: int) -> int:
    """The highest id such that the set has all ids from `below` + 1 up to it; `below` if the first is missing."""
    if below + 1 not in ids:
        return below
    last, missing = below + 1, int(ids.max()) + 1
    while missing - last > 1:  # never a bitmap of the missing ids: there may be 2**40 of them
        middle = (last + missing) // 2
        if ids.range_cardinality(below + 1, middle + 1) == middle - below:
            last = middle
        else:
            missing = middle
    return last


def within(ids: BitMap64, above: int, up_to: int) -> BitMap64:
    """The ids that are higher than `above` and at most `up_to`."""
    found = ids.copy()
    found.remove_range(0, above + 1)
    if found:
        found.remove_range(up_to + 1, max(found.max(), up_to) + 1)
    return found


@dataclass(slots=True, eq=False)
class SettledIds:
    """How far transactions are settled.

    `low_water_mark` is durable in the decision log: markers carry it, and ids up to it are refused. `settled` has ids
    above it; `one_phase` has, by outcome, the ones of these that no group of decisions contains. `gaps` has the first
    and last id of the ranges above it, ascending, that no owner leased or will lease.
    """

    low_water_mark: int = 0
    settled: BitMap64 = field(default_factory=BitMap64)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    one_phase: tuple[BitMap64, BitMap64] = field(default_factory=lambda: (BitMap64(), BitMap64()))

    def has_ended(self, least: int) -> bool:
        return least <= self.low_water_mark or least in self.settled

    def reachable(self, live: Collection[int] = ()) -> int:
        """The highest possible low-water mark. `live`: ids that have not ended, some perhaps in a gap."""
        settled, mark = self.settled, self.low_water_mark
        for first, last in self.gaps:
            mark = end_of_run(settled, mark)
            if mark < first - 1 or last + 1 not in settled or any(first <= least <= last for least in live):
                return mark
            mark = last
        return end_of_run(settled, mark)

    def passed(self, mark: int) -> tuple[BitMap64, BitMap64]:
        """The one-phase transactions up to a mark: the aborted ones, the committed ones."""
        aborted, committed = self.one_phase
        return within(aborted, 0, mark), within(committed, 0, mark)

    def raise_to(self, mark: int) -> None:
        """The mark is durable."""
        self.low_water_mark = mark
        self.gaps = [gap for gap in self.gaps if gap[1] > mark]
        for ids in (self.settled, *self.one_phase):
            ids.remove_range(0, mark + 1)


SLOTS = 60
"""Outcomes are kept in this many slots, and forgotten a slot at a time, never before `remember` has passed."""
TIMED_OUT = 2
"""The index in a slot of the aborts that a timeout decided; the outcomes are 0 and 1."""


@dataclass(slots=True, eq=False)
class Outcomes:
    """The outcomes of settled transactions, kept for `remember` seconds; all times are in seconds."""

    _remember: float
    _slots: dict[int, tuple[BitMap64, BitMap64, BitMap64]] = field(default_factory=dict)

    def update(
        self, ids: BitMap64 | Sequence[int], outcome: Outcome, since: float, timed_out: Sequence[int] = ()
    ) -> None:
        """Remember outcomes, whose time counts from `since`. `timed_out`: those of which a timeout was the reason."""
        if ids:
            slot = self._slot(since + self._remember)
            slot[outcome].update(ids)
            slot[TIMED_OUT].update(timed_out)

    def find(self, least: int) -> Outcome | None:
        """The outcome of a transaction; None if it is forgotten, or has not ended."""
        for aborted, committed, _ in self._slots.values():
            if least in committed:
                return Outcome.COMMIT
            if least in aborted:
                return Outcome.ABORT
        return None

    def timed_out(self, least: int) -> bool:
        """Whether a timeout ended the transaction; a new owner does not know that."""
        return any(least in slot[TIMED_OUT] for slot in self._slots.values())

    def forget(self, now: float) -> None:
        """Forget the outcomes whose time has passed."""
        for slot in [slot for slot in self._slots if slot * self._remember <= now * SLOTS]:
            del self._slots[slot]

    def _slot(self, until: float) -> tuple[BitMap64, BitMap64, BitMap64]:
        number = int(until * SLOTS / self._remember) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = (BitMap64(), BitMap64(), BitMap64())
        return slot
