"""What a coordinator keeps of a transaction while it works on it, and of the sessions that lease ids."""

from __future__ import annotations

from pyroaring import BitMap64

from txnbuffer.coordinator.messages import NEXT, Commit, State
from txnbuffer.errors import Error
from txnbuffer.model import TxnId

Waiter = tuple[str, int, bool]
"""Session and request that wait for an outcome; True: it asked for a commit, so that an ABORT is an error."""


class Session:
    """A client. `outstanding`: its ids that have not ended; `disconnected_since` is None while it is connected."""

    __slots__ = ("block", "disconnected_since", "name", "outstanding")

    def __init__(self, name: str, disconnected_since: float | None = None) -> None:
        self.name = name
        self.disconnected_since = disconnected_since
        self.outstanding = 0
        self.block: Block | None = None


class Block:
    """Ids `first` to `last` as leased to a session; `left` of them have not ended."""

    __slots__ = ("expires", "first", "last", "left", "session")

    def __init__(self, session: Session, first: int, last: int, expires: float) -> None:
        self.session = session
        self.first = first
        self.last = last
        self.left = last - first + 1
        self.expires = expires


class GroupRecord:
    """A group of decisions in the log: its ids, and how many of its transactions are not settled yet."""

    __slots__ = ("consumers", "decided_at", "ids", "names", "number", "unsettled")

    def __init__(self, number: int, decided_at: float, ids: BitMap64, unsettled: int) -> None:
        self.number = number
        self.decided_at = decided_at
        self.ids = ids
        self.unsettled = unsettled
        self.names: tuple[str, ...] = ()
        self.consumers: tuple[str, ...] = ()


class TransactionState:
    """One TxnId that was begun, or that has ended and is not settled.

    - `plan`: the commit that was asked for, kept while its counts are checked; `checks` of them are missing.
    - `parent`: the transaction that this is a branch of; `branches`: those begun for this one.
    - `shared`: it was begun as one of many for this number of a name; `finished`: and is whole, whoever goes.
    - `unfinished`: topics whose marker is not durable; `unseen`: topics whose buffer has not applied it,
      where somebody waits for that; `hidden`: how many of this and its branches have unseen topics.
    - `one_phase`: its marker is the decision.
    - `refusal`: what a commit of it is answered when it aborts.
    """

    __slots__ = (
        "block",
        "branches",
        "checks",
        "deadline",
        "finished",
        "group",
        "hidden",
        "name",
        "one_phase",
        "parent",
        "participant_of",
        "plan",
        "reason",
        "records",
        "refusal",
        "session",
        "state",
        "topics",
        "txn",
        "unfinished",
        "unseen",
        "waiters",
    )

    def __init__(self, txn: TxnId, session: Session | None, block: Block | None) -> None:
        self.txn = txn
        self.session = session
        self.block = block
        self.state = State.OPEN
        self.deadline = 0.0
        self.topics: tuple[str, ...] = ()
        self.records: tuple[int, ...] = ()
        self.waiters: list[Waiter] | None = None
        self.one_phase = False
        self.plan: Commit | None = None
        self.checks = 0
        self.parent: TransactionState | None = None
        self.branches: list[TransactionState] | None = None
        self.name: str | None = None
        self.participant_of: tuple[str, int] | None = None
        self.finished = False
        self.unfinished: set[str] | None = None
        self.unseen: set[str] | None = None
        self.hidden = 0
        self.group: GroupRecord | None = None
        self.reason = ""
        self.refusal: Error | None = None

    def advance(self, state: State) -> None:
        """Take a step of the table; any other is a bug."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"transaction {self.txn} can't go from {self.state.name} to {state.name}")
        self.state = state

    def wait(self, session: str, request: int, *, commit: bool) -> None:
        waiter = (session, request, commit)
        if self.waiters is None:
            self.waiters = [waiter]
        elif waiter not in self.waiters:
            self.waiters.append(waiter)


class Retirement:
    """Unused ids that an entry under way says ABORT of, and who waits for that."""

    __slots__ = ("block", "ids", "waiters")

    def __init__(self, block: Block | None, ids: BitMap64) -> None:
        self.block = block
        self.ids = ids
        self.waiters: list[tuple[Waiter, TxnId]] = []
