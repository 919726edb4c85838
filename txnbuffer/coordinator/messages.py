"""The coordinator's settings, the table of transaction states, and the messages in and out, as plain values

Clients send requests, the coordinator answers them with results, and it returns effects: what the engine has to do.
All rules about states are derived from the one table `TRANSITIONS`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.errors import Error, InvalidConfiguration
from txnbuffer.model import Marker, Outcome, TxnId

LARGEST_LIMIT = 5 * 1024 * 1024
SMALLEST_LIMIT = 4096
"""Any entry of a fixed number of fields fits into this many bytes, since names and keys are short."""
MOST_OPEN_SESSION = 200_000
"""Fewer than the rows that a frame may have."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Settings of a coordinator; times are in seconds.

    `one_phase`: the marker decides a transaction on a single topic, without a decision record.
    `verify_counts`: the buffers check the number of records of a commit before it is decided.
    Both are on only if this process owns the logs that it writes to.
    `atomic`: what is queued between two calls of `take_effects` is appended in one operation, so that the markers of a
    decision need not wait until it is durable.
    `session_timeout`: abort a client's open transactions after it was disconnected for this long.
    `reconnect_seconds`: but not earlier than this after the start of an owner, so that clients find a service that was
    away; 0.0 if no client can connect to this owner.
    `lease_timeout`: abort a leased id that was not used for this long.
    `member_timeout`: remove a member of a consumer group after this long without a heartbeat.
    `visible_timeout`: the longest wait for a decided commit to become visible, for clients that asked to wait.
    `remember`: how long the outcome of a transaction can be queried.
    `shards`: the number of coordinators; with more than one, topics may belong to others.
    `max_open_session`, `max_open`: leased ids that have not ended, of one session and in total.
    """

    one_phase: bool = True
    verify_counts: bool = True
    atomic: bool = False
    transaction_timeout: float = 60.0
    max_transaction_timeout: float = 900.0
    session_timeout: float = 30.0
    reconnect_seconds: float = 10.0
    lease_timeout: float = 900.0
    member_timeout: float = 8.0
    visible_timeout: float = 120.0
    remember: float = 3600.0
    low_water_mark_interval: float = 1.0
    ended_interval: float = 60.0
    max_open_session: int = 100_000
    max_open: int = 1_000_000
    shards: int = 1
    max_group: int = 10_000
    """Decisions and their topics in one message of the decision log; one transaction is never split."""
    max_message_bytes: int = LARGEST_LIMIT
    """The largest message of the decision log, and the largest marker: key, value and properties."""

    def __post_init__(self) -> None:
        for name in ("transaction_timeout", "session_timeout", "lease_timeout", "member_timeout", "remember"):
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        for name in ("max_open_session", "max_open", "max_group"):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_open_session > MOST_OPEN_SESSION:
            raise InvalidConfiguration(
                f"max_open_session must be at most {MOST_OPEN_SESSION}, got {self.max_open_session}: a client that "
                "connects again names all of them in one message"
            )
        if self.max_message_bytes < SMALLEST_LIMIT:
            raise InvalidConfiguration(
                f"max_message_bytes must be at least {SMALLEST_LIMIT}, got {self.max_message_bytes}"
            )
        if self.max_transaction_timeout < self.transaction_timeout:
            raise InvalidConfiguration(
                f"max_transaction_timeout ({self.max_transaction_timeout} s) is below transaction_timeout "
                f"({self.transaction_timeout} s): raise the first or lower the second"
            )
        if self.shards > 1 and (self.one_phase or self.verify_counts):
            raise InvalidConfiguration(
                f"verify_counts and one_phase must be off with {self.shards} shards: a transaction may have records "
                "on topics of other shards, which are not counted"
            )
        if self.one_phase and not self.verify_counts:
            raise InvalidConfiguration("one_phase requires verify_counts: turn both on, or one_phase off")


class State(enum.Enum):
    """The state of a transaction. It is stored as its number.

    It is not an IntEnum: outcomes are 0 and 1 too, and OPEN must not equal ABORT.
    """

    OPEN = 0
    COMMITTING = 1
    COMMITTED = 2
    ABORTING = 3
    ABORTED = 4

    __hash__ = object.__hash__  # states are looked up for every transaction, and the hash of Enum is slow

    def __index__(self) -> int:
        return int(self.value)


class StateTransition(NamedTuple):
    """One row of the state table: in state `before`, `event` leads to state `after`."""

    before: State
    event: str
    after: State


TRANSITIONS = (
    StateTransition(State.OPEN, "the commit is accepted", State.COMMITTING),
    StateTransition(State.COMMITTING, "its outcome is durable", State.COMMITTED),
    StateTransition(State.OPEN, "the abort is accepted, or its timeout expires", State.ABORTING),
    StateTransition(State.ABORTING, "its outcome is durable", State.ABORTED),
)

NEXT = {state: frozenset(step.after for step in TRANSITIONS if step.before is state) for state in State}
"""The states that may follow each state."""

TERMINAL = frozenset(state for state, following in NEXT.items() if not following)
"""The states in which the outcome is durable, and never changes again."""

OUTCOME_OF_STATE = {State.COMMITTED: Outcome.COMMIT, State.ABORTED: Outcome.ABORT}
"""The outcome of a transaction in a terminal state."""

DECIDING_STATE = {Outcome.COMMIT: State.COMMITTING, Outcome.ABORT: State.ABORTING}
"""The state of a transaction whose outcome is chosen but not durable yet."""

ENDED_STATE = {outcome: state for state, outcome in OUTCOME_OF_STATE.items()}
"""The terminal state of each outcome."""

INTENDED_OUTCOME = {State.COMMITTING: Outcome.COMMIT, State.ABORTING: Outcome.ABORT} | OUTCOME_OF_STATE
"""The outcome that a state leads to; OPEN has no entry, since it may lead to both."""


# Requests of clients


class ConsumerPosition(NamedTuple):
    """Moves a consumer group on one topic, as part of a commit: the transaction consumed it from `start` to `end`.

    `generation` is the generation in which the member got the partition. `start` must equal the `end` of the group's
    last committed transaction on that topic; the group's first transaction there may start anywhere.
    """

    group: str
    topic: str
    generation: int
    start: Position
    end: Position


class GroupHeartbeat(NamedTuple):
    """`member` joins a consumer group, stays in it, or leaves it. A member sends this once a second.

    `partitions` are the ones that it can read, and `topics` has the topic of each. `ends` has for each partition the
    group's initial position if the group has not consumed that topic before; empty: the member chooses.
    """

    request: int
    group: str
    member: str
    topics: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    ends: tuple[Position, ...] = ()
    leaves: bool = False


class Branch(NamedTuple):
    """A transaction id that commits together with another one: its topics, and the number of records in each."""

    txn: TxnId
    topics: tuple[str, ...]
    records: tuple[int, ...]


class ProducerSequence(NamedTuple):
    """The transaction is number `number` of a named producer; `epoch` is what opening the name returned.

    With the epoch PARTICIPANT it is one of many transactions that several sessions write for that number. The commit
    of the name's holder names the ones that win; all others for numbers up to it abort. A participant that is begun
    again with FINISHED_PARTICIPANT is complete, and outlives its session.
    """

    name: str
    number: int
    epoch: int

    @property
    def is_participant(self) -> bool:
        return self.epoch in (PARTICIPANT, FINISHED_PARTICIPANT)


PARTICIPANT, FINISHED_PARTICIPANT = 0, -1
"""Values of `ProducerSequence.epoch` that no opening of a name returns."""


class Commit(NamedTuple):
    """Commit a transaction: its topics, the number of records in each, and what commits together with it.

    `winners` are the branches that commit with it. `losers` are branches that abort, like all other branches that were
    begun for it. `wait_visible`: answer only when all buffers have applied the commit. `sequence`: the commit counts
    as this number of a named producer. `positions`: it moves these consumer groups.
    """

    request: int
    txn: TxnId
    topics: tuple[str, ...]
    records: tuple[int, ...]
    wait_visible: bool = False
    sequence: ProducerSequence | None = None
    winners: tuple[Branch, ...] = ()
    losers: tuple[TxnId, ...] = ()
    positions: tuple[ConsumerPosition, ...] = ()


class Begin(NamedTuple):
    """Announce a transaction that the client has begun; it is answered only if it is refused.

    `timeout` is in seconds, None for the default. `parent`: it is a branch of that transaction. `sequence`: it is an
    attempt at a number of a named producer.
    """

    request: int
    txn: TxnId
    timeout: float | None = None
    parent: TxnId | None = None
    sequence: ProducerSequence | None = None


# Results of requests


class Leased(NamedTuple):
    """The session may use the transaction ids from `first` to `first + size - 1`."""

    first: int
    size: int


class SessionOpened(NamedTuple):
    """The session is open with the owner of this epoch. `states` has the state of each transaction that it named.

    It has an error for a transaction of another session, and for one whose outcome is forgotten.
    """

    epoch: int
    states: tuple[tuple[TxnId, State | Error], ...]


class NameOpened(NamedTuple):
    """The session holds the producer name. `epoch` is the producer epoch, `committed` the last committed number."""

    epoch: int
    committed: int


class Joined(NamedTuple):
    """The consumer group's new generation, and its position `(topic, end)` on each topic that it has consumed."""

    generation: int
    positions: tuple[tuple[str, Position], ...]


class PartitionAssignment(NamedTuple):
    """A member holds the partition since a generation; `end` is the group's position there at that time."""

    partition: str
    since: int
    end: Position


class MemberAssignments(NamedTuple):
    """The partitions of a member in the group's generation.

    `unsettled`: the assignment may change soon, because another member may be gone, or this one was removed and has to
    join again.
    """

    generation: int
    assignments: tuple[PartitionAssignment, ...] = ()
    unsettled: bool = False


class Done(NamedTuple):
    """The request is complete and durable, and has nothing else to return."""


Result: TypeAlias = Outcome | State | Leased | SessionOpened | NameOpened | Joined | MemberAssignments | Done | Error
"""The answer to a request. An Outcome is durable; a State is the answer to a query about a transaction without one."""


# Effects: what the engine has to do


class AppendDecisions(NamedTuple):
    """Append messages to the decision log, in the order of the tokens.

    Then call `decisions_durable(token)` or `decisions_failed`.
    """

    token: int
    messages: tuple[Message, ...]


class AppendMarker(NamedTuple):
    """Append a marker to a topic. Then call `marker_durable(token)` or `marker_failed(token)`."""

    token: int
    topic: str
    marker: Marker


class SessionResults(NamedTuple):
    """Send results to a session, if it is connected: pairs of a request's number and its result."""

    session: str
    answers: tuple[tuple[int, Result], ...]


class CheckCounts(NamedTuple):
    """Count the records of these transactions (`least`) in a topic.

    When the topic's buffer has applied all that its log has now, call `counts_checked` with the numbers of records.
    """

    topic: str
    least: tuple[int, ...]


class AwaitApplied(NamedTuple):
    """Wait until the owners of these topics, which are other shards, have applied the transaction's marker.

    Then call `markers_applied`. Only a coordinator with several shards asks for this.
    """

    least: int
    topics: tuple[str, ...]


class RegisterTopic(NamedTuple):
    """Write the topic's first snapshot and follow the topic. Then call `topic_snapshotted` or `registration_failed`.

    `session` is the first one that asked; empty for another shard.
    """

    topic: str
    session: str = ""


class WriteEpochMarker(NamedTuple):
    """Append a new owner's epoch marker to a topic, and apply the topic's log up to it.

    Then call `epoch_marker_applied` with the transactions that had ended there.
    """

    topic: str
    marker: Marker


class StopAnswering(NamedTuple):
    """The coordinator has stopped. Close all sessions; start another coordinator only after reading the log again."""

    reason: str


Effect: TypeAlias = (
    AppendDecisions
    | AppendMarker
    | SessionResults
    | CheckCounts
    | AwaitApplied
    | RegisterTopic
    | WriteEpochMarker
    | StopAnswering
)
"""What `Coordinator.take_effects` returns."""
