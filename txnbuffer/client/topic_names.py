"""Names of topics that an application gives"""

from __future__ import annotations

from collections.abc import Iterable

from broker_io.errors import InvalidTopicName
from broker_io.port import check_topic_name
from snapshots.format import INTERNAL_PREFIX, is_internal
from txnbuffer.errors import InvalidRequest


def check_topic(name: object) -> str:
    """Return the name of a topic. Raises InvalidTopicName, also for a full name of Pulsar."""
    topic = check_topic_name(name)
    if "://" in topic:
        short = topic.rpartition("/")[2] or "NAME"
        raise InvalidTopicName(
            f"{topic!r} is a full name: write {short!r}, the name within the namespace of the client's address"
        )
    return topic


def check_target(topic: object) -> str:
    """Return the name of a topic to send to. Raises InvalidTopicName, also for an internal topic."""
    name = check_topic(topic)
    if is_internal(name):
        raise InvalidTopicName(f"topic {name!r} is internal: use a name that does not begin with {INTERNAL_PREFIX}")
    return name


def check_source(topic: object) -> str:
    """Return the name of a topic that a group reads. Raises InvalidTopicName, also for an internal topic."""
    name = check_topic(topic)
    if is_internal(name):
        raise InvalidTopicName(f"{name!r} is an internal topic: a group can only read topics of records")
    return name


def check_topics(topics: object) -> list[str]:
    """Return the distinct names of the topics to read. Raises InvalidRequest and InvalidTopicName."""
    names = [topics] if isinstance(topics, str) else [*topics] if isinstance(topics, Iterable) else [topics]
    if not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"topics must be a name or a list of names, got {topics!s:.80}")
    if not names:
        raise InvalidRequest("topics is empty: name at least one topic to read")
    return list(dict.fromkeys(map(check_topic, names)))
