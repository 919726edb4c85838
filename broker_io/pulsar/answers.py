"""Answers of a cluster and what they mean. One table for the REST interface, one for the client library.

A retry does not change a final answer; it can change a transient one. An answer that asks for a lookup can
change too, and nothing was done: the broker does not have the topic, or not yet, because its bundle moves. A retry at
the same address is redirected to the new owner, so both kinds are retried.

Sources are Pulsar's own names: classes of its broker (4.0), and of its client library in C++ (`lib/`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

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
    """The meaning of an answer."""

    DONE = enum.auto()
    FINAL = enum.auto()
    TRANSIENT = enum.auto()
    LOOKUP = enum.auto()
    FENCED = enum.auto()
    """Another writer has the topic exclusively."""
    UNAUTHORIZED = enum.auto()
    """The credentials are wrong, or lack the permission."""

    @property
    def passes(self) -> bool:
        """Whether a retry of the same request can succeed."""
        return self in (AnswerKind.TRANSIENT, AnswerKind.LOOKUP)


class Rule(NamedTuple):
    """`words` is a pattern for the reason; the first rule that matches applies."""

    statuses: range
    words: str
    means: AnswerKind


def _only(status: int) -> range:
    return range(status, status + 1)


REST = (
    Rule(range(200, 300), "", AnswerKind.DONE),
    # PulsarWebResource redirects to the owner; only endless redirects come here, when brokers disagree.
    Rule(range(300, 400), "", AnswerKind.LOOKUP),
    # AuthenticationFilter, PulsarWebResource.validate…Access, for any reason.
    Rule(_only(401), "", AnswerKind.UNAUTHORIZED),
    Rule(_only(403), "", AnswerKind.UNAUTHORIZED),
    # PulsarWebResource.validateTopicOwnershipAsync and validateBundleOwnership, 412: no owner, or none that is known
    # yet, as while a bundle is unloaded (NamespaceService: "is being unloaded", "is not currently owned") or its
    # broker starts (OwnershipCache: "not ready for acquiring ownership").
    Rule(_only(412), r"find owner for|find ownership for|bundle is actived|acquiring ownership", AnswerKind.LOOKUP),
    # BrokerService.checkTopicNsOwnership, NamespaceService, TransactionsBase: the broker released the bundle; some
    # resources pass these on with 404 or 409.
    Rule(
        range(404, 413),
        r"redo the lookup|not served by this|not (currently )?owned|being unloaded|don't owner by this broker",
        AnswerKind.LOOKUP,
    ),
    # PersistentTopicsBase (subscriptions), 412 "Failed for Subscription Busy": another client creates the same one.
    Rule(_only(412), "Busy", AnswerKind.TRANSIENT),
    # AdminResource, PulsarWebResource, PersistentTopicsBase, 409: metadata changed between the broker's look and write.
    Rule(_only(409), "Concurrent modification", AnswerKind.TRANSIENT),
    Rule(_only(408), "", AnswerKind.TRANSIENT),  # of a proxy, which got an incomplete request
    Rule(_only(425), "", AnswerKind.TRANSIENT),
    Rule(_only(429), "", AnswerKind.TRANSIENT),  # RateLimitingFilter
    Rule(range(400, 500), "", AnswerKind.FINAL),
    Rule(_only(501), "", AnswerKind.FINAL),  # the version of the broker has no such request
    Rule(_only(505), "", AnswerKind.FINAL),
    # RestException of anything a resource did not expect, such as a closing ledger or a topic that is briefly fenced;
    # WebService while it starts ("PulsarService is not ready", 503); proxies without a broker (502, 504).
    Rule(range(500, 600), "", AnswerKind.TRANSIENT),
)

RESULTS = {
    "Ok": AnswerKind.DONE,
    # BrokerServiceException.getClientErrorCode of exceptions without a code; the library retries by itself.
    "UnknownError": AnswerKind.TRANSIENT,
    "InvalidConfiguration": AnswerKind.FINAL,  # of our options, by ClientConfiguration
    "Timeout": AnswerKind.TRANSIENT,  # no answer in time, or only retryable ones (RetryableOperation)
    "LookupError": AnswerKind.LOOKUP,  # BinaryProtoLookupService: the lookup failed, or went round in circles
    "ConnectError": AnswerKind.TRANSIENT,  # ConnectionPool: nothing accepts connections there now
    "ReadError": AnswerKind.TRANSIENT,  # ClientConnection: the connection broke
    "AuthenticationError": AnswerKind.UNAUTHORIZED,
    "AuthorizationError": AnswerKind.UNAUTHORIZED,
    "ErrorGettingAuthenticationData": AnswerKind.UNAUTHORIZED,  # on our side: Authentication gives none
    "BrokerMetadataError": AnswerKind.TRANSIENT,  # ServerMetadataException: the metadata store did not answer
    "BrokerPersistenceError": AnswerKind.TRANSIENT,  # PersistenceException: no ledger could be opened or written
    "ChecksumError": AnswerKind.FINAL,  # of a message that was corrupted before it was sent
    "ConsumerBusy": AnswerKind.TRANSIENT,  # ConsumerBusyException: our previous consumer of that name is not gone yet
    "NotConnected": AnswerKind.TRANSIENT,
    "AlreadyClosed": AnswerKind.TRANSIENT,  # the connection broke; objects that we closed raise Closed
    "InvalidMessage": AnswerKind.FINAL,  # of our call
    "ConsumerNotInitialized": AnswerKind.FINAL,  # of our call
    "ProducerNotInitialized": AnswerKind.FINAL,  # of our call
    "ProducerBusy": AnswerKind.FENCED,  # AbstractTopic: there is an exclusive producer, so a shared one may not open
    "TooManyLookupRequestException": AnswerKind.TRANSIENT,  # TooManyRequests: LookupRequestSemaphore is used up
    "InvalidTopicName": AnswerKind.FINAL,
    "InvalidUrl": AnswerKind.FINAL,
    "ServiceUnitNotReady": AnswerKind.LOOKUP,  # ServiceNotReady: a topic is fenced or loading
    "OperationNotSupported": AnswerKind.FINAL,
    # A backlog quota stays full until the backlog is read or the quota is raised, so the operator has to know.
    "ProducerBlockedQuotaExceededError": AnswerKind.FINAL,
    "ProducerBlockedQuotaExceededException": AnswerKind.FINAL,
    "ProducerQueueIsFull": AnswerKind.TRANSIENT,  # room comes with the next acknowledgement
    "MessageTooBig": AnswerKind.FINAL,
    "TopicNotFound": AnswerKind.FINAL,
    "SubscriptionNotFound": AnswerKind.FINAL,
    "ConsumerNotFound": AnswerKind.TRANSIENT,  # the broker has dropped a consumer that the library still uses
    "UnsupportedVersionError": AnswerKind.FINAL,
    "TopicTerminated": AnswerKind.FINAL,
    "CryptoError": AnswerKind.FINAL,
    "IncompatibleSchema": AnswerKind.FINAL,
    "ConsumerAssignError": AnswerKind.FINAL,  # of key-shared subscriptions, which no reader has
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


T = TypeVar("T")
INT64 = range(-(2**63), 2**63)


def read_answer(what: str, answer: Any, read: Callable[[Any], T]) -> T:
    """What `read` finds in the decoded content of an answer. Raises ClusterRefused for an answer of another form."""
    try:
        return read(answer)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ClusterRefused(f"{what} can't be read ({error!r}): {answer!r:.200}", 0, "") from None


def integer(value: Any) -> int:
    """Raises ValueError for anything else in an answer, and for integers of more than 64 bits."""
    if type(value) is not int or value not in INT64:
        raise ValueError(f"{value!r:.50} is not an integer of 64 bits")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """An object in an answer; one without fields may be missing. Raises TypeError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.50} is not an object")
    return value


def texts(value: Any) -> list[str]:
    """A list of texts in an answer. Raises TypeError."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r:.50} is not a list of texts")
    return value


def classify_status(status: int, reason: str) -> AnswerKind:
    """The meaning of an answer of the REST interface."""
    for rule in REST:
        if status in rule.statuses and re.search(rule.words, reason):
            return rule.means
    return AnswerKind.FINAL


def classify_result(name: str) -> AnswerKind:
    """The meaning of a result of the client library. Unknown results of later versions are retried."""
    return RESULTS.get(name, AnswerKind.TRANSIENT)


def open_error(error: pulsar.PulsarException, topic: str, what: str) -> Error:
    """The error for a reader or a writer that could not be opened."""
    name = type(error).__name__
    means = classify_result(name)
    if means is AnswerKind.FENCED:
        return Fenced(f"topic {topic!r} is held by an exclusive writer ({name}): wait until it is closed")
    if means is AnswerKind.UNAUTHORIZED:
        return NotAuthorized(f"these credentials may not open a {what} of topic {topic!r} ({error})")
    if name == "TopicNotFound":
        return TopicNotFound(f"there is no topic {topic!r}: create it first")
    if name == "IncompatibleSchema":
        return NotSupported(
            f"the cluster rejects the schema of topic {topic!r} ({error}): give the topic's own schema. If you gave "
            "none, the cluster requires a schema for each message, which markers can't have: run "
            "`pulsar-admin namespaces set-schema-validation-enforce --disable NAMESPACE`"
        )
    if means.passes:
        return ServiceUnavailable(f"the cluster did not open a {what} of topic {topic!r} ({error}): is it running?")
    return ClusterRefused(f"the cluster refused to open a {what} of topic {topic!r} ({error})", 0, str(error))


def append_error(result: str, topic: str) -> Error:
    """The error for a failed append, which may or may not be in the log."""
    means = classify_result(result)
    if means is AnswerKind.FENCED:
        return Fenced(
            f"the cluster fenced the exclusive writer of topic {topic!r} ({result}), because another one opened it or "
            "its storage was lost: pending appends may or may not be in the log"
        )
    if means is AnswerKind.UNAUTHORIZED:
        return NotAuthorized(f"these credentials may not write to topic {topic!r} ({result})")
    return AppendUnknown(
        f"an append to topic {topic!r} failed ({result}): it may or may not be in the log; open another writer"
    )


def message_too_large(topic: str) -> Error:
    """The error for an append of one message that is not in the log."""
    return MessageTooLarge(
        f"the cluster rejected a message of topic {topic!r} as too large: lower max_message_bytes to its limit"
    )


def entry_too_large(topic: str) -> Error:
    """The error for all other appends of a writer after the cluster rejected a message as too large."""
    return EntryTooLarge(
        f"the cluster rejected an entry of topic {topic!r} as too large, and other pending appends may or may not be "
        "in the log: lower max_message_bytes to the cluster's limit, and open another writer"
    )
