"""Targets of a relay: a topic of a log or a cluster, written directly, or a topic of a service; and their messages

Each visible record of the source becomes one message of the target, once, in the order of the source, with the same
key, value (none: the key is deleted), properties and event time. Its readers need not know about transactions. These
additional properties show a restarted relay where to resume; they replace properties of the source with their names.

- `relay.position`  position of the record in the source: `ledger:entry`, or `ledger:entry:batch`
- `relay.seqno`     its seqno there; missing while the source has had no transactions
- `relay.source`    JSON object: `topic`; `incarnation`, the id of the topic, which a new topic of the same name does
                    not share; `version`, the uuid of the version of its history in which the record was written, 0
                    while it has had no transactions
- `relay.rollback`  on the first message after the history of the source branched: earlier messages with a seqno above
                    this number are no longer valid
- `relay.number`    only in a service: sequence number of the transaction that appended it; if missing, it is the seqno

The relay is the only writer of the target, so the target always has a prefix of all messages, and its last message
has the whole state of the relay.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from broker_io.batch import Batch, Labels, Message, Numbers
from broker_io.environment import current
from broker_io.errors import PositionTrimmed
from broker_io.port import READ_SECONDS, Broker, DeduplicatingBroker, Writer, existing
from broker_io.position import NO_INDEX, Position, Positions
from txnbuffer.client.client import Client
from txnbuffer.client.path.send_columns import SendColumns
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.client.reading.records import Record, RecordBatch
from txnbuffer.client.sync.sync_client import SyncClient
from txnbuffer.errors import InvalidRequest, RelayTargetTaken

POSITION, SEQNO, SOURCE, ROLLBACK = "relay.position", "relay.seqno", "relay.source", "relay.rollback"
NUMBER = "relay.number"
MARK_PROPERTIES = (POSITION, SEQNO, SOURCE, ROLLBACK, NUMBER)


class RelaySource(NamedTuple):
    """The topic that was relayed, and the version of its history."""

    topic: str
    incarnation: str
    version: int

    def __str__(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))


class RelayMark(NamedTuple):
    """The properties of the last message of a target: the source, and the position of the record there."""

    source: RelaySource
    position: Position
    seqno: int | None

    @classmethod
    def of(cls, topic: str, properties: Mapping[str, str]) -> RelayMark:
        """Raises RelayTargetTaken for a message that was not written by a relay."""
        try:
            source = RelaySource(**json.loads(properties[SOURCE]))
            seqno = properties.get(SEQNO)
            return cls(source, Position.parse(properties[POSITION]), None if seqno is None else int(seqno))
        except (KeyError, ValueError, TypeError, RecursionError):
            raise RelayTargetTaken(
                f"the last message of topic {topic!r} was not written by a relay: relay to another topic"
            ) from None


def relay_messages(batch: RecordBatch, source: RelaySource, rollback: int | None = None) -> Batch:
    """The messages of the target for records of the source."""
    messages, count = batch.messages, len(batch)
    properties = {name: column for name, column in messages.properties.items() if name not in MARK_PROPERTIES}
    properties[POSITION] = Labels.of(map(str, batch.positions))
    if batch.seqnos is not None:
        properties[SEQNO] = Numbers(batch.seqnos)
    properties[SOURCE] = Labels.constant(str(source), count)
    if rollback is not None:
        properties[ROLLBACK] = Labels(np.array([0, *[-1] * (count - 1)], np.int32), (str(rollback),))
    return Batch(messages.keys, messages.values, properties, messages.event_times)


def last_mark(broker: Broker, topic: str) -> RelayMark | None:
    """The mark of the last message of a topic, or None if it is empty. Raises RelayTargetTaken."""
    last = broker.last_position(topic)
    while last is not None:
        try:
            message = _message_at(broker, topic, last)
        except PositionTrimmed:
            before, last = last, broker.last_position(topic)
            if last == before:  # else another relay has appended since, and trimmed what was the last one before
                raise RelayTargetTaken(
                    f"topic {topic!r} no longer has its last message, so the relay cannot resume: relay to another "
                    "topic"
                ) from None
        else:
            return RelayMark.of(topic, message.properties)
    return None


def _message_at(broker: Broker, topic: str, last: Position) -> Message:
    """The message at the end of a topic, or a later one. Raises PositionTrimmed, ServiceUnavailable."""
    with broker.reader(topic, last._replace(batch=NO_INDEX)) as reader:
        placed = None
        while placed is None or placed.positions.last < last:
            placed = existing(reader.read(timeout=READ_SECONDS), topic, last)
    return placed.messages[len(placed) - 1]


POLL = 0.1
COMPACT_BYTES = 64 * 1024 * 1024
"""Bytes of messages after which a target of latest values is compacted."""
COMPACT_SECONDS = 60.0
"""Seconds between compactions while the source has no more records."""


class OwnedTarget:
    """A topic that the relay writes directly; its exclusive writer fences every other relay.

    `open_broker` opens its broker. With `release` the relay keeps only the last message from being trimmed; retention
    and subscriptions decide about the others, as on any topic. With `compacts` the target keeps the newest message of
    each key, which the broker must allow; what a compaction has read is no longer kept from being trimmed.
    """

    def __init__(
        self, open_broker: Callable[[], Broker], topic: str, *, release: bool = False, compacts: bool = False
    ) -> None:
        self._open_broker = open_broker
        self._topic = topic
        self._release = release and not compacts
        self._compacts = compacts
        self._appended = 0
        self._last_compaction = -math.inf
        self._clock = current().clock
        self._stack = ExitStack()
        self._broker: Broker
        self._writer: Writer
        self._ledger: int | None = None

    def open(self) -> RelayMark | None:
        broker = self._broker = self._stack.enter_context(self._open_broker())
        broker.create_topic(self._topic)
        if isinstance(broker, DeduplicatingBroker):
            broker.deduplicate(self._topic)
        self._writer = self._stack.enter_context(broker.writer(self._topic, exclusive=True))
        self._ledger = None
        return last_mark(broker, self._topic)

    def append(self, batch: Batch, seqno: int | None) -> Future[Positions]:
        self._appended += int(batch.sizes().sum()) if self._compacts else 0
        return self._writer.append(batch)

    def acknowledged(self, outcome: Positions) -> None:
        ledger = outcome.last.ledger
        if self._release and ledger != self._ledger:
            self._broker.trim(self._topic, ledger)
        self._ledger = ledger
        if self._appended >= COMPACT_BYTES:
            self._compact()

    def caught_up(self) -> None:
        if self._appended and self._clock.monotonic() - self._last_compaction >= COMPACT_SECONDS:
            self._compact()

    def _compact(self) -> None:
        self._appended = 0
        self._broker.compact(self._topic)
        self._last_compaction = self._clock.monotonic()

    def close(self) -> None:
        self._stack.close()


class ServiceTarget:
    """A topic that a service writes: every append is a transaction of a named producer.

    The transactions have the numbers 1, 2, 3 … and not seqnos, which go back when the history of the source branches.
    """

    def __init__(self, connect: Callable[[], SyncClient], topic: str) -> None:
        self._connect = connect
        self._topic = topic
        self._name = f"relay to {topic}"
        self._stack = ExitStack()
        self._client: SyncClient
        self._number = 0
        self._last: Future[None] | None = None

    def open(self) -> RelayMark | None:
        client = self._client = self._connect()
        self._stack.callback(client.close)
        self._last = None
        # This fences every other relay and aborts its open transactions.
        number = client.committed_number(self._name)
        broker = client.client.open_broker()
        while True:
            self._number = number
            last = self._last_record(broker, number) if self._topic in broker.topics() else None
            if last is None and not number:
                return None
            if last is not None and number and _number_of(last) == number:
                return RelayMark.of(self._topic, last.properties)
            before, number = number, client.committed_number(self._name)
            if number == before:  # else another relay has opened the name since, and written
                break
        raise RelayTargetTaken(
            f"topic {self._topic!r} no longer has the records of transaction {number}, the last one relayed: relay to "
            "another topic"
            if last is None
            else f"topic {self._topic!r} has records that were not written by a relay: relay to another topic"
        )

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        if seqno is None:
            raise InvalidRequest(
                "the source has had no transactions, so its records have no seqnos: relay to a log or a cluster"
            )
        number = self._number = self._number + 1
        numbered = replace(batch, properties={**batch.properties, NUMBER: Labels.constant(str(number), len(batch))})
        rows = SendColumns(
            numbered.keys.to_list(),
            numbered.values.to_list(),
            [message.properties for message in numbered],
            None if numbered.event_times is None else numbered.event_times.tolist(),
            int(numbered.sizes().sum()),
        )
        self._last = self._client.start(self._commit, self._client.client, rows, number, self._last)
        return self._last

    def acknowledged(self, outcome: Any) -> None:
        """Nothing to do."""

    def caught_up(self) -> None:
        """Nothing to do: its service compacts it if it has a policy."""

    def close(self) -> None:
        """Unacknowledged records may still be written afterwards; the next relay finds out at its start."""
        self._stack.close()

    async def _commit(self, client: Client, rows: SendColumns, number: int, before: Future[None] | None) -> None:
        if before is not None:
            await asyncio.wrap_future(before)  # if one fails, no later one may commit
        async with client.transaction(name=self._name, number=number) as txn:
            await txn.send_rows(self._topic, rows)

    def _last_record(self, broker: Broker, number: int) -> Record | None:
        """The last visible record; waits for that of transaction `number`, or a later one, if this is not 0."""
        clock = current().clock
        deadline = clock.monotonic() + READ_SECONDS
        while True:
            last = _newest_record(broker, self._topic)
            if not number or (_number_of(last) or 0) >= number or clock.monotonic() > deadline:
                return last
            clock.sleep(POLL)


def _number_of(record: Record | None) -> int | None:
    """The number of the transaction that relayed a record; None if no relay wrote it."""
    if record is None or SOURCE not in record.properties:
        return None
    text = record.properties.get(NUMBER, record.properties.get(SEQNO, ""))
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _newest_record(broker: Broker, topic: str) -> Record | None:
    """The newest visible record."""
    for ledger in reversed(broker.ledgers(topic)):
        last: RecordBatch | None = None
        with CommittedReader(broker, topic, start=Position(ledger.ledger, 0)) as reader:
            while (batch := reader.read()) is not None:
                last = batch
        if last is not None:
            *_, record = last
            return record
    return None
