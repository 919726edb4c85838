"""Fixtures of the contract, the choices of a backend, and helpers."""

# ruff: noqa: S101 - tests are made of assertions

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

import pytest

from broker_io.batch import Batch, Message, PlacedMessage
from broker_io.port import Broker, Reader, Writer
from broker_io.position import EARLIEST, Position

WAIT_SECONDS = 60.0
"""Seconds that a backend may take for what it does eventually."""

LAG_SECONDS = 0.5
"""Seconds that a stored message may take to reach a reader."""


class Base:
    """The choices that the port leaves to a backend."""

    destructive_compaction = False
    """Whether compaction drops messages for raw readers too."""
    keeps_empty_values = True
    """Whether compaction treats an empty value as a value; if false, it is a delete."""
    trims_at_once = True
    """Whether trimmed ledgers are gone when `trim` returns."""
    waits_for_owners = True
    """Whether `writer` supports `wait`."""
    max_message_bytes = 5 * 1024 * 1024
    """The limit of one message with which `broker` was opened, in bytes."""
    time_slack_ms = 0
    """Maximum difference between publish times and `now_ms`, in milliseconds."""

    def now_ms(self, broker: Broker) -> int:
        """The time of the clock that sets publish times, in milliseconds since 1970."""
        del broker
        return time.time_ns() // 1_000_000

    def pass_time(self, broker: Broker, seconds: float) -> None:
        """Let this many seconds pass on that clock."""
        del broker
        time.sleep(seconds)

    def lose_source(self, reader: Reader, patch: pytest.MonkeyPatch) -> None:
        """Let what a reader reads from die without a word; nothing if it reads the log itself."""

    def reopen(self, broker: Broker) -> Broker:
        """Close a broker and open its log again."""
        del broker
        pytest.skip("the log of this backend ends with its broker")

    @pytest.fixture
    def topic(self, broker: Broker) -> str:
        """A new, empty topic."""
        return new_topic(broker)

    def trimmed(self, broker: Broker, topic: str, first_ledger: int) -> None:
        """Trim, and wait until the ledgers are gone."""
        broker.trim(topic, first_ledger)
        if not self.trims_at_once:
            eventually(lambda: broker.ledgers(topic)[0].ledger >= first_ledger)


def new_topic(broker: Broker) -> str:
    name = f"contract-{uuid.uuid4().hex}"
    broker.create_topic(name)
    return name


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def numbered(count: int, start: int = 0) -> list[Message]:
    """Messages that can be distinguished by their values."""
    return [Message(b"key-%d" % (number % 7), b"value-%d" % number) for number in range(start, start + count)]


def put(writer: Writer, messages: Sequence[Message]) -> list[Position]:
    """Append messages and return their positions once they are acknowledged."""
    return [*writer.append(Batch.of(messages)).result(WAIT_SECONDS)]


def fill(broker: Broker, topic: str, *groups: Sequence[Message]) -> list[list[Position]]:
    """Append groups of messages, each to a new ledger; the backend may roll within a group."""
    positions = []
    with broker.writer(topic) as writer:
        for number, group in enumerate(groups):
            if number:
                broker.roll(topic)
            positions.append(put(writer, group))
    return positions


def read_on(reader: Reader, *, limit: int = 65_536, timeout: float = 0.0) -> list[PlacedMessage]:
    """All messages that a reader returns before it returns None."""
    found: list[PlacedMessage] = []
    drain(reader, found, limit=limit, timeout=timeout)
    return found


def drain(reader: Reader, found: list[PlacedMessage], *, limit: int = 65_536, timeout: float = 0.0) -> None:
    """Add to `found` all messages that a reader returns before it returns None or fails."""
    while (batch := reader.read(limit=limit, timeout=timeout)) is not None:
        assert len(batch), "a batch holds at least one message"
        assert len({*batch.positions.ledgers.tolist()}) == 1, "a batch comes from one ledger"
        assert len(batch.positions) == len(batch.messages) == len(batch.publish_times)
        found += batch


def read_count(reader: Reader, count: int) -> list[PlacedMessage]:
    """Wait for at least `count` messages and return them."""
    found: list[PlacedMessage] = []
    while len(found) < count:
        batch = reader.read(timeout=WAIT_SECONDS)
        assert batch is not None, f"only {len(found)} of {count} messages came"
        found += batch
    return found


def read_all(
    broker: Broker, topic: str, start: Position = EARLIEST, *, inclusive: bool = True, compacted: bool = False
) -> list[PlacedMessage]:
    """The messages of a topic from a position to its present end."""
    end = broker.last_position(topic)
    with broker.reader(topic, start, inclusive=inclusive, compacted=compacted) as reader:
        found = read_on(reader)
        while not compacted and end is not None and start < end and not (found and found[-1].position >= end):
            more = reader.read(timeout=LAG_SECONDS)
            if more is None:  # the end itself was trimmed or compacted away
                break
            found += more
        return found


def values(found: Iterable[PlacedMessage]) -> list[bytes | None]:
    return [placed.message.value for placed in found]


def positions_of(found: Iterable[PlacedMessage]) -> list[Position]:
    return [placed.position for placed in found]


def ascending(positions: Sequence[Position]) -> bool:
    return all(a < b for a, b in itertools.pairwise(positions))
