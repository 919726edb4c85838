"""Readers of a cluster with transient failures of the client library or of requests; requires no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker_io.batch import PlacedBatch
from broker_io.environment import current
from broker_io.errors import Closed, Error, ServiceUnavailable, TopicNotFound
from broker_io.position import EARLIEST, Position
from broker_io.pulsar import reader as reader_module
from broker_io.pulsar.reader import BATCH_SIZE, PulsarReader, place_of
from broker_io.varint import encode_varint

AWAY = ServiceUnavailable("the topic moves")
STATE = {
    "ledgers": [{"ledgerId": 1, "entries": 3, "size": 30}, {"ledgerId": 2, "entries": 0, "size": 0}],
    "currentLedgerEntries": 2,
    "currentLedgerSize": 20,
    "lastConfirmedEntry": "2:1",
    "cursors": {},
}


class Id:
    def __init__(self, place: Position, size: int) -> None:
        self._place = place
        self._size = size

    def ledger_id(self) -> int:
        return self._place.ledger

    def entry_id(self) -> int:
        return self._place.entry

    def batch_index(self) -> int:
        return self._place.batch

    def serialize(self) -> bytes:
        return BATCH_SIZE + encode_varint(self._size)


class Received:
    """A message as the client library returns it."""

    def __init__(self, ledger: int, entry: int, batch: int = -1, size: int = 0) -> None:
        self._place = Position(ledger, entry, batch)
        self._size = size

    def message_id(self) -> Id:
        return Id(self._place, self._size)

    def properties(self) -> dict[str, str]:
        return {}

    def __getattr__(self, name: str) -> Any:
        answers = {"data": str(self._place).encode(), "partition_key": "", "length": 3, "publish_timestamp": 7}
        return lambda: answers.get(name, 0)


class Topic:
    """A cluster with one topic, and its opened sources; `failures` are the results of the next calls."""

    closed = False
    environment = current()

    def __init__(self) -> None:
        self.messages = [Received(1, entry) for entry in range(3)] + [Received(2, entry) for entry in range(2)]
        self.failures: list[Error | None] = []
        self.asking: list[Error | None] = []
        self.opening: list[Error | None] = []
        self.opened: list[Position] = []
        self.hidden: set[Position] = set()
        self.waits: list[int] = []
        self.away = False

    def check(self) -> None: ...

    def incarnation(self, topic: str, *, retry: bool = True) -> str:
        _fail(self.asking)
        return "one"

    def ask(self, method: str, topic: str, question: str, *, retry: bool = True) -> Any:
        assert (method, question) == ("GET", "internalStats")
        _fail(self.asking)
        return STATE

    def source(self, _: Any, __: str, start: Position, *, compacted: bool, ahead: int) -> Source:
        _fail(self.opening)
        self.opened.append(start)
        return Source(self, start)


class Source:
    def __init__(self, topic: Topic, start: Position) -> None:
        self._topic = topic
        places = [(message, place_of(message)) for message in topic.messages]
        self._left = [message for message, place in places if place >= start and place not in topic.hidden]
        self._dead: Error | None = None

    def next(self, milliseconds: int) -> Received | None:
        self._topic.waits.append(milliseconds)
        if self._dead is None and self._topic.failures:
            self._dead = self._topic.failures.pop(0)
        if self._dead is not None:
            raise self._dead
        return self._left.pop(0) if self._left else None

    def is_connected(self) -> bool:
        return self._dead is None and not self._topic.away

    def has_more(self) -> bool:
        return bool(self._left)

    def notify_when_readable(self, callback: object) -> None: ...

    def close(self) -> None:
        self._dead = Closed("closed")


def _fail(failures: list[Error | None]) -> None:
    if failures and (failure := failures.pop(0)) is not None:
        raise failure


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Topic]:
    found = Topic()
    monkeypatch.setattr(reader_module, "MessageSource", found.source)
    monkeypatch.setattr(reader_module, "RECONNECT_SECONDS", 0.05)
    return found


def reader_of(topic: Topic, *, compacted: bool = False) -> PulsarReader:
    cluster: Any = topic
    return PulsarReader(cluster, "orders", EARLIEST, inclusive=True, compacted=compacted, ahead=10)


def read_on(reader: PulsarReader) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while (placed := reader.read()) is not None:
        found += [(position.ledger, position.entry) for position in placed.positions]
    return found


def read_nothing() -> PlacedBatch:
    raise AssertionError("the existing messages are not returned")


def test_source_with_a_transient_failure_is_replaced_at_its_position(topic: Topic) -> None:
    reader = reader_of(topic)
    topic.failures = [None, None, AWAY, AWAY, None, None, AWAY]
    assert read_on(reader) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert topic.opened == [EARLIEST, Position(1, 1), Position(1, 1), Position(1, 2)]


def test_source_that_closed_by_itself_is_replaced_unless_the_reader_closed(topic: Topic) -> None:
    reader = reader_of(topic)
    topic.failures = [None, AWAY]
    topic.opening = [AWAY, AWAY]
    assert reader.read(limit=1) is not None
    for _ in range(2):
        with pytest.raises(ServiceUnavailable):
            reader.read()
    assert read_on(reader) == [(1, 1), (1, 2), (2, 0), (2, 1)]
    reader.close()
    with pytest.raises(Closed, match="open another one"):
        reader.read()


def test_final_error_is_raised_and_not_stored(topic: Topic) -> None:
    reader = reader_of(topic)
    topic.failures = [TopicNotFound("gone")]
    with pytest.raises(TopicNotFound):
        reader.read()
    assert len(read_on(reader)) == 5


def test_failed_request_about_a_ledger_is_retried(topic: Topic) -> None:
    reader = reader_of(topic)
    topic.asking = [None, AWAY, None, AWAY]  # at its beginning, and where a ledger ends
    found: list[tuple[int, int]] = []
    failures = 0
    while len(found) < 5:
        try:
            found += [(place.ledger, place.entry) for place in (reader.read() or read_nothing()).positions]
        except ServiceUnavailable:
            failures += 1
    assert found == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert failures == 2


def test_nothing_is_skipped_if_a_second_source_fails(topic: Topic) -> None:
    """A skip counts only if a second source confirms it; one that could not be opened confirms nothing."""
    reader = reader_of(topic)
    assert reader.read(limit=1) is not None
    topic.hidden = {Position(1, 1)}
    topic.failures = [AWAY]  # the next source skips a message
    found: list[tuple[int, int]] = []
    topic.opening = [None, AWAY]
    with pytest.raises(ServiceUnavailable):
        found += read_on(reader)
    topic.hidden = set()
    found += read_on(reader)
    assert found == [(1, 1), (1, 2), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({Position(1, 1, 1)}, id="in a batch"),
        pytest.param({Position(1, 1, 2)}, id="at the end of a batch"),
        pytest.param({Position(1, 2, 1)}, id="at the end of a ledger"),
        pytest.param({Position(2, 1, 129)}, id="at the end of the topic"),
    ],
)
def test_rest_of_a_batch_that_a_source_skips_is_read_from_another_one(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, missing: set[Position]
) -> None:
    sizes = {(1, 0): 1, (1, 1): 3, (1, 2): 2, (2, 0): 1, (2, 1): 130}
    topic.messages = [Received(*entry, batch, size) for entry, size in sizes.items() for batch in range(size)]
    topic.hidden = missing
    reader = reader_of(topic)
    topic.hidden = set()
    found: list[Position] = []
    for _ in range(3):
        while (placed := reader.read()) is not None:
            found += placed.positions
        monkeypatch.setattr(reader, "_check_interval", 0.0)
    assert found == [place_of(message) for message in topic.messages]


def test_reader_that_notifies_never_waits_for_a_cluster_that_is_away(topic: Topic) -> None:
    """A few threads read all topics of a service: after an outage each topic would occupy one of them."""
    reader = reader_of(topic)
    assert len(read_on(reader)) == 5
    topic.away = True
    assert (reader.read(), any(topic.waits)) == (None, True)
    topic.waits.clear()
    reader.notify_when_readable(lambda: None)
    assert (reader.read(), topic.waits) == (None, [0])


def test_source_that_stays_disconnected_is_replaced_when_the_cluster_answers(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage the library waits for up to a minute until it reconnects."""
    reader = reader_of(topic)
    assert len(read_on(reader)) == 5
    monkeypatch.setattr(reader, "_check_interval", 0.0)
    assert (reader.read(), len(topic.opened)) == (None, 1)
    topic.away = True
    monkeypatch.setattr(reader, "_check_interval", 0.0)
    reader.read()
    assert {*topic.opened[1:]} == {Position(2, 1)}


@pytest.mark.parametrize("compacted", [False, True])
def test_messages_that_no_source_gets_for_a_while_are_read_once_they_come(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    """A broker under load gives nothing; on a compacted topic these messages may also be compacted away."""
    topic.hidden = {place_of(message) for message in topic.messages[1:]}
    reader = reader_of(topic, compacted=compacted)
    assert read_on(reader) == [(1, 0)]
    for _ in range(5):
        monkeypatch.setattr(reader, "_check_interval", 0.0)
        assert reader.read() is None
    topic.hidden = set()
    monkeypatch.setattr(reader, "_check_interval", 0.0)
    assert read_on(reader) + read_on(reader) == [(1, 1), (1, 2), (2, 0), (2, 1)]
