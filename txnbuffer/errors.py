"""Errors of the log protocol and the transaction buffer; the tree's root is `broker_io.errors`.

What a change stream can meet; the tree's root is `broker_io.errors`.

What a sink can meet; the tree's root is `broker_io.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from broker_io.errors import (
    CallerError,
    EnvironmentFault,
    Error,
    Fault,
    Fenced,
    PeerError,
    ServiceUnavailable,
    StorageError,
    TopicNotFound,
)
from broker_io.position import Position
from txnbuffer.model import TxnId

__all__ = [
    "AlreadyCommitted",
    "CallerError",
    "ClientBroken",
    "CoordinatorStopped",
    "DecisionsLost",
    "EnvironmentFault",
    "Error",
    "Fault",
    "Fenced",
    "ForeignTopic",
    "ForeignTransaction",
    "HandlerTooSlow",
    "InvalidConfiguration",
    "InvalidHandler",
    "InvalidRequest",
    "LogDeleted",
    "LogReplaced",
    "LogRestored",
    "LogTruncated",
    "MalformedFrame",
    "MutationsTrimmed",
    "NotVisible",
    "OutOfOrder",
    "OutcomeForgotten",
    "OutcomeUnknown",
    "PeerError",
    "PositionConflict",
    "ProducerFenced",
    "ProtocolStopped",
    "RegistrationFailed",
    "RegistrationRefused",
    "RelayBranched",
    "RelayTargetTaken",
    "ReplayStalled",
    "SegmentMismatch",
    "SendUnknown",
    "SeqnoGap",
    "ServiceUnavailable",
    "StaleGeneration",
    "StorageError",
    "TooManyTransactions",
    "TopicNotCreated",
    "TransactionAborted",
    "UndecodableMarker",
    "UndecodableRecordSet",
    "UnknownSession",
    "UnknownTransaction",
    "UnreadableDecision",
    "UnregisteredTopic",
    "UnsupportedProtocol",
    "UsedAfterFork",
]


class ProtocolStopped(StorageError):
    """A topic stopped at a message: whatever stands before `position` is applied, nothing from there on.

    `effects` is what the messages before it in the same batch had as effects, so that none is lost.
    `topic` is None until whoever knows it calls `of_topic`.
    """

    effects: Sequence[object] = ()

    def __init__(self, position: Position, what: str, topic: str | None = None) -> None:
        super().__init__(f"{'the topic' if topic is None else f'topic {topic}'} stopped at {position}: {what}")
        self.position = position
        self.what = what
        self.topic = topic

    def of_topic(self, topic: str) -> Self:
        """The same error with the topic's name in its message."""
        named = type(self).__new__(type(self))
        ProtocolStopped.__init__(named, self.position, self.what, topic)
        named.effects = self.effects
        return named


class UndecodableMarker(ProtocolStopped):
    """A marker that can't be read: which transactions ended here is unknown, so nothing after it can be shown."""

    def __init__(self, position: Position, reason: str, topic: str | None = None) -> None:
        super().__init__(position, f"its marker can't be decoded ({reason}); inspect the message there", topic)


class UnsupportedProtocol(ProtocolStopped):
    """A message of a protocol version that this release does not read."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, position: Position, version: str, topic: str | None = None) -> None:
        super().__init__(
            position, f"the message is of protocol version {version}; read the topic with a newer release", topic
        )


class OutOfOrder(ProtocolStopped):
    """A message at or below the position up to which the log was applied already."""

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, position: Position, applied: Position, topic: str | None = None) -> None:
        super().__init__(position, f"the log is applied up to {applied}; read on behind that position", topic)


class ReplayStalled(PeerError):
    """A topic holds messages that do not come; another reader may get them."""

    retryable = True


class LogTruncated(StorageError):
    """A log that ends below a place up to which it was read, or was to be."""


class LogReplaced(StorageError):
    """A log that holds other messages than those that were read of it."""


class LogRestored(CallerError):
    """The service's log is an older copy that was put back: it never had what this client has seen of it."""


class SegmentMismatch(StorageError):
    """Parts that are not the ones which the state of a buffer names."""


class UndecodableRecordSet(StorageError):
    """A record set whose payload is not the block of records that its properties announce."""


class InvalidRequest(CallerError):
    """An argument that can't be served."""


class InvalidConfiguration(CallerError):
    """A configuration that names an unknown key or gives an impossible value."""


# What a mutation manager meets


class SeqnoGap(StorageError):
    """Mutations whose seqnos don't follow those before them: something would be missing without a word."""


class MutationsTrimmed(CallerError):
    """Mutations are asked for that the log has no longer."""

    grpc_status = "OUT_OF_RANGE"

    def __init__(self, asked: int, first: int) -> None:
        super().__init__(f"mutation {asked} is trimmed, the first one left is {first}; begin anew from 0")
        self.asked = asked
        self.first = first


# What a relay meets


class RelayTargetTaken(CallerError):
    """The target of a relay holds something else than what was relayed from this source; nothing was written to it."""

    grpc_status = "FAILED_PRECONDITION"


class RelayBranched(CallerError):
    """The history of a relay's source branched: what its target holds behind `seqno` is no history of the source.

    What stands in a log can't be taken back, so nothing was written.
    """

    grpc_status = "ABORTED"

    def __init__(self, topic: str, seqno: int, relayed: str) -> None:
        super().__init__(
            f"the history of topic {topic!r} branched behind seqno {seqno}, and {relayed} was relayed: what the target "
            "holds behind that seqno is void; relay to another topic, or append the new history with --resend"
        )
        self.topic = topic
        self.seqno = seqno


# What a coordinator answers


TIME_UP = "its time was up"
"""The reason of an abort that a time-out decided."""


class TransactionAborted(CallerError):
    """The transaction has ended, without effect; whoever wants it done begins another one."""

    grpc_status = "ABORTED"

    def __init__(self, txn: TxnId, reason: str) -> None:
        super().__init__(f"transaction {txn} was aborted: {reason}; begin another one to do it again")
        self.txn = txn
        self.reason = reason

    @property
    def timed_out(self) -> bool:
        """Whether it was open for longer than it may."""
        return self.reason == TIME_UP


class OutcomeUnknown(PeerError):
    """The transaction may have committed or not: ask for the outcome of `txn`."""

    def __init__(self, txn: TxnId, why: str) -> None:
        super().__init__(f"transaction {txn} may have committed or not: {why}; ask for the outcome of {txn}")
        self.txn = txn


class NotVisible(StorageError):
    """The transaction is committed, but not seen: a topic of it has stopped, or does not come so far in time."""

    def __init__(self, txn: TxnId, topic: str, why: str) -> None:
        super().__init__(f"transaction {txn} is committed, but not visible on topic {topic!r}: {why}")
        self.txn = txn
        self.topic = topic


class OutcomeForgotten(CallerError):
    """The transaction ended so long ago that nobody knows how."""

    grpc_status = "NOT_FOUND"

    def __init__(self, txn: TxnId) -> None:
        super().__init__(f"the outcome of transaction {txn} is forgotten: it ended; read the topics to see how")
        self.txn = txn


class AlreadyCommitted(CallerError):
    """A named producer's number was committed before: nothing is left to do."""

    grpc_status = "ALREADY_EXISTS"

    def __init__(self, name: str, number: int, last: int) -> None:
        super().__init__(f"number {number} of {name!r} is committed (the last one is {last}): go on behind it")
        self.name = name
        self.number = number
        self.last = last


class ProducerFenced(Fenced):
    """Another producer opened the name: this one must not go on."""


class StaleGeneration(Fenced):
    """Another member of the group was given what the transaction consumed: this one must not go on there."""


class PositionConflict(CallerError):
    """A consumer's transaction does not start where the last committed one of its group ended."""

    grpc_status = "FAILED_PRECONDITION"


class InvalidHandler(InvalidRequest):
    """A handler that can't be one: a call of it runs nothing, or nothing that its client can wait for."""


class HandlerTooSlow(CallerError):
    """The handler of a group takes longer for one record than its transaction may, or than its member may be silent."""

    grpc_status = "DEADLINE_EXCEEDED"


class TooManyTransactions(CallerError):
    """The session, or all of them, have as many transactions open as they may."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class UnknownTransaction(CallerError):
    """A transaction id that nobody leased."""

    grpc_status = "NOT_FOUND"


class ForeignTransaction(CallerError):
    """A transaction of another session or another coordinator."""

    grpc_status = "PERMISSION_DENIED"


class ForeignTopic(CallerError):
    """A topic, a producer's name or a group belongs to another shard: ask the service of that one."""

    grpc_status = "FAILED_PRECONDITION"


class UnknownSession(PeerError):
    """A session that this coordinator does not know: open it, naming what is open."""

    grpc_status = "FAILED_PRECONDITION"


class UnregisteredTopic(CallerError):
    """A transaction names a topic that was not registered before it was written to."""

    grpc_status = "FAILED_PRECONDITION"


class RegistrationFailed(StorageError):
    """The first snapshot of a topic could not be made durable."""

    retryable = True
    grpc_status = "UNAVAILABLE"


class RegistrationRefused(RegistrationFailed):
    """A topic can't have transactions as it stands: doing the same again does not help, what the message says does."""

    retryable = False
    grpc_status = "FAILED_PRECONDITION"


class TopicNotCreated(TopicNotFound):
    """No topic of that name, and the service was told to make none."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic {topic!r}, and this service makes none: create it first")


class CoordinatorStopped(PeerError):
    """The coordinator lost its ownership, or its log failed; another owner answers."""

    retryable = True


class DecisionsLost(StorageError):
    """The decision log lacks what it once held: ids would be used twice, and what commits under them seen by nobody."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(
            f"{topic} lacks what it once held: {what}. Was it deleted, truncated, or put back from an older copy? Put "
            "back the newest; or `txnbuf recover ADDRESS --decisions --write` begins it anew, which gives up decisions "
            "that stood nowhere else"
        )


class LogDeleted(PeerError):
    """The decision log was deleted, alone or with its namespace, while a service had it or stood by."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the log that this service had or waited for is gone, alone or with its namespace ({why}): start it "
            "again, and see in docs/operating.md what to do before that"
        )


class UnreadableDecision(StorageError):
    """An entry of the decision log that can't be read: going on could contradict it."""


# What a client and a service meet


class MalformedFrame(CallerError):
    """Bytes that are no frame of a session; whoever sent them speaks another protocol, or they are damaged."""


class SendUnknown(PeerError):
    """A send outside of transactions that was under way when the connection broke: it may stand in the log or not."""


class UsedAfterFork(CallerError):
    """A client made before a fork was used in the child: its connection belongs to the parent."""

    grpc_status = "FAILED_PRECONDITION"


class ClientBroken(EnvironmentFault):
    """A defect of the client stopped it; what was under way may or may not have happened."""

    grpc_status = "INTERNAL"


class UnreadableToken(CallerError):
    """A text that is no resume token of this release."""


class ForeignToken(CallerError):
    """A resume token of another topic or another cluster."""

    grpc_status = "FAILED_PRECONDITION"


class SeqnoOutOfRange(CallerError):
    """A stream was asked for with seqnos that contradict each other, or that the topic has not reached."""

    grpc_status = "OUT_OF_RANGE"


class StreamExists(CallerError):
    """A stream was asked for under a number that the connection has used."""

    grpc_status = "ALREADY_EXISTS"


class StreamMemoryExhausted(CallerError):
    """The service has no memory for another stream now."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class StreamTrimmed(CallerError):
    """The mutations that the stream needs next are no longer in the log."""

    grpc_status = "OUT_OF_RANGE"


class StreamTooSlow(CallerError):
    """The stream was ended because its reader did not keep up."""

    retryable = True
    grpc_status = "RESOURCE_EXHAUSTED"


class StreamClosed(PeerError):
    """The service closed the stream."""

    retryable = True


class StreamFenced(PeerError):
    """The service that had the stream no longer owns its topic."""

    retryable = True
    grpc_status = "ABORTED"


class StreamBranched(PeerError):
    """The topic's history branched under the stream; opening it anew tells how far to go back."""

    retryable = True
    grpc_status = "ABORTED"


class StreamTopicDeleted(CallerError):
    """The topic of the stream was deleted."""

    grpc_status = "NOT_FOUND"


class UnknownCursor(CallerError):
    """A topic has no durable cursor of that name: it was removed, dropped for what it held, or never made."""

    grpc_status = "NOT_FOUND"


class TooManyCursors(CallerError):
    """A topic has as many durable cursors as it may."""

    grpc_status = "RESOURCE_EXHAUSTED"


class TokensFailed(StorageError):
    """A store of resume tokens can't be read or written; the token it had before stands."""

    grpc_status = "UNAVAILABLE"


class BackfillFailed(StorageError):
    """What the stream needed could not be read from the log."""

    retryable = True
    grpc_status = "UNAVAILABLE"


class StreamViolation(PeerError):
    """The other side of a stream does not keep to the protocol."""

    grpc_status = "INTERNAL"


class ConnectionSilent(PeerError):
    """Nothing was heard from the other side of a connection for too long."""

    retryable = True


class ConnectionSuperseded(PeerError):
    """Another connection of the same name was opened: this one must not go on."""

    grpc_status = "ABORTED"


class ForeignSink(CallerError):
    """A sink that holds something else than what it is to be filled with; nothing of it was changed."""

    grpc_status = "FAILED_PRECONDITION"


class SinkFailed(StorageError):
    """A sink can't be read or written; what it held before stands, and filling it goes on from there."""

    grpc_status = "UNAVAILABLE"


class SinkFull(SinkFailed):
    """No space was left for a sink; what it held before stands, and filling it goes on from there."""

    grpc_status = "RESOURCE_EXHAUSTED"


class SinkLocked(EnvironmentFault):
    """Somebody else fills the sink, or writes to it."""

    retryable = True
    grpc_status = "ALREADY_EXISTS"
