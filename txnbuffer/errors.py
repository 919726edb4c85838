"""Errors of the log protocol, transactions, change streams and sinks, ordered by fault

The base class and the errors of brokers are in `broker_io.errors`, those of snapshots in `snapshots.errors`. This
module has a part for each fault: the caller, the peer, the storage and the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from broker_io.errors import CallerError as CallerError
from broker_io.errors import EnvironmentFault as EnvironmentFault
from broker_io.errors import Error as Error
from broker_io.errors import Fault as Fault
from broker_io.errors import Fenced as Fenced
from broker_io.errors import LimitExceeded as LimitExceeded
from broker_io.errors import LogRestored as LogRestored
from broker_io.errors import NotAuthorized as NotAuthorized
from broker_io.errors import PeerError as PeerError
from broker_io.errors import ServiceUnavailable as ServiceUnavailable
from broker_io.errors import StorageError as StorageError
from broker_io.errors import TopicNotFound
from broker_io.errors import Unauthenticated as Unauthenticated
from broker_io.errors import UntrustedService as UntrustedService
from broker_io.errors import UsedAfterFork as UsedAfterFork
from broker_io.position import Position
from txnbuffer.model import TxnId

TIME_UP = "its time was up"
"""The reason of an abort by timeout."""
OPEN_TRANSACTION = "transaction {} is open: commit or abort it"
"""Why a topic is in use."""


def retry_pause(error: Error | None, pause: float) -> float:
    """Seconds before a retry after an error: `pause`, or what a limit demands if that is more."""
    return max(pause, error.retry_after) if isinstance(error, LimitExceeded) else pause


# The caller: requests and configuration


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 record`, `1,200 records`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class InvalidRequest(CallerError):
    """An argument is invalid."""


class InvalidHandler(InvalidRequest):
    """A handler is not a function, or it is synchronous where the client needs a coroutine function, or vice versa."""


class InvalidConfiguration(CallerError):
    """The configuration has an unknown key or an invalid value."""


class InvalidPolicy(InvalidConfiguration):
    """The policy of the access control can't be read, or has a mistake; the message names the rule and the key."""


class InvalidTokenFile(InvalidConfiguration):
    """The file of tokens can't be read; the message names the line."""


class MalformedFrame(CallerError):
    """A session received bytes that are not a frame: they are damaged, or the peer uses another protocol."""


class UndecodableValue(CallerError):
    """The value (or `what`) of a record can't be decoded; a reader of records continues after that record."""

    def __init__(self, topic: str, position: Position, why: str, what: str = "value") -> None:
        super().__init__(f"topic {topic!r}: the {what} of the record at {position} can't be decoded: {why}")
        self.topic = topic
        self.position = position


# The caller: transactions


class TransactionAborted(CallerError, grpc_status="ABORTED"):
    """The transaction was aborted and has no effect; begin a new transaction to retry."""

    def __init__(self, txn: TxnId, reason: str) -> None:
        super().__init__(f"transaction {txn} was aborted: {reason}; begin a new transaction to retry")
        self.txn = txn
        self.reason = reason

    @property
    def timed_out(self) -> bool:
        """Whether the transaction was open for longer than its timeout."""
        return self.reason == TIME_UP


class TransactionCommitted(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The transaction has committed, so it cannot be aborted."""

    def __init__(self, txn: TxnId) -> None:
        super().__init__(f"transaction {txn} has committed, so it cannot be aborted: send other records to undo it")
        self.txn = txn


class OutcomeForgotten(CallerError, grpc_status="NOT_FOUND"):
    """The transaction ended so long ago that its outcome is no longer stored."""

    def __init__(self, txn: TxnId) -> None:
        super().__init__(
            f"transaction {txn} ended, but its outcome is no longer stored: read its topics to find its records"
        )
        self.txn = txn


class TooManyTransactions(LimitExceeded):
    """The session, its principal or the service has reached its limit of open transactions."""


class UnknownTransaction(CallerError, grpc_status="NOT_FOUND"):
    """The coordinator never assigned this transaction id."""


class ForeignTransaction(CallerError, grpc_status="PERMISSION_DENIED"):
    """The transaction belongs to another session or another coordinator."""


class UnregisteredTopic(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A transaction names a topic that was not registered before the first write to it."""


class TopicNotCreated(TopicNotFound):
    """The topic does not exist and the service is configured not to create topics."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist, and this service creates no topics: create it first")


class TopicInUse(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The topic was not deleted, because transactions, streams, cursors or groups need it; the message names them."""

    SHOWN = 10

    @classmethod
    def by(cls, topic: str, uses: Sequence[str]) -> Self:
        """The error for a topic with these uses, of which it names the first ones."""
        more = [f"{len(uses) - cls.SHOWN} more"] if len(uses) > cls.SHOWN else []
        return cls(f"topic {topic!r} is in use and was not deleted: {'; '.join([*uses[: cls.SHOWN], *more])}")


class ForeignTopic(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The topic, producer name or group belongs to another shard; ask the service of that shard."""


# The caller: named producers and consumer groups


class AlreadyCommitted(CallerError, grpc_status="ALREADY_EXISTS"):
    """This sequence number of the named producer has already committed; do not send it again."""

    def __init__(self, name: str, number: int, last: int) -> None:
        super().__init__(
            f"number {number} of producer {name!r} is not above {last}, its last committed one: continue above that"
        )
        self.name = name
        self.number = number
        self.last = last


class PositionConflict(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A consumer's transaction does not start where the last committed transaction of its group ended."""


class HandlerTooSlow(CallerError, grpc_status="DEADLINE_EXCEEDED"):
    """The handler of a group took longer for one record than the timeout of the transaction or of the member."""


# The caller: change streams


class MutationsTrimmed(CallerError, grpc_status="OUT_OF_RANGE"):
    """The requested mutations are no longer in the log."""

    def __init__(self, asked: int, first: int) -> None:
        super().__init__(
            f"mutation {asked} was trimmed, the first one in the log is {first}: start the stream again from seqno 0"
        )
        self.asked = asked
        self.first = first


class StreamTrimmed(CallerError, grpc_status="OUT_OF_RANGE"):
    """The next mutations of the stream are no longer in the log."""


class SeqnoOutOfRange(CallerError, grpc_status="OUT_OF_RANGE"):
    """A stream request has seqnos that contradict each other, or that the topic has not reached."""


class UnreadableToken(CallerError):
    """The text is not a resume token of this release."""


class ForeignToken(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The resume token belongs to another topic or another cluster."""


class StreamExists(CallerError, grpc_status="ALREADY_EXISTS"):
    """The connection already has a stream with this number."""


class StreamMemoryExhausted(LimitExceeded):
    """The service has no memory for another stream at the moment."""


class StreamTooSlow(CallerError, retryable=True, grpc_status="RESOURCE_EXHAUSTED"):
    """The service ended the stream because its reader did not keep up."""


class StreamTopicDeleted(CallerError, grpc_status="NOT_FOUND"):
    """The topic of the stream was deleted."""


class UnknownCursor(CallerError, grpc_status="NOT_FOUND"):
    """The topic has no durable cursor with this name: it never existed, was removed, or was dropped for its size."""


class TooManyTopics(LimitExceeded, retryable=False):
    """The principal has created as many topics as it may: send to one that exists, or have the limit raised."""


class TooManyCursors(LimitExceeded, retryable=False):
    """The topic has reached its limit of durable cursors: remove one before a retry."""


# The caller: relays and sinks


class RelayTargetTaken(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The target of a relay has messages that were not relayed from this source; nothing was written."""


class RelayBranched(CallerError, grpc_status="ABORTED"):
    """The history of a relay's source branched: the messages of the target after `seqno` are not in the source.

    Messages cannot be removed from a log, so nothing was written.
    """

    def __init__(self, topic: str, seqno: int, relayed: str) -> None:
        super().__init__(
            f"the history of topic {topic!r} branched after seqno {seqno}, and {relayed} was relayed: what the target "
            "holds after that seqno is void; relay to another topic, or append the new history with --resend"
        )
        self.topic = topic
        self.seqno = seqno


class ForeignSink(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The sink has data from another source; nothing in it was changed."""


# The caller: databases


class OutboxMissing(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The database has no tables of txnbuffer."""


class ForeignOutbox(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The log and the database do not belong together: one is a copy, is new, or was restored.

    Nothing was published.
    """


class UnsafeDatabase(CallerError, grpc_status="FAILED_PRECONDITION"):
    """A commit of the database could be lost, or its tables are of another release; the message says what to set."""


class OutboxStopped(CallerError, grpc_status="FAILED_PRECONDITION"):
    """The publisher of an outbox has stopped; the cause is its error. Rows are kept until one publishes them."""


# The peer: the coordinator and its sessions


class OutcomeUnknown(PeerError):
    """The transaction may or may not have committed; call `client.outcome(error.txn)`."""

    def __init__(self, txn: TxnId, why: str) -> None:
        super().__init__(f"transaction {txn} may or may not have committed: {why}; ask for the outcome of {txn}")
        self.txn = txn


class SendUnknown(PeerError):
    """The connection broke, or the log stopped, during a send outside of a transaction: it may or may not be stored."""


class ReplayStalled(PeerError, retryable=True):
    """The broker does not deliver messages that are in the topic; a new reader may receive them."""


class ProducerFenced(Fenced):
    """Another producer opened the name, so this one must stop."""


class StaleGeneration(Fenced):
    """The topics of this member were assigned to another member of the group, so it must stop consuming them."""


class UnknownSession(PeerError, grpc_status="FAILED_PRECONDITION"):
    """The coordinator does not know the session: open it again and name its open transactions."""


class CoordinatorStopped(PeerError, retryable=True):
    """The coordinator lost its ownership, or its log failed; its requests are answered by the next owner."""


class PlugInMissing(PeerError, retryable=True, grpc_status="FAILED_PRECONDITION"):
    """A broker of the cluster lacks the plug-in, or has one that can't read what this release writes."""


class LogDeleted(PeerError):
    """The decision log was deleted while a service owned it or was in standby."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the service's log was deleted, alone or with its namespace ({why}): follow docs/recover.md, "
            "then restart the service"
        )


# The peer: change streams


class StreamClosed(PeerError, retryable=True):
    """The service closed the stream."""


class StreamFenced(PeerError, retryable=True, grpc_status="ABORTED"):
    """The service of the stream no longer owns its topic."""


class StreamBranched(PeerError, retryable=True, grpc_status="ABORTED"):
    """The topic's history branched after the stream's position; opening the stream again gives the rollback seqno."""


class StreamViolation(PeerError, grpc_status="INTERNAL"):
    """The peer of a stream violated the protocol."""


class ConnectionSilent(PeerError, retryable=True):
    """The peer of a connection sent nothing for longer than the timeout."""


class ConnectionSuperseded(PeerError, grpc_status="ABORTED"):
    """Another connection of the same name was opened, so this one must stop."""


# The storage: the log protocol


class ProtocolStopped(StorageError):
    """A topic stopped at `position`: all messages before it were applied, none from there on.

    `effects`: the effects of the messages before it in the same batch. `topic`: None unless `of_topic` has set it.
    """

    effects: Sequence[object] = ()

    def __init__(self, position: Position, what: str, topic: str | None = None) -> None:
        super().__init__(f"{'the topic' if topic is None else f'topic {topic}'} stopped at {position}: {what}")
        self.position = position
        self.what = what
        self.topic = topic

    def of_topic(self, topic: str) -> Self:
        """Return this error with the name of the topic in its message."""
        named = type(self).__new__(type(self))
        ProtocolStopped.__init__(named, self.position, self.what, topic)
        named.effects = self.effects
        return named


class UndecodableMarker(ProtocolStopped):
    """A marker can't be decoded: which transactions it ends is unknown, so nothing after it is visible."""

    def __init__(self, position: Position, reason: str) -> None:
        super().__init__(position, f"the marker can't be decoded ({reason}); inspect the message there")


class UnsupportedProtocol(ProtocolStopped, grpc_status="FAILED_PRECONDITION"):
    """A message has a protocol version that this release does not support."""

    def __init__(self, position: Position, version: str) -> None:
        super().__init__(position, f"the message has protocol version {version}; read the topic with a newer release")


class OutOfOrder(ProtocolStopped, grpc_status="FAILED_PRECONDITION"):
    """A message is at or before the position up to which the log was applied already."""

    def __init__(self, position: Position, applied: Position) -> None:
        super().__init__(position, f"the log is already applied up to {applied}; continue after that position")


class UndecodableRecordSet(StorageError):
    """The value of a record set is not the block of records that its properties describe."""


class LogTruncated(StorageError):
    """The log ends before a position that was already read, or that is needed."""


class LogReplaced(StorageError):
    """The log has other messages than those that were read from it before."""


class SegmentMismatch(StorageError):
    """The segments of a buffer are not those that its state lists."""


class SeqnoGap(StorageError):
    """The seqnos of mutations are not consecutive, so mutations are missing."""


# The storage: transactions


class NotVisible(StorageError):
    """The transaction is committed, but readers do not get it: an older transaction is open, or a topic has stopped.

    The message names the topic, and the transaction that is in the way.
    """

    def __init__(self, txn: TxnId, topic: str, why: str) -> None:
        super().__init__(f"transaction {txn} is committed, but not visible on topic {topic!r}: {why}")
        self.txn = txn
        self.topic = topic


class RegistrationFailed(StorageError, retryable=True, grpc_status="UNAVAILABLE"):
    """The first snapshot of a topic could not be stored."""


class RegistrationRefused(RegistrationFailed, retryable=False, grpc_status="FAILED_PRECONDITION"):
    """The topic cannot have transactions in its current state; follow the message before a retry."""


class UnreadableDecision(StorageError):
    """An entry of the decision log cannot be read; continuing could contradict it."""


class DecisionsLost(StorageError):
    """The decision log lost entries; continuing would assign ids twice and contradict markers on topics."""

    def __init__(self, topic: str, what: str) -> None:
        super().__init__(
            f"{topic} has lost entries: {what}. If it was deleted, truncated or restored from an older copy, restore "
            "the newest copy; otherwise `txnbuf recover ADDRESS --decisions --write` resets it, which gives up "
            "decisions that were stored nowhere else"
        )


# The storage: change streams and sinks


class TokensFailed(StorageError, grpc_status="UNAVAILABLE"):
    """A token store cannot be read or written; it still has the last stored token."""


class BackfillFailed(StorageError, retryable=True, grpc_status="UNAVAILABLE"):
    """The log could not be read for a stream."""


class CompactionFailed(StorageError):
    """A compaction ended with an error; the topic is as it was before."""

    def __init__(self, topic: str, why: str) -> None:
        super().__init__(f"topic {topic!r} was not compacted: {why}")


class BackupFailed(StorageError):
    """A service did not complete a backup; there is no file, and the log is as it was."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the backup {path} was not written: {why}")


class SinkFailed(StorageError, grpc_status="UNAVAILABLE"):
    """A sink cannot be read or written; it keeps its data, and the next run continues from there."""


class SinkFull(SinkFailed, grpc_status="RESOURCE_EXHAUSTED"):
    """A sink has no space left; it keeps its data, and the next run continues from there."""


# The environment


class ClientBroken(EnvironmentFault, grpc_status="INTERNAL"):
    """A task of the client was cancelled or failed; operations in flight may or may not have completed."""


class SinkLocked(EnvironmentFault, retryable=True, grpc_status="ALREADY_EXISTS"):
    """Another process writes to the sink."""
