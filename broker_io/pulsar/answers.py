"""What a cluster's answers mean: pure. The one table of the REST interface's answers and the client library's results.

A final answer stays the same whoever asks again; a transient one passes; one that asks for a lookup passes too, and was
given before anything was done: the broker that was asked does not have the topic, or not yet, because its bundle moves.
Who asks again at the address that was given is sent to the owner of that moment, so both are asked again.

Sources are names of Pulsar's own: classes of its broker (4.0), and of its client library in C++ (`lib/`).

What the client library fails with, as errors of the one tree.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import pulsar

from broker_io.errors import (
    AppendUnknown,
    ClusterRefused,
    EntryTooLarge,
    Error,
    Fenced,
    MessageTooLarge,
    NotAuthorized,
    NotSupported,
    ServiceUnavailable,
    TopicNotFound,
)


class AnswerKind(enum.Enum):
    """What an answer means to whoever asked."""

    DONE = enum.auto()
    FINAL = enum.auto()
    TRANSIENT = enum.auto()
    LOOKUP = enum.auto()
    FENCED = enum.auto()
    """Somebody else is the only writer now."""
    UNAUTHORIZED = enum.auto()
    """Credentials that are wrong, or may not do this."""

    @property
    def passes(self) -> bool:
        """Whether the same question can get another answer by itself."""
        return self in (AnswerKind.TRANSIENT, AnswerKind.LOOKUP)


class Rule(NamedTuple):
    """`words`: a pattern that is searched for in the reason; the first rule that fits counts."""

    statuses: range
    words: str
    means: AnswerKind


def _only(status: int) -> range:
    return range(status, status + 1)


REST = (
    Rule(range(200, 300), "", AnswerKind.DONE),
    # PulsarWebResource sends a question on to the owner; only one that nobody ends comes here: brokers disagree.
    Rule(range(300, 400), "", AnswerKind.LOOKUP),
    # AuthenticationFilter, PulsarWebResource.validate…Access: whatever the reason is.
    Rule(_only(401), "", AnswerKind.UNAUTHORIZED),
    Rule(_only(403), "", AnswerKind.UNAUTHORIZED),
    # PulsarWebResource.validateTopicOwnershipAsync and validateBundleOwnership, 412: no owner, or none that is known
    # yet, as while a bundle is unloaded (NamespaceService: "is being unloaded", "is not currently owned") or its
    # broker starts (OwnershipCache: "not ready for acquiring ownership").
    Rule(_only(412), r"find owner for|find ownership for|bundle is actived|acquiring ownership", AnswerKind.LOOKUP),
    # BrokerService.checkTopicNsOwnership, NamespaceService, TransactionsBase: the broker has let the bundle go; some of
    # these come with 404 or 409 where a resource passes them on.
    Rule(
        range(404, 413),
        r"redo the lookup|not served by this|not (currently )?owned|being unloaded|don't owner by this broker",
        AnswerKind.LOOKUP,
    ),
    # PersistentTopicsBase (subscriptions), 412 "Failed for Subscription Busy": somebody else makes the same right now.
    Rule(_only(412), "Busy", AnswerKind.TRANSIENT),
    # AdminResource, PulsarWebResource, PersistentTopicsBase, 409: metadata changed between the broker's look and write.
    Rule(_only(409), "Concurrent modification", AnswerKind.TRANSIENT),
    Rule(_only(408), "", AnswerKind.TRANSIENT),  # of a proxy, which got no whole question
    Rule(_only(425), "", AnswerKind.TRANSIENT),
    Rule(_only(429), "", AnswerKind.TRANSIENT),  # RateLimitingFilter
    Rule(range(400, 500), "", AnswerKind.FINAL),
    Rule(_only(501), "", AnswerKind.FINAL),  # a version of the broker that has no such question
    Rule(_only(505), "", AnswerKind.FINAL),
    # RestException of whatever a resource did not expect, as of a ledger that closes or a topic that is fenced for a
    # moment; WebService while it starts ("PulsarService is not ready", 503); proxies without a broker (502, 504).
    Rule(range(500, 600), "", AnswerKind.TRANSIENT),
)

RESULTS = {
    "Ok": AnswerKind.DONE,
    # BrokerServiceException.getClientErrorCode of what it has no code for; the library asks again by itself.
    "UnknownError": AnswerKind.TRANSIENT,
    "InvalidConfiguration": AnswerKind.FINAL,  # of options of ours, by ClientConfiguration
    "Timeout": AnswerKind.TRANSIENT,  # no answer in time, or none but retryable ones (RetryableOperation)
    "LookupError": AnswerKind.LOOKUP,  # BinaryProtoLookupService: the lookup failed, or went round in circles
    "ConnectError": AnswerKind.TRANSIENT,  # ConnectionPool: nobody takes connections there at the moment
    "ReadError": AnswerKind.TRANSIENT,  # ClientConnection: the connection broke
    "AuthenticationError": AnswerKind.UNAUTHORIZED,
    "AuthorizationError": AnswerKind.UNAUTHORIZED,
    "ErrorGettingAuthenticationData": AnswerKind.UNAUTHORIZED,  # of our side: Authentication gives none
    "BrokerMetadataError": AnswerKind.TRANSIENT,  # ServerMetadataException: the metadata store did not answer
    "BrokerPersistenceError": AnswerKind.TRANSIENT,  # PersistenceException: no ledger could be opened or written
    "ChecksumError": AnswerKind.FINAL,  # of a message whose bytes are not what was meant to be sent
    "ConsumerBusy": AnswerKind.TRANSIENT,  # ConsumerBusyException: our last one is not gone yet; no two share a name
    "NotConnected": AnswerKind.TRANSIENT,
    "AlreadyClosed": AnswerKind.TRANSIENT,  # the connection broke; what we closed says so itself
    "InvalidMessage": AnswerKind.FINAL,  # of a call of ours
    "ConsumerNotInitialized": AnswerKind.FINAL,  # of a call of ours
    "ProducerNotInitialized": AnswerKind.FINAL,  # of a call of ours
    "ProducerBusy": AnswerKind.FENCED,  # AbstractTopic: an exclusive producer is there, so no shared one may be
    "TooManyLookupRequestException": AnswerKind.TRANSIENT,  # TooManyRequests: LookupRequestSemaphore is used up
    "InvalidTopicName": AnswerKind.FINAL,
    "InvalidUrl": AnswerKind.FINAL,
    "ServiceUnitNotReady": AnswerKind.LOOKUP,  # ServiceNotReady: a topic is fenced or loading
    "OperationNotSupported": AnswerKind.FINAL,
    # A backlog quota is full until somebody reads or lifts it: the cluster's operator has to know.
    "ProducerBlockedQuotaExceededError": AnswerKind.FINAL,
    "ProducerBlockedQuotaExceededException": AnswerKind.FINAL,
    "ProducerQueueIsFull": AnswerKind.TRANSIENT,  # room comes with the next acknowledgement
    "MessageTooBig": AnswerKind.FINAL,
    "TopicNotFound": AnswerKind.FINAL,
    "SubscriptionNotFound": AnswerKind.FINAL,
    "ConsumerNotFound": AnswerKind.TRANSIENT,  # the broker has dropped a consumer that the library still believes in
    "UnsupportedVersionError": AnswerKind.FINAL,
    "TopicTerminated": AnswerKind.FINAL,
    "CryptoError": AnswerKind.FINAL,
    "IncompatibleSchema": AnswerKind.FINAL,
    "ConsumerAssignError": AnswerKind.FINAL,  # of subscriptions that share by key, which no reader has
    "CumulativeAcknowledgementNotAllowedError": AnswerKind.FINAL,
    "TransactionCoordinatorNotFoundError": AnswerKind.LOOKUP,  # Pulsar's own: its topic moves
    "InvalidTxnStatusError": AnswerKind.FINAL,
    "NotAllowedError": AnswerKind.FINAL,
    "TransactionConflict": AnswerKind.FINAL,
    "TransactionNotFound": AnswerKind.FINAL,
    "ProducerFenced": AnswerKind.FENCED,
    "MemoryBufferIsFull": AnswerKind.TRANSIENT,  # room comes with the next acknowledgement
    "Interrupted": AnswerKind.TRANSIENT,
}


def classify_status(status: int, reason: str) -> AnswerKind:
    """What an answer of the REST interface means."""
    for rule in REST:
        if status in rule.statuses and re.search(rule.words, reason):
            return rule.means
    return AnswerKind.FINAL


def classify_result(name: str) -> AnswerKind:
    """What a result of the client library means. One that a later version has may pass: who asks again is patient."""
    return RESULTS.get(name, AnswerKind.TRANSIENT)


def open_error(error: pulsar.PulsarException, topic: str, what: str) -> Error:
    """Why a reader or a writer of a topic could not be opened."""
    name = type(error).__name__
    means = classify_result(name)
    if means is AnswerKind.FENCED:
        return Fenced(f"topic {topic!r} is held by an exclusive writer ({name}): wait until it closes")
    if means is AnswerKind.UNAUTHORIZED:
        return NotAuthorized(f"these credentials may not open a {what} of topic {topic!r} ({error})")
    if name == "TopicNotFound":
        return TopicNotFound(f"there is no topic {topic!r}: create it first")
    if name == "IncompatibleSchema":
        return NotSupported(
            f"the cluster does not take the schema of what is written to topic {topic!r} ({error}). Where it was told "
            "none: it wants each message to name one, which markers can't, so run "
            "`pulsar-admin namespaces set-schema-validation-enforce --disable NAMESPACE`; else give the topic's own"
        )
    if means.passes:
        return ServiceUnavailable(f"the cluster opens no {what} of topic {topic!r} ({error}): is it running?")
    return ClusterRefused(f"the cluster opens no {what} of topic {topic!r} ({error})", 0, str(error))


def append_error(result: str, topic: str) -> Error:
    """Why an append failed; whether it stands in the log is unknown."""
    means = classify_result(result)
    if means is AnswerKind.FENCED:
        return Fenced(
            f"the cluster let go of the exclusive writer of topic {topic!r} ({result}), as it does when another one "
            "opens it, or when its storage is lost: what was under way may stand in the log"
        )
    if means is AnswerKind.UNAUTHORIZED:
        return NotAuthorized(f"these credentials may not write to topic {topic!r} ({result})")
    return AppendUnknown(
        f"an append to topic {topic!r} failed ({result}): it may stand in the log or not; open another writer"
    )


def message_too_large(topic: str) -> Error:
    """Why an append of one message failed that stands nowhere."""
    return MessageTooLarge(
        f"the cluster refuses a message of topic {topic!r} as too large: lower max_message_bytes to its limit"
    )


def entry_too_large(topic: str) -> Error:
    """Why all other appends of a writer fail where the cluster refused a message of one as too large."""
    return EntryTooLarge(
        f"the cluster refused an entry of topic {topic!r} as too large, and whatever else was under way may stand in "
        "the log or not: lower max_message_bytes to the cluster's limit, and open another writer"
    )
