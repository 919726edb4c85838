"""The state of live transactions, of sessions and of their blocks of ids"""

from __future__ import annotations

from pyroaring import BitMap64

from txnbuffer.coordinator.messages import NEXT, Commit, State
from txnbuffer.errors import Error
from txnbuffer.model import TxnId

Waiter = tuple[str, int, bool]
"""A session and its request that waits for an outcome; True: the request is a commit, so that an ABORT is an error."""


class Session:
    """The session of a client. `outstanding`: the number of its leased ids that have not ended."""

    __slots__ = ("block", "disconnected_since", "name", "outstanding")

    def __init__(self, name: str, disconnected_since: float | None = None) -> None:
        self.name = name
        self.disconnected_since = disconnected_since
        self.outstanding = 0
        self.block: Block | None = None


class Block:
    """The leased ids `first` to `last` of a session; `left` of them have not ended."""

    __slots__ = ("expires", "first", "last", "left", "session")

    def __init__(self, session: Session, first: int, last: int, expires: float) -> None:
        self.session = session
        self.first = first
        self.last = last
        self.left = last - first + 1
        self.expires = expires


class GroupRecord:
    """A group of decisions in the log: its ids, and the number of its transactions that are not settled."""

    __slots__ = ("consumers", "decided_at", "ids", "names", "number", "unsettled")

    def __init__(self, number: int, decided_at: float, ids: BitMap64, unsettled: int) -> None:
        self.number = number
        self.decided_at = decided_at
        self.ids = ids
        self.unsettled = unsettled
        self.names: tuple[str, ...] = ()
        self.consumers: tuple[str, ...] = ()


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


class Retirement:
    """Unused ids whose ABORT is on its way to the log, and the requests that wait for it."""

    __slots__ = ("block", "ids", "waiters")

    def __init__(self, block: Block | None, ids: BitMap64) -> None:
        self.block = block
        self.ids = ids
        self.waiters: list[tuple[Waiter, TxnId]] = []
