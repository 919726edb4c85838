"""What goes into a coordinator and what comes out of it: plain values.

What may be set of a coordinator.

The life of a transaction: the one table of its states, from which everything else is derived.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.sizes import LARGEST_LIMIT, SMALLEST_LIMIT
from txnbuffer.errors import Error, InvalidConfiguration
from txnbuffer.model import Marker, Outcome, TxnId


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Times in seconds; the first two are True where this process owns the logs that it writes to.

    `one_phase`: a transaction on a single topic is decided by its marker, without a decision record.
    `verify_counts`: the buffers check the number of records of a commit before it is decided.
    `session_timeout`: so long a client may be away before what it has open is aborted.
    `lease_timeout`: so long an id may be kept without being used.
    `member_timeout`: so long nothing may be heard of a member of a consumer group.
    `visible_timeout`: so long who asked for it waits for a decided commit to be seen.
    `remember`: so long an outcome can be asked for.
    `shards`: how many there are, so that topics may be those of others.
    `max_open_session`, `max_open`: ids leased and not ended, of one session and in all.
    """

    one_phase: bool = True
    verify_counts: bool = True
    transaction_timeout: float = 60.0
    max_transaction_timeout: float = 900.0
    session_timeout: float = 30.0
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
    """Rows of decisions in one message with all their topics; a transaction stays in one message."""
    max_message_bytes: int = LARGEST_LIMIT
    """What a message of the decision log or a marker may have: key, value and properties."""

    def __post_init__(self) -> None:
        for name in ("transaction_timeout", "session_timeout", "lease_timeout", "member_timeout", "remember"):
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} is {getattr(self, name)}: give seconds above 0")
        for name in ("max_open_session", "max_open", "max_group"):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(f"{name} is {getattr(self, name)}: give a number above 0")
        if self.max_message_bytes < SMALLEST_LIMIT:
            raise InvalidConfiguration(
                f"max_message_bytes is {self.max_message_bytes}: decisions need {SMALLEST_LIMIT} at least, give that"
            )
        if self.max_transaction_timeout < self.transaction_timeout:
            raise InvalidConfiguration(
                f"max_transaction_timeout ({self.max_transaction_timeout} s) is below transaction_timeout "
                f"({self.transaction_timeout} s): raise the first or lower the second"
            )
        if self.shards > 1 and (self.one_phase or self.verify_counts):
            raise InvalidConfiguration(
                "with several shards a transaction may have records on topics of others, which nobody counts: "
                "verify_counts and one_phase have to be off"
            )
        if self.one_phase and not self.verify_counts:
            raise InvalidConfiguration("one_phase needs verify_counts: a marker that decides can't be taken back")


class State(enum.Enum):
    """Written as its number, but no number: 0 and 1 are outcomes too, and OPEN must not equal ABORT."""

    OPEN = 0
    COMMITTING = 1
    COMMITTED = 2
    ABORTING = 3
    ABORTED = 4

    __hash__ = object.__hash__  # members are looked up for every transaction, and that of Enum is slow

    def __index__(self) -> int:
        return int(self.value)


class StateTransition(NamedTuple):
    """One way from a state to the next."""

    before: State
    event: str
    after: State


TRANSITIONS = (
    StateTransition(State.OPEN, "the commit is accepted", State.COMMITTING),
    StateTransition(State.COMMITTING, "its outcome is durable", State.COMMITTED),
    StateTransition(State.OPEN, "the abort is accepted, or the time is up", State.ABORTING),
    StateTransition(State.ABORTING, "its outcome is durable", State.ABORTED),
)

NEXT = {state: frozenset(step.after for step in TRANSITIONS if step.before is state) for state in State}
"""The states that may follow each state."""

TERMINAL = frozenset(state for state, following in NEXT.items() if not following)
"""The states in which the outcome is durable, and for ever the same."""

OUTCOME_OF_STATE = {State.COMMITTED: Outcome.COMMIT, State.ABORTED: Outcome.ABORT}
"""What the state of an ended transaction says."""

DECIDING_STATE = {Outcome.COMMIT: State.COMMITTING, Outcome.ABORT: State.ABORTING}
"""The state of a transaction that is about to end so."""

ENDED_STATE = {outcome: state for state, outcome in OUTCOME_OF_STATE.items()}

INTENDED_OUTCOME = {State.COMMITTING: Outcome.COMMIT, State.ABORTING: Outcome.ABORT} | OUTCOME_OF_STATE
"""The outcome that a state leads to; OPEN leads to either."""


def state_table() -> str:
    """The table as Markdown, as the documentation shows it."""
    rows = [f"| {before.name} | {event} | {after.name} |" for before, event, after in TRANSITIONS]
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])


# What clients ask


class ConsumerPosition(NamedTuple):
    """The transaction consumed a topic from `start` to `end`, for a group in one of its generations.

    `start` is the `end` of the group's last committed transaction on that topic; whatever it is the first time.
    """

    group: str
    topic: str
    generation: int
    start: Position
    end: Position


class GroupHeartbeat(NamedTuple):
    """`member` takes part in a group, goes on doing so, or leaves it: say it once a second.

    `partitions`: what it would read, of which `topics` (as many) says the topic. `ends`: for each the position behind
    which the group begins if it never was on that topic; empty: wherever the member likes.
    """

    request: int
    group: str
    member: str
    topics: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    ends: tuple[Position, ...] = ()
    leaves: bool = False


class Branch(NamedTuple):
    """One TxnId of a transaction that commits with it: its topics, and how many records it wrote to each."""

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
    """Commit a transaction: its topics, how many records it wrote to each, and what goes with it.

    `winners` are branches that commit with it, `losers` branches that abort; so do the branches that were
    begun for it and are no winners. `wait_visible`: answer when all buffers have applied it.
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
    """A transaction was begun: announced, never answered unless it is refused.

    `timeout` in seconds, None for the default. `parent`: it is a branch of that transaction. `sequence`: it is
    an attempt of a named producer.
    """

    request: int
    txn: TxnId
    timeout: float | None = None
    parent: TxnId | None = None
    sequence: ProducerSequence | None = None


# What is answered


class Leased(NamedTuple):
    """Ids `first` to `first + size - 1` are the session's."""

    first: int
    size: int


class SessionOpened(NamedTuple):
    """The session is open: with this owner, of this epoch; the state of each transaction that it named.

    An error instead where it is not the session's, or its outcome is forgotten.
    """

    epoch: int
    states: tuple[tuple[TxnId, State | Error], ...]


class NameOpened(NamedTuple):
    """The name is the session's; `committed` is the last committed number, 0 if there is none."""

    epoch: int
    committed: int


class Joined(NamedTuple):
    """The group's new generation, and where its transactions go on: `(topic, end)` of each topic consumed."""

    generation: int
    positions: tuple[tuple[str, Position], ...]


class PartitionAssignment(NamedTuple):
    """A member holds the partition since a generation; `end`: how far its group had come there by then."""

    partition: str
    since: int
    end: Position


class MemberAssignments(NamedTuple):
    """What a member holds in the group's generation. `unsettled`: more may come soon, from one that may be gone, or for
    who was given up itself.
    """

    generation: int
    assignments: tuple[PartitionAssignment, ...] = ()
    unsettled: bool = False


class Done(NamedTuple):
    """What was asked has been done, durably."""


Result: TypeAlias = Outcome | State | Leased | SessionOpened | NameOpened | Joined | MemberAssignments | Done | Error
"""An Outcome is durable; a State is one that is not ended, from `query`."""


# What has to be done


class AppendDecisions(NamedTuple):
    """Append to the decision log, in order of tokens; then `decisions_durable(token)` or `decisions_failed`."""

    token: int
    messages: tuple[Message, ...]


class AppendMarker(NamedTuple):
    """Append a marker to a topic; then `marker_durable(token)` or `marker_failed(token)`."""

    token: int
    topic: str
    marker: Marker


class SessionResults(NamedTuple):
    """Send to a session, if it is connected, pairs of request and result."""

    session: str
    answers: tuple[tuple[int, Result], ...]


class CheckCounts(NamedTuple):
    """Once the topic's buffer has applied what the log holds now: tell `counts_checked` what was accepted.

    `least`: the transactions.
    """

    topic: str
    least: tuple[int, ...]


class AwaitApplied(NamedTuple):
    """Where there are several shards: tell `ended` once the owners of these topics have applied the marker."""

    least: int
    topics: tuple[str, ...]


class RegisterTopic(NamedTuple):
    """Make the topic's first snapshot durable and tail it; then `topic_snapshotted` or `registration_failed`."""

    topic: str


class WriteEpochMarker(NamedTuple):
    """Append the marker, apply the topic's log up to it, then tell `epoch_marker_applied` what ended there."""

    topic: str
    marker: Marker


class StopAnswering(NamedTuple):
    """This coordinator has stopped: close every session, and start another one only on evidence."""

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
