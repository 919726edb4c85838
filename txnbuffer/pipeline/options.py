"""Options of the data source and of the sink `txnbuffer`: parsing and checks"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from broker_io import check_address, is_cluster
from broker_io.partitions import partition_name, partition_of, whole_name
from broker_io.port import check_topic_name
from snapshots.keys import is_internal
from txnbuffer.checks import MAX_NAME, check_name, check_number, check_timeout
from txnbuffer.config import load_config
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import EARLIEST, Position
from txnbuffer.rpc.discovery import read_ca_file

READ_COMMITTED, READ_UNCOMMITTED = "read_committed", "read_uncommitted"
BEGINNING, END = "beginning", "end"

COLUMNS = ("topic", "position", "seqno", "key", "value", "properties", "txn", "event_time", "publish_time")
OUTCOME = "outcome"
LATEST_BY = ("topic", "key", "position")
"""What tells the latest record of a key."""

CLUSTER_SETTINGS = "pulsar."
"""Options that begin so are settings of that section of the configuration."""

PARTITION_BYTES = 128 * 1024 * 1024
"""As Spark has it for files: a task has this much read in half a second, and takes some hundredths to start."""

A_TIME = "2026-01-31T12:00:00+00:00"

Place: TypeAlias = "Position | datetime | str"
"""A position, a time, "beginning" or "end"."""

_READ_OPTIONS = (
    "broker", "topics", "pattern", "isolation", "include_aborted", "start", "end", "columns", "partition_bytes",
    "max_messages_per_trigger", "fail_on_data_loss", "latest", "tls_ca", "config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read. `start` and `end` hold a place by topic, under "" for all others.

    `broker_options` are those of `open_broker`. `topics` is empty where `pattern` chooses, which is to match the
    whole name. `max_messages`: of the log, in one micro-batch; None: no limit. `latest`: tasks leave out what has
    no key, and as far as they see both what a later record of the same key supersedes.
    """

    broker: str
    broker_options: Mapping[str, Any]
    topics: tuple[str, ...]
    pattern: str | None
    isolation: str
    include_aborted: bool
    start: Mapping[str, Place]
    end: Mapping[str, Place]
    columns: tuple[str, ...]
    partition_bytes: int
    max_messages: int | None
    fail_on_data_loss: bool
    latest: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """Raises InvalidRequest, InvalidAddress or InvalidConfiguration that names the option or its file."""
        given = {name.lower(): text for name, text in options.items()}
        settings = {name: text for name, text in given.items() if name.startswith(CLUSTER_SETTINGS)}
        if strange := sorted(given.keys() - {*_READ_OPTIONS, *settings}):
            raise InvalidRequest(
                f"option {', '.join(strange)} is unknown: there are {', '.join(_READ_OPTIONS)}, pulsar.…"
            )
        broker = broker_address(given.get("broker"))
        if not is_cluster(broker) and (vain := sorted({"config", *settings} & given.keys())):
            raise InvalidRequest(f"option {', '.join(vain)} is for clusters, and {broker} is none")
        topics, pattern = _topics(given.get("topics")), given.get("pattern") or None
        if given.get("topics") and not topics:
            raise InvalidRequest("option topics names none: name one, or leave the option out for pattern")
        if bool(topics) == bool(pattern):
            raise InvalidRequest("say what to read by one of the options topics and pattern")
        aborted = _flag("include_aborted", given.get("include_aborted", "false"))
        isolation = given.get("isolation", READ_COMMITTED)
        if isolation not in (READ_COMMITTED, READ_UNCOMMITTED):
            raise InvalidRequest(f"isolation {isolation!r} is none of {READ_COMMITTED}, {READ_UNCOMMITTED}")
        if aborted and isolation != READ_COMMITTED:
            raise InvalidRequest("include_aborted tells outcomes, which only isolation read_committed knows")
        return cls(
            broker=broker,
            broker_options=_trusting(broker, given.get("tls_ca"))
            or broker_options(broker, given.get("config"), settings),
            topics=topics,
            pattern=_pattern(pattern),
            isolation=isolation,
            include_aborted=aborted,
            start=_places("start", given.get("start", BEGINNING), BEGINNING),
            end=_places("end", given.get("end", END), END),
            columns=_columns(given.get("columns"), aborted=aborted),
            partition_bytes=_number("partition_bytes", given.get("partition_bytes", str(PARTITION_BYTES))),
            max_messages=_number("max_messages_per_trigger", given["max_messages_per_trigger"])
            if "max_messages_per_trigger" in given
            else None,
            fail_on_data_loss=_flag("fail_on_data_loss", given.get("fail_on_data_loss", "true")),
            latest=_latest(
                given.get("latest", "false"), _columns(given.get("columns"), aborted=aborted), aborted=aborted
            ),
        )

    def chosen(self, known: Sequence[str]) -> list[str]:
        """The topics to read, of those that a broker has. A pattern matches none of our own.

        The name of a topic with partitions stands for those that there are.
        """
        if self.pattern is not None:
            return [name for name in known if not is_internal(name) and self._matches(name)]
        there = set(known)
        if there.issuperset(self.topics):
            return list(self.topics)
        parts = [found for found in map(partition_of, known) if found is not None]
        names: list[str] = []
        for topic in self.topics:
            numbers = [] if topic in there else sorted(part.number for part in parts if part.topic == topic)
            names += [partition_name(topic, number) for number in numbers] or [topic]
        return list(dict.fromkeys(names))

    def _matches(self, name: str) -> bool:
        return any(re.fullmatch(self.pattern or "", text) for text in {name, whole_name(name)})

    def start_of(self, topic: str) -> Place:
        return _of_topic(self.start, topic, BEGINNING)

    def end_of(self, topic: str) -> Place:
        return _of_topic(self.end, topic, END)


def _of_topic(places: Mapping[str, Place], topic: str, default: Place) -> Place:
    """The place of a topic, else that of the topic which it is a partition of, else that of all others."""
    return next((places[name] for name in (topic, whole_name(topic), "") if name in places), default)


def broker_options(broker: str, path: str | None, settings: Mapping[str, str]) -> dict[str, Any]:
    """What opening a cluster takes, by a configuration file, the environment and settings `pulsar.…`."""
    if not is_cluster(broker):
        return {}
    flags = [f"{name}={text}" for name, text in settings.items()]
    return load_config(path, os.environ, flags, option="option").pulsar.options()


def _trusting(broker: str, path: str | None) -> dict[str, Any]:
    """What is in the file is what tasks get: it has to be where the query is planned only."""
    if path is None:
        return {}
    if not broker.startswith("txnbuf:"):
        raise InvalidRequest("option tls_ca is for services at txnbuf://HOST:PORT: a cluster has pulsar.tls_trust")
    return {"root_certificates": read_ca_file(path)}


def broker_address(text: str | None) -> str:
    """Raises InvalidRequest or InvalidAddress."""
    if not text:
        raise InvalidRequest("option broker is missing: give the address, such as file:DIR or pulsar://HOST:PORT")
    check_address(text)
    if text.startswith("memory:"):
        raise InvalidRequest(f"{text} lives in one process, and tasks run in others: use a log in files or a cluster")
    return text


def _topics(text: str | None) -> tuple[str, ...]:
    """Names with commas between them, or as a JSON list, which any name can stand in."""
    if text is None:
        return ()
    if not text.startswith("["):
        return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    names = _json("topics", text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"option topics is no list of names: {text}")
    return tuple(dict.fromkeys(names))


def _pattern(text: str | None) -> str | None:
    try:
        return None if text is None else re.compile(text).pattern
    except re.error as error:
        raise InvalidRequest(f"option pattern is no regular expression ({error}): {text}") from None


def _places(option: str, text: str, default: str) -> dict[str, Place]:
    """One place for all topics, or a JSON object of places by topic."""
    if not text.startswith("{"):
        return {"": _place(option, text)}
    found = _json(option, text)
    if not isinstance(found, dict) or not all(isinstance(place, str) for place in found.values()):
        raise InvalidRequest(f"option {option} is no object of places by topic: {text}")
    return {"": default, **{topic: _place(option, place) for topic, place in found.items()}}


def _place(option: str, text: str) -> Place:
    if text in (BEGINNING, END):
        return text
    if (position := _position(text)) is not None:
        if position != EARLIEST and not (min(*position[:2], position.batch + 1) >= 0 and max(position) < 2**63):
            raise InvalidRequest(f"option {option} can't be {text!r}: there is no such ledger or entry")
        return position
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"option {option} can't be {text!r}: give a position as ledger:entry, a time with its date such as "
            f"{A_TIME}, {BEGINNING} or {END}"
        ) from None


def _position(text: str) -> Position | None:
    try:
        return Position.parse(text)
    except ValueError:
        return None


def _columns(text: str | None, *, aborted: bool) -> tuple[str, ...]:
    known = (*COLUMNS, OUTCOME) if aborted else COLUMNS
    if text is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    strange = [name for name in names if name not in known]
    if strange == [OUTCOME]:
        raise InvalidRequest("column outcome is there with option include_aborted only")
    if strange or not names:
        raise InvalidRequest(f"option columns names {', '.join(strange) or 'none'}: there are {', '.join(known)}")
    return names


def _latest(text: str, columns: tuple[str, ...], *, aborted: bool) -> bool:
    wanted = _flag("latest", text)
    if wanted and aborted:
        raise InvalidRequest("option latest is about visible records: leave include_aborted out")
    if wanted and (missing := [name for name in LATEST_BY if name not in columns]):
        raise InvalidRequest(f"option latest needs the columns {', '.join(missing)} too")
    return wanted


def _flag(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidRequest(f"option {option} is true or false, not {text!r}")
    return text.lower() == "true"


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise InvalidRequest(f"option {option} is a whole number above 0, not {text!r}")
    return int(text)


def _json(option: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"option {option} is no JSON ({error}): {text}") from None


TRANSACTION_TIMEOUT = 900.0
"""Seconds from the first task of a batch to its commit: what a service allows at most unless told otherwise."""

_WRITE_OPTIONS = (
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
        if strange := sorted(given.keys() - {*_WRITE_OPTIONS, *settings}):
            raise InvalidRequest(
                f"option {', '.join(strange)} is unknown: there are {', '.join(_WRITE_OPTIONS)}, pulsar.…"
            )
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
