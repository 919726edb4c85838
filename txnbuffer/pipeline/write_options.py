"""The options of the sink `txnbuffer`, as text in and checked values out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from broker_io import is_cluster
from broker_io.port import check_topic_name
from txnbuffer.checks import MAX_NAME, check_name, check_number, check_timeout
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.options import CLUSTER_SETTINGS, broker_address, broker_options

TRANSACTION_TIMEOUT = 900.0
"""Seconds from the first task of a batch to its commit: what a service allows at most unless told otherwise."""

_KNOWN = (
    "broker", "topic", "name", "number", "transaction_timeout", "batching", "service", "tls_ca", "config",
)  # fmt: skip
SPARKS = frozenset({"path", "checkpointlocation", "queryname"})
"""Options that are Spark's own."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write. `topic` None: a column tells it. `naming` None: the query or the job has a name of its own.

    `service` and `tls_ca` as in `connect`, whose `broker_options` are those of `cluster`.
    """

    broker: str
    topic: str | None
    naming: tuple[str, int] | None
    timeout: float
    batching: Literal["messages", "records"]
    service: str | None
    tls_ca: str | None
    cluster: Mapping[str, Any] | None

    def producer(self, name: str) -> str:
        """The producer that a query or job of this name is: another one for each topic that all rows go to."""
        return _named(name, self.topic)

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """Raises InvalidRequest, InvalidAddress or InvalidTopicName that names the option."""
        given = {name.lower(): text for name, text in options.items() if name.lower() not in SPARKS}
        settings = {name: text for name, text in given.items() if name.startswith(CLUSTER_SETTINGS)}
        if strange := sorted(given.keys() - {*_KNOWN, *settings}):
            raise InvalidRequest(f"option {', '.join(strange)} is unknown: there are {', '.join(_KNOWN)}, pulsar.…")
        broker = broker_address(given.get("broker"))
        if broker.startswith("file:"):
            raise InvalidRequest(
                f"{broker} belongs to one process, and tasks are many: start `txnbuf serve {broker}`, and write to "
                f"txnbuf://HOST:PORT"
            )
        batching = given.get("batching", "messages")
        if batching not in ("messages", "records"):
            raise InvalidRequest(f"option batching is messages or records, not {batching!r}")
        if not is_cluster(broker) and (vain := sorted({"service", "config", *settings} & given.keys())):
            raise InvalidRequest(f"option {', '.join(vain)} is for clusters: {broker} is the service itself")
        topic = check_topic_name(given["topic"]) if "topic" in given else None
        return cls(
            broker=broker,
            topic=topic,
            naming=_naming(given.get("name"), given.get("number"), topic, streaming=streaming),
            timeout=_seconds("transaction_timeout", given.get("transaction_timeout")),
            batching="records" if batching == "records" else "messages",
            service=given.get("service"),
            tls_ca=given.get("tls_ca"),
            cluster=broker_options(broker, given.get("config"), settings) if is_cluster(broker) else None,
        )


def _named(name: str, topic: str | None) -> str:
    """A producer's name with its topic; where that is too long, with the topic's digest."""
    named = name if topic is None else f"{name}@{topic}"
    if topic is None or len(named.encode()) <= MAX_NAME:
        return named
    return f"{name}@{sha256(topic.encode()).hexdigest()[:32]}"


def _naming(name: str | None, number: str | None, topic: str | None, *, streaming: bool) -> tuple[str, int] | None:
    if name is None and number is None:
        return None
    if streaming:
        raise InvalidRequest("options name and number are for batch jobs: a streaming query is named by its checkpoint")
    if name is None or number is None:
        raise InvalidRequest("give both of the options name and number, or neither")
    if not (number.isascii() and number.isdigit()):
        raise InvalidRequest(f"option number is a whole number from 1 on, not {number!r}")
    check_name(_named(check_name(name, "option name: a producer"), topic), "option name: a producer, with its topic,")
    return name, check_number(int(number))


def _seconds(option: str, text: str | None) -> float:
    if text is None:
        return TRANSACTION_TIMEOUT
    try:
        return check_timeout(float(text)) or TRANSACTION_TIMEOUT
    except (ValueError, InvalidRequest):
        raise InvalidRequest(f"option {option} is a number of seconds above 0, not {text!r}") from None
