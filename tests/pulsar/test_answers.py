"""The meaning of answers of the REST interface and of results of the client library; requires no cluster."""

from __future__ import annotations

import _pulsar
import pulsar
import pytest

from broker_io.errors import ClusterRefused, Error, Fenced, NotAuthorized, ServiceUnavailable, TopicNotFound
from broker_io.pulsar.answers import RESULTS, AnswerKind, append_error, classify_result, classify_status, open_error

TOPIC = "persistent://public/default/orders"
BUNDLE = "public/default/0x80000000_0xc0000000"

ANSWERS = [
    # Texts of PulsarWebResource, NamespaceService and BrokerService of Pulsar 4.0 while a topic has no owner.
    (412, f"Can't find owner for topic {TOPIC}", AnswerKind.LOOKUP),
    (412, f"Failed to find ownership for topic:{TOPIC}", AnswerKind.LOOKUP),
    (412, f"Failed to find ownership for ServiceUnit:{BUNDLE}", AnswerKind.LOOKUP),
    (412, f"ServiceUnit bundle is actived. ServiceUnit {BUNDLE}", AnswerKind.LOOKUP),
    (412, "Namespace service is not ready for acquiring ownership", AnswerKind.LOOKUP),
    (
        412,
        f"Namespace bundle for topic ({TOPIC}) not served by this instance. Please redo the lookup.",
        AnswerKind.LOOKUP,
    ),
    (404, f"Namespace bundle {BUNDLE} is not currently owned", AnswerKind.LOOKUP),
    (404, f"Namespace bundle {BUNDLE} is being unloaded", AnswerKind.LOOKUP),
    (404, f"Bundle {BUNDLE} not owned by this broker", AnswerKind.LOOKUP),
    (409, f"Namespace bundle for topic ({TOPIC}) not served by this instance:b:8080", AnswerKind.LOOKUP),
    (409, "Topic don't owner by this broker!", AnswerKind.LOOKUP),
    (307, "", AnswerKind.LOOKUP),
    (412, "Failed for Subscription Busy: Subscription is fenced", AnswerKind.TRANSIENT),
    (409, "Concurrent modification", AnswerKind.TRANSIENT),
    (408, "", AnswerKind.TRANSIENT),
    (425, "", AnswerKind.TRANSIENT),
    (429, "Too Many Requests", AnswerKind.TRANSIENT),
    (500, f"Finding owner for ServiceUnit {BUNDLE} timed out", AnswerKind.TRANSIENT),
    (500, "<html>Error</html>", AnswerKind.TRANSIENT),
    (502, "", AnswerKind.TRANSIENT),
    (503, "PulsarService is not ready.", AnswerKind.TRANSIENT),
    (504, "", AnswerKind.TRANSIENT),
    (507, "", AnswerKind.TRANSIENT),
    (200, "", AnswerKind.DONE),
    (204, "", AnswerKind.DONE),
    (401, f"Can't find owner for topic {TOPIC}", AnswerKind.UNAUTHORIZED),
    (403, "Unauthorized to validateTopicOperation", AnswerKind.UNAUTHORIZED),
    (400, "", AnswerKind.FINAL),
    (404, f"Topic {TOPIC} not found", AnswerKind.FINAL),
    (404, "Namespace does not exist", AnswerKind.FINAL),
    (404, "Subscription not found", AnswerKind.FINAL),
    (405, "Method Not Allowed", AnswerKind.FINAL),
    (409, "This topic already exists", AnswerKind.FINAL),
    (409, "Subscription already exists for topic", AnswerKind.FINAL),
    (409, "Compaction already in progress", AnswerKind.FINAL),
    (412, "Topic has active producers/subscriptions", AnswerKind.FINAL),
    (412, "Topic name is not valid", AnswerKind.FINAL),
    (412, f"ServiceUnit format is not expected. ServiceUnit {BUNDLE}", AnswerKind.FINAL),
    (412, "Unable to find position for position specified: 3:0", AnswerKind.FINAL),
    (412, "Namespace does not have any clusters configured : local_cluster=a ns=b", AnswerKind.FINAL),
    (422, "", AnswerKind.FINAL),
    (501, "", AnswerKind.FINAL),
    (505, "", AnswerKind.FINAL),
    (999, "", AnswerKind.FINAL),
]

RESULT_MEANS = {
    AnswerKind.DONE: "Ok",
    AnswerKind.FENCED: "ProducerBusy ProducerFenced",
    AnswerKind.UNAUTHORIZED: "AuthenticationError AuthorizationError ErrorGettingAuthenticationData",
    AnswerKind.LOOKUP: "LookupError ServiceUnitNotReady TransactionCoordinatorNotFoundError",
    AnswerKind.TRANSIENT: "UnknownError Timeout ConnectError ReadError BrokerMetadataError BrokerPersistenceError "
    "ConsumerBusy NotConnected AlreadyClosed TooManyLookupRequestException ProducerQueueIsFull ConsumerNotFound "
    "MemoryBufferIsFull Interrupted",
    AnswerKind.FINAL: "InvalidConfiguration ChecksumError InvalidMessage ConsumerNotInitialized ProducerNotInitialized "
    "InvalidTopicName InvalidUrl OperationNotSupported ProducerBlockedQuotaExceededError "
    "ProducerBlockedQuotaExceededException MessageTooBig TopicNotFound SubscriptionNotFound UnsupportedVersionError "
    "TopicTerminated CryptoError IncompatibleSchema ConsumerAssignError "
    "CumulativeAcknowledgementNotAllowedError InvalidTxnStatusError NotAllowedError TransactionConflict "
    "TransactionNotFound",
}


@pytest.mark.parametrize(("status", "reason", "means"), ANSWERS, ids=lambda value: str(value)[:40])
def test_meaning_of_answers_of_the_rest_interface(status: int, reason: str, means: AnswerKind) -> None:
    assert classify_status(status, reason) is means


def test_every_result_of_the_client_library_has_one_meaning() -> None:
    for means, names in RESULT_MEANS.items():
        for name in names.split():
            assert (name, classify_result(name)) == (name, means)
    assert RESULTS.keys() == {name for names in RESULT_MEANS.values() for name in names.split()}


def test_the_table_has_every_result_of_the_installed_library() -> None:
    exceptions = {
        name
        for name, found in vars(pulsar).items()
        if isinstance(found, type) and issubclass(found, pulsar.PulsarException) and found is not pulsar.PulsarException
    }
    assert len(exceptions) > 40
    assert {*_pulsar.Result.__members__} | exceptions == RESULTS.keys()


def test_unknown_result_is_retried() -> None:
    assert classify_result("Retryable").passes


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - {"Ok"}))
def test_errors_of_open_and_append_follow_the_table(name: str) -> None:
    error = open_error(getattr(pulsar, name)("why"), "orders", "reader")
    means = RESULTS[name]
    kinds: dict[AnswerKind, type[Error]] = {AnswerKind.FENCED: Fenced, AnswerKind.UNAUTHORIZED: NotAuthorized}
    kind = kinds.get(means, ServiceUnavailable if means.passes else Error)
    assert isinstance(error, kind)
    assert error.retryable == means.passes
    assert "'orders'" in str(error)
    appending = append_error(name, "orders")
    assert isinstance(appending, kinds.get(means, Error))
    assert appending.retryable == (means not in kinds)


def test_final_error_names_its_cause() -> None:
    assert isinstance(open_error(pulsar.TopicNotFound("gone"), "orders", "reader"), TopicNotFound)
    refused = open_error(pulsar.TopicTerminated("ended"), "orders", "writer")
    assert isinstance(refused, ClusterRefused)
    assert "ended" in str(refused)
