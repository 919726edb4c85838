"""What the client library fails with, as errors of the one tree."""

from __future__ import annotations

import pulsar

from broker_io.errors import (
    AppendUnknown,
    ClusterRefused,
    EntryTooLarge,
    Error,
    Fenced,
    MessageTooLarge,
    NotAuthorized,
    NotOffered,
    ServiceUnavailable,
    TopicNotFound,
)
from broker_io.pulsar.answers import Means, of_result


def of_opening(error: pulsar.PulsarException, topic: str, what: str) -> Error:
    """Why a reader or a writer of a topic could not be opened."""
    name = type(error).__name__
    means = of_result(name)
    if means is Means.FENCED:
        return Fenced(f"topic {topic!r} is held by an exclusive writer ({name}): wait until it closes")
    if means is Means.AUTHORITY:
        return NotAuthorized(f"these credentials may not open a {what} of topic {topic!r} ({error})")
    if name == "TopicNotFound":
        return TopicNotFound(f"there is no topic {topic!r}: create it first")
    if name == "IncompatibleSchema":
        return NotOffered(
            f"the cluster does not take the schema of what is written to topic {topic!r} ({error}). Where it was told "
            "none: it wants each message to name one, which markers can't, so run "
            "`pulsar-admin namespaces set-schema-validation-enforce --disable NAMESPACE`; else give the topic's own"
        )
    if means.passes:
        return ServiceUnavailable(f"the cluster opens no {what} of topic {topic!r} ({error}): is it running?")
    return ClusterRefused(f"the cluster opens no {what} of topic {topic!r} ({error})", 0, str(error))


def of_append(result: str, topic: str) -> Error:
    """Why an append failed; whether it stands in the log is unknown."""
    means = of_result(result)
    if means is Means.FENCED:
        return Fenced(
            f"the cluster let go of the exclusive writer of topic {topic!r} ({result}), as it does when another one "
            "opens it, or when its storage is lost: what was under way may stand in the log"
        )
    if means is Means.AUTHORITY:
        return NotAuthorized(f"these credentials may not write to topic {topic!r} ({result})")
    return AppendUnknown(
        f"an append to topic {topic!r} failed ({result}): it may stand in the log or not; open another writer"
    )


def too_large(topic: str) -> Error:
    """Why an append of one message failed that stands nowhere."""
    return MessageTooLarge(
        f"the cluster refuses a message of topic {topic!r} as too large: lower max_message_bytes to its limit"
    )


def behind_too_large(topic: str) -> Error:
    """Why all other appends of a writer fail where the cluster refused a message of one as too large."""
    return EntryTooLarge(
        f"the cluster refused an entry of topic {topic!r} as too large, and whatever else was under way may stand in "
        "the log or not: lower max_message_bytes to the cluster's limit, and open another writer"
    )
