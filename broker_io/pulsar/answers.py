"""What a cluster's answers mean: pure. The one table of the REST interface's answers and the client library's results.

A final answer stays the same whoever asks again; a transient one passes; one that asks for a lookup passes too, and was
given before anything was done: the broker that was asked does not have the topic, or not yet, because its bundle moves.
Who asks again at the address that was given is sent to the owner of that moment, so both are asked again.

Sources are names of Pulsar's own: classes of its broker (4.0), and of its client library in C++ (`lib/`).
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class Means(enum.Enum):
    """What an answer means to whoever asked."""

    DONE = enum.auto()
    FINAL = enum.auto()
    TRANSIENT = enum.auto()
    LOOKUP = enum.auto()
    FENCED = enum.auto()
    """Somebody else is the only writer now."""
    AUTHORITY = enum.auto()
    """Credentials that are wrong, or may not do this."""

    @property
    def passes(self) -> bool:
        """Whether the same question can get another answer by itself."""
        return self in (Means.TRANSIENT, Means.LOOKUP)


class Rule(NamedTuple):
    """`words`: a pattern that is searched for in the reason; the first rule that fits counts."""

    statuses: range
    words: str
    means: Means


def _only(status: int) -> range:
    return range(status, status + 1)


REST = (
    Rule(range(200, 300), "", Means.DONE),
    # PulsarWebResource sends a question on to the owner; only one that nobody ends comes here: brokers disagree.
    Rule(range(300, 400), "", Means.LOOKUP),
    # AuthenticationFilter, PulsarWebResource.validate…Access: whatever the reason is.
    Rule(_only(401), "", Means.AUTHORITY),
    Rule(_only(403), "", Means.AUTHORITY),
    # PulsarWebResource.validateTopicOwnershipAsync and validateBundleOwnership, 412: no owner, or none that is known
    # yet, as while a bundle is unloaded (NamespaceService: "is being unloaded", "is not currently owned") or its
    # broker starts (OwnershipCache: "not ready for acquiring ownership").
    Rule(_only(412), r"find owner for|find ownership for|bundle is actived|acquiring ownership", Means.LOOKUP),
    # BrokerService.checkTopicNsOwnership, NamespaceService, TransactionsBase: the broker has let the bundle go; some of
    # these come with 404 or 409 where a resource passes them on.
    Rule(
        range(404, 413),
        r"redo the lookup|not served by this|not (currently )?owned|being unloaded|don't owner by this broker",
        Means.LOOKUP,
    ),
    # PersistentTopicsBase (subscriptions), 412 "Failed for Subscription Busy": somebody else makes the same right now.
    Rule(_only(412), "Busy", Means.TRANSIENT),
    # AdminResource, PulsarWebResource, PersistentTopicsBase, 409: metadata changed between the broker's look and write.
    Rule(_only(409), "Concurrent modification", Means.TRANSIENT),
    Rule(_only(408), "", Means.TRANSIENT),  # of a proxy, which got no whole question
    Rule(_only(425), "", Means.TRANSIENT),
    Rule(_only(429), "", Means.TRANSIENT),  # RateLimitingFilter
    Rule(range(400, 500), "", Means.FINAL),
    Rule(_only(501), "", Means.FINAL),  # a version of the broker that has no such question
    Rule(_only(505), "", Means.FINAL),
    # RestException of whatever a resource did not expect, as of a ledger that closes or a topic that is fenced for a
    # moment; WebService while it starts ("PulsarService is not ready", 503); proxies without a broker (502, 504).
    Rule(range(500, 600), "", Means.TRANSIENT),
)

RESULTS = {
    "Ok": Means.DONE,
    # BrokerServiceException.getClientErrorCode of what it has no code for; the library asks again by itself.
    "UnknownError": Means.TRANSIENT,
    "InvalidConfiguration": Means.FINAL,  # of options of ours, by ClientConfiguration
    "Timeout": Means.TRANSIENT,  # no answer in time, or none but retryable ones (RetryableOperation)
    "LookupError": Means.LOOKUP,  # BinaryProtoLookupService: the lookup failed, or went round in circles
    "ConnectError": Means.TRANSIENT,  # ConnectionPool: nobody takes connections there at the moment
    "ReadError": Means.TRANSIENT,  # ClientConnection: the connection broke
    "AuthenticationError": Means.AUTHORITY,
    "AuthorizationError": Means.AUTHORITY,
    "ErrorGettingAuthenticationData": Means.AUTHORITY,  # of our side: Authentication gives none
    "BrokerMetadataError": Means.TRANSIENT,  # ServerMetadataException: the metadata store did not answer
    "BrokerPersistenceError": Means.TRANSIENT,  # PersistenceException: no ledger could be opened or written just now
    "ChecksumError": Means.FINAL,  # of a message whose bytes are not what was meant to be sent
    "ConsumerBusy": Means.TRANSIENT,  # ConsumerBusyException: our last one is not gone yet; no two share a name
    "NotConnected": Means.TRANSIENT,
    "AlreadyClosed": Means.TRANSIENT,  # of what was opened while its connection went; what we closed says so itself
    "InvalidMessage": Means.FINAL,  # of a call of ours
    "ConsumerNotInitialized": Means.FINAL,  # of a call of ours
    "ProducerNotInitialized": Means.FINAL,  # of a call of ours
    "ProducerBusy": Means.FENCED,  # AbstractTopic: an exclusive producer is there, so no shared one may be
    "TooManyLookupRequestException": Means.TRANSIENT,  # TooManyRequests: LookupRequestSemaphore is used up
    "InvalidTopicName": Means.FINAL,
    "InvalidUrl": Means.FINAL,
    "ServiceUnitNotReady": Means.LOOKUP,  # ServiceNotReady: "Please redo the lookup", a topic that is fenced or loading
    "OperationNotSupported": Means.FINAL,
    # A backlog quota is full until somebody reads or lifts it: the cluster's operator has to know.
    "ProducerBlockedQuotaExceededError": Means.FINAL,
    "ProducerBlockedQuotaExceededException": Means.FINAL,
    "ProducerQueueIsFull": Means.TRANSIENT,  # room comes with the next acknowledgement
    "MessageTooBig": Means.FINAL,
    "TopicNotFound": Means.FINAL,
    "SubscriptionNotFound": Means.FINAL,
    "ConsumerNotFound": Means.TRANSIENT,  # the broker has dropped a consumer that the library still believes in
    "UnsupportedVersionError": Means.FINAL,
    "TopicTerminated": Means.FINAL,
    "CryptoError": Means.FINAL,
    "IncompatibleSchema": Means.FINAL,
    "ConsumerAssignError": Means.FINAL,  # of subscriptions that share by key, which no reader has
    "CumulativeAcknowledgementNotAllowedError": Means.FINAL,
    "TransactionCoordinatorNotFoundError": Means.LOOKUP,  # Pulsar's own: its topic moves
    "InvalidTxnStatusError": Means.FINAL,
    "NotAllowedError": Means.FINAL,
    "TransactionConflict": Means.FINAL,
    "TransactionNotFound": Means.FINAL,
    "ProducerFenced": Means.FENCED,
    "MemoryBufferIsFull": Means.TRANSIENT,  # room comes with the next acknowledgement
    "Interrupted": Means.TRANSIENT,
}


def of_status(status: int, reason: str) -> Means:
    """What an answer of the REST interface means."""
    for rule in REST:
        if status in rule.statuses and re.search(rule.words, reason):
            return rule.means
    return Means.FINAL


def of_result(name: str) -> Means:
    """What a result of the client library means. One that a later version has may pass: who asks again is patient."""
    return RESULTS.get(name, Means.TRANSIENT)
