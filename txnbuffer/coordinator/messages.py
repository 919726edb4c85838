"""What goes into a coordinator and what comes out of it: plain values."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from broker_io.batch import Message
from broker_io.position import Position
from txnbuffer.coordinator.states import State
from txnbuffer.errors import Error
from txnbuffer.model import Marker, Outcome, TxnId

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


class TakePart(NamedTuple):
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


class Naming(NamedTuple):
    """The transaction is number `number` of a named producer; `opening` is what opening the name answered.

    With `opening` SHARED a transaction is begun as one of many that sessions write for that number: its holder's
    commit names those that win, and all others of numbers up to it abort. Begun again with FINISHED it is whole, and
    outlives its session.
    """

    name: str
    number: int
    opening: int

    @property
    def shared(self) -> bool:
        return self.opening in (SHARED, FINISHED)


SHARED, FINISHED = 0, -1
"""No opening of a name has these numbers."""


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
    naming: Naming | None = None
    winners: tuple[Branch, ...] = ()
    losers: tuple[TxnId, ...] = ()
    positions: tuple[ConsumerPosition, ...] = ()


class Begin(NamedTuple):
    """A transaction was begun: announced, never answered unless it is refused.

    `timeout` in seconds, None for the default. `parent`: it is a branch of that transaction. `naming`: it is
    an attempt of a named producer.
    """

    request: int
    txn: TxnId
    timeout: float | None = None
    parent: TxnId | None = None
    naming: Naming | None = None


# What is answered


class Leased(NamedTuple):
    """Ids `first` to `first + size - 1` are the session's."""

    first: int
    size: int


class Opened(NamedTuple):
    """The session is open: with this owner, of this epoch; the state of each transaction that it named.

    An error instead where it is not the session's, or its outcome is forgotten.
    """

    epoch: int
    states: tuple[tuple[TxnId, State | Error], ...]


class NameOpened(NamedTuple):
    """The name is the session's; `committed` is the last committed number, 0 if there is none."""

    opening: int
    committed: int


class Joined(NamedTuple):
    """The group's new generation, and where its transactions go on: `(topic, end)` of each topic consumed."""

    generation: int
    positions: tuple[tuple[str, Position], ...]


class Share(NamedTuple):
    """A member holds the partition since a generation; `end`: how far its group had come there by then."""

    partition: str
    since: int
    end: Position


class Shares(NamedTuple):
    """What a member holds in the group's generation. `unsettled`: more may come soon, from one that may be gone, or for
    who was given up itself.
    """

    generation: int
    shares: tuple[Share, ...] = ()
    unsettled: bool = False


class Done(NamedTuple):
    """What was asked has been done, durably."""


Result: TypeAlias = Outcome | State | Leased | Opened | NameOpened | Joined | Shares | Done | Error
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


class Answers(NamedTuple):
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


class WriteBorder(NamedTuple):
    """Append the marker, apply the topic's log up to it, then tell `border_applied` what ended there."""

    topic: str
    marker: Marker


class StopAnswering(NamedTuple):
    """This coordinator has stopped: close every session, and start another one only on evidence."""

    reason: str


Effect: TypeAlias = (
    AppendDecisions | AppendMarker | Answers | CheckCounts | AwaitApplied | RegisterTopic | WriteBorder | StopAnswering
)
