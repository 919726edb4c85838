"""Options of the data source and of the sink `txnbuffer`: parsing and checks"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypeAlias, cast

from broker_io import PulsarOptions, check_address, is_cluster
from broker_io.partitions import partition_name, partition_of, whole_name
from broker_io.port import check_topic_name
from snapshots.format import is_internal
from txnbuffer.checks import MAX_NAME, check_name, check_number, check_position, check_timeout
from txnbuffer.config import load
from txnbuffer.errors import InvalidRequest
from txnbuffer.model import Position
from txnbuffer.rpc.service_access import ServiceAccess, broker_options_of

READ_COMMITTED, READ_UNCOMMITTED = "read_committed", "read_uncommitted"
SKIP_LOST = "set fail_on_data_loss=false (for txnbuf pipeline export: --skip-lost)"
"""How errors about lost records say that a reader may continue without them."""
BEGINNING, END = "beginning", "end"

COLUMNS = ("topic", "position", "seqno", "key", "value", "properties", "txn", "event_time", "publish_time")
OUTCOME = "outcome"
LATEST_BY = ("topic", "key", "position")
"""Columns required to find the latest record of a key."""

CLUSTER_SETTINGS = "pulsar."
"""Prefix of options that are settings of this section of the configuration."""

PARTITION_BYTES = 128 * 1024 * 1024
"""Spark's default for files. A task reads this in about half a second and starts within a few hundredths of one."""

A_TIME = "2026-01-31T12:00:00+00:00"

StartOrEnd: TypeAlias = "Position | datetime | str"
"""A position, a time, "beginning" or "end"."""

_READ_OPTIONS = (
    "broker", "topics", "pattern", "isolation", "include_aborted", "start", "end", "columns", "partition_bytes",
    "max_messages_per_trigger", "fail_on_data_loss", "latest", "tls_ca", "tls_cert", "tls_key", "token_file", "config",
    "profile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read. `start` and `end` map topics to places; the key "" is for all others.

    `broker_options` are those of `open_broker`. `topics` is empty if `pattern` is given, which must match the whole
    name. `max_messages` limits the messages of the log read in one micro-batch; None: no limit. With `latest`, each
    task drops records without a key and those that a later record of the same task supersedes.
    """

    broker: str
    broker_options: Mapping[str, Any] = field(repr=False)  # may have a token
    topics: tuple[str, ...]
    pattern: str | None
    isolation: str
    include_aborted: bool
    start: Mapping[str, StartOrEnd]
    end: Mapping[str, StartOrEnd]
    columns: tuple[str, ...]
    partition_bytes: int
    max_messages: int | None
    fail_on_data_loss: bool
    latest: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ReadOptions:
        """The parsed options. Raises InvalidRequest, InvalidAddress, InvalidConfiguration."""
        given, settings = _known(options, "topics", _READ_OPTIONS)
        broker = broker_address(given.get("broker"))
        if not is_cluster(broker) and (unused := sorted({"config", "profile", *settings} & given.keys())):
            raise InvalidRequest(
                f"option {', '.join(unused)} is for clusters, and broker is {broker}: leave the option out"
            )
        topics, pattern = _topics(given.get("topics")), given.get("pattern") or None
        if given.get("topics") and not topics:
            raise InvalidRequest("option topics is empty: name a topic, or use the option pattern instead")
        if bool(topics) == bool(pattern):
            raise InvalidRequest("give exactly one of the options topics and pattern")
        aborted = _flag("include_aborted", given.get("include_aborted", "false"))
        columns = _columns(given.get("columns"), aborted=aborted)
        isolation = given.get("isolation", READ_COMMITTED)
        if isolation not in (READ_COMMITTED, READ_UNCOMMITTED):
            raise InvalidRequest(f"option isolation must be {READ_COMMITTED} or {READ_UNCOMMITTED}, got {isolation!r}")
        if aborted and isolation != READ_COMMITTED:
            raise InvalidRequest(f"option include_aborted requires isolation {READ_COMMITTED}, got {isolation}")
        return cls(
            broker=broker,
            broker_options=_of_service(broker, given) or broker_options(broker, given, settings),
            topics=topics,
            pattern=_pattern(pattern),
            isolation=isolation,
            include_aborted=aborted,
            start=_places("start", given.get("start", BEGINNING), BEGINNING),
            end=_places("end", given.get("end", END), END),
            columns=columns,
            partition_bytes=_number("partition_bytes", given.get("partition_bytes", str(PARTITION_BYTES))),
            max_messages=_number("max_messages_per_trigger", given["max_messages_per_trigger"])
            if "max_messages_per_trigger" in given
            else None,
            fail_on_data_loss=_flag("fail_on_data_loss", given.get("fail_on_data_loss", "true")),
            latest=_latest(given.get("latest", "false"), columns, aborted=aborted),
        )

    def chosen(self, known: Sequence[str]) -> list[str]:
        """The topics to read out of `known`, those of a broker. A pattern never matches internal topics.

        The name of a partitioned topic is replaced by the names of its partitions.
        """
        if self.pattern is not None:
            matches = re.compile(self.pattern).fullmatch
            return [name for name in known if not is_internal(name) and (matches(name) or matches(whole_name(name)))]
        existing = set(known)
        if existing.issuperset(self.topics):
            return list(self.topics)
        parts = [found for found in map(partition_of, known) if found is not None]
        names: list[str] = []
        for topic in self.topics:
            numbers = [] if topic in existing else sorted(part.number for part in parts if part.topic == topic)
            names += [partition_name(topic, number) for number in numbers] or [topic]
        return list(dict.fromkeys(names))

    def start_of(self, topic: str) -> StartOrEnd:
        return _of_topic(self.start, topic, BEGINNING)

    def end_of(self, topic: str) -> StartOrEnd:
        return _of_topic(self.end, topic, END)


def _of_topic(places: Mapping[str, StartOrEnd], topic: str, default: StartOrEnd) -> StartOrEnd:
    """The place of a topic, else that of its partitioned topic, else that of all others, else the default."""
    return next((places[name] for name in (topic, whole_name(topic), "") if name in places), default)


def broker_options(broker: str, given: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, Any]:
    """Options of `open_broker` for a cluster, from a configuration file, the environment and settings `pulsar.…`."""
    if not is_cluster(broker):
        return {}
    flags = [f"{name}={text}" for name, text in settings.items()]
    profile = given.get("profile")
    return load(given.get("config"), os.environ, flags, option="option", profile=profile).config.pulsar.options()


def _known(
    options: Mapping[str, str], topic_option: str, names: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The options by names in lower case, which are `names`, and those of them that are settings of a cluster.

    The argument of `load` or `save`, their `path`, sets `topic_option`. Raises InvalidRequest.
    """
    given = {name.lower(): text for name, text in options.items()}
    for name in ("path", "paths"):
        path = given.pop(name, None)
        if path is not None and given.setdefault(topic_option, path) != path:
            raise InvalidRequest(
                f"the path is {path} and option {topic_option} is {given[topic_option]}: name the topic in one of them"
            )
    settings = {name: text for name, text in given.items() if name.startswith(CLUSTER_SETTINGS)}
    if strange := sorted(given.keys() - {*names, *settings}):
        raise InvalidRequest(f"unknown option {', '.join(strange)}: use {', '.join(names)}, pulsar.…")
    return given, settings


def _of_service(broker: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The content of the files of `access_of`; tasks get the content, so that only the planner needs the files."""
    named = sorted(set(OF_ACCESS) & given.keys())
    if named and not broker.startswith("txnbuf:"):
        raise InvalidRequest(
            f"option {', '.join(named)} is for services at txnbuf://HOST:PORT, and broker is {broker}: use options of "
            "its own, such as pulsar.tls_trust, for a cluster"
        )
    options = broker_options_of(access_of(given).load())
    token = options.get("token")
    return options | ({"token": token()} if callable(token) else {})


OF_ACCESS = ("tls_ca", "tls_cert", "tls_key", "token_file")
"""Options with the paths of files for the connection to a service."""


def access_of(given: Mapping[str, str]) -> ServiceAccess:
    """How to connect to the service of a query. Raises InvalidRequest."""
    ca, certificate, key, token_file = map(given.get, OF_ACCESS)
    access = ServiceAccess(ca, certificate, key, token_file=token_file)
    access.check()
    return access


def broker_address(text: str | None) -> str:
    """The value of the option broker, checked. Raises InvalidRequest or InvalidAddress."""
    if not text:
        raise InvalidRequest("option broker is missing: give the address, such as file:DIR or pulsar://HOST:PORT")
    check_address(text)
    if text.startswith("memory:"):
        raise InvalidRequest(
            f"option broker can't be {text}, which only one process can use: use file:DIR or a cluster"
        )
    return text


def _topics(text: str | None) -> tuple[str, ...]:
    """Names separated by commas, or a JSON list, which allows names with commas."""
    if text is None:
        return ()
    if not text.startswith("["):
        return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    names = _json("topics", text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"option topics must be a list of names, got {text}")
    return tuple(dict.fromkeys(names))


def _path(text: str) -> str:
    """The topic that the argument of `save` or `start` names as that of `load` does. Raises InvalidRequest."""
    names = _topics(text)
    if len(names) != 1:
        raise InvalidRequest(
            f"the path {text} names {len(names)} topics, and a sink writes to one: for a name with a comma use the "
            f"option topic, for several topics the column topic"
        )
    return names[0]


def _pattern(text: str | None) -> str | None:
    try:
        return None if text is None else re.compile(text).pattern
    except re.error as error:
        raise InvalidRequest(f"option pattern must be a regular expression, got {text} ({error})") from None


def _places(option: str, text: str, default: str) -> dict[str, StartOrEnd]:
    """One place for all topics, or a JSON object of places by topic."""
    if not text.startswith("{"):
        return {"": _place(option, text)}
    found = _json(option, text)
    if not isinstance(found, dict) or not all(isinstance(place, str) for place in found.values()):
        raise InvalidRequest(f"option {option} must be a JSON object of places by topic, got {text}")
    return {"": default, **{topic: _place(option, place) for topic, place in found.items()}}


def _place(option: str, text: str) -> StartOrEnd:
    if text in (BEGINNING, END):
        return text
    with suppress(ValueError):
        return check_position(Position.parse(text), f"option {option}")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"option {option} can't be {text!r}: use a position LEDGER:ENTRY, a date and time such as {A_TIME}, "
            f"{BEGINNING} or {END}"
        ) from None


def _columns(text: str | None, *, aborted: bool) -> tuple[str, ...]:
    known = (*COLUMNS, OUTCOME) if aborted else COLUMNS
    if text is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    strange = [name for name in names if name not in known]
    if strange == [OUTCOME]:
        raise InvalidRequest("column outcome requires the option include_aborted")
    if strange or not names:
        raise InvalidRequest(
            f"option columns has {', '.join(strange) or 'no column'}: use one or more of {', '.join(known)}"
        )
    return names


def _latest(text: str, columns: tuple[str, ...], *, aborted: bool) -> bool:
    wanted = _flag("latest", text)
    if wanted and aborted:
        raise InvalidRequest("option latest reads visible records only: leave include_aborted out")
    if wanted and (missing := [name for name in LATEST_BY if name not in columns]):
        raise InvalidRequest(f"option latest also requires the columns {', '.join(missing)}")
    return wanted


def _flag(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidRequest(f"option {option} must be true or false, got {text!r}")
    return text.lower() == "true"


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise InvalidRequest(f"option {option} must be a whole number above 0, got {text!r}")
    return int(text)


def _json(option: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"option {option} must be JSON, got {text} ({error})") from None


TRANSACTION_TIMEOUT = 900.0
"""Seconds from the first task of a batch to its commit; the default maximum of a service."""

_WRITE_OPTIONS = (
    "broker", "topic", "name", "number", "transaction_timeout", "batching", "service", "tls_ca", "tls_cert", "tls_key",
    "token_file", "config", "profile",
)  # fmt: skip
SPARKS = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark, in lower case."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write. `topic` None: each row has it in a column. `producer_number` None: the name is generated.

    `producer_number` is the producer name and the number of a batch job; `timeout` is in seconds. `service` and
    `access` are as in `connect`; `cluster` is its `broker_options`.
    """

    broker: str
    topic: str | None
    producer_number: tuple[str, int] | None
    timeout: float
    batching: Literal["messages", "records"]
    service: str | None
    access: ServiceAccess
    cluster: PulsarOptions | None = field(repr=False)  # may have a token

    def producer(self, name: str) -> str:
        """The producer name of a query or job: its name, with the option `topic` if given."""
        return _named(name, self.topic)

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        """The parsed options. Raises InvalidRequest, InvalidAddress, InvalidTopicName."""
        own = {
            name: _path(text) if name.lower() == "path" else text
            for name, text in options.items()
            if name.lower() not in SPARKS
        }
        given, settings = _known(own, "topic", _WRITE_OPTIONS)
        broker = broker_address(given.get("broker"))
        if broker.startswith("file:"):
            raise InvalidRequest(
                f"only one process can write to {broker}: start `txnbuf serve {broker}`, and write to "
                f"txnbuf://HOST:PORT"
            )
        batching = given.get("batching", "messages")
        if batching not in ("messages", "records"):
            raise InvalidRequest(f"option batching must be messages or records, got {batching!r}")
        if not is_cluster(broker) and (unused := sorted({"service", "config", "profile", *settings} & given.keys())):
            raise InvalidRequest(
                f"option {', '.join(unused)} is for clusters, and broker is the service {broker}: leave the option out"
            )
        topic = check_topic_name(given["topic"]) if "topic" in given else None
        return cls(
            broker=broker,
            topic=topic,
            producer_number=_producer_number(given.get("name"), given.get("number"), topic, streaming=streaming),
            timeout=_seconds("transaction_timeout", given.get("transaction_timeout")),
            batching="records" if batching == "records" else "messages",
            service=given.get("service"),
            access=access_of(given),
            cluster=cast("PulsarOptions", broker_options(broker, given, settings)) if is_cluster(broker) else None,
        )


def _named(name: str, topic: str | None) -> str:
    """A producer name with its topic; if that is too long, with the topic's digest."""
    named = name if topic is None else f"{name}@{topic}"
    if topic is None or len(named.encode()) <= MAX_NAME:
        return named
    return f"{name}@{sha256(topic.encode()).hexdigest()[:32]}"


def _producer_number(
    name: str | None, number: str | None, topic: str | None, *, streaming: bool
) -> tuple[str, int] | None:
    if name is None and number is None:
        return None
    if streaming:
        raise InvalidRequest(
            "options name and number are for batch jobs: leave them out, the checkpoint identifies a streaming query"
        )
    if name is None or number is None:
        raise InvalidRequest("give both of the options name and number, or neither")
    if not (number.isascii() and number.isdigit()):
        raise InvalidRequest(f"option number must be a whole number above 0, got {number!r}")
    check_name(_named(check_name(name, "option name: a producer"), topic), "option name: a producer, with its topic,")
    return name, check_number(int(number))


def _seconds(option: str, text: str | None) -> float:
    if text is None:
        return TRANSACTION_TIMEOUT
    try:
        return check_timeout(float(text)) or TRANSACTION_TIMEOUT
    except (ValueError, InvalidRequest):
        raise InvalidRequest(f"option {option} must be a number of seconds above 0, got {text!r}") from None


def reading_options(
    address: str, topics: tuple[str, ...] = (), pattern: str | None = None, settings: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Options of the data source for these topics, those that match, or all. Raises as `ReadOptions.of`."""
    options = {"broker": address, **(settings or {})}
    if topics:
        options["topics"] = json.dumps([*topics])
    if pattern is not None or not topics:
        options["pattern"] = ".*" if pattern is None else pattern
    ReadOptions.of(options)
    return options
