"""Topics to relay to: of a log or a cluster that the relay writes itself, and of a service.

What a relay writes: messages whose readers need to know nothing of transactions, and that tell how far it was.

Every visible record of the source becomes one message of the target, once, in the source's order, with the same key,
value (none: the key is deleted), properties and event time. It has these properties besides, by which a relay that
begins again knows where to go on; they take the place of others with their names.

- `relay.position`  where the record stands in the source: `ledger:entry`, or `ledger:entry:batch`
- `relay.seqno`     its number there; none as long as the source has had no transactions
- `relay.source`    JSON object: `topic`; `incarnation`, which of the topics of that name; `version`, the uuid of the
                    version of its history, 0 as long as it has had no transactions
- `relay.rollback`  on the first message that was sent again after the source's history had branched: what was relayed
                    before it and has a seqno above this number is void
- `relay.number`    in a service: the number of the transaction that appended it; a record without one has its seqno

The target has one relay as its only writer, so what was relayed is always a prefix of what is to be, and its last
message says all there is to know.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from broker_io.batch import Batch, Labels, Numbers
from broker_io.errors import PositionTrimmed
from broker_io.port import Broker, DeduplicatingBroker, Writer
from broker_io.position import NO_INDEX, Position, Positions
from txnbuffer.client.client import Client
from txnbuffer.client.outbox import SendColumns
from txnbuffer.client.reader import CommittedReader
from txnbuffer.client.records import Record, RecordBatch
from txnbuffer.client.sync_client import SyncClient
from txnbuffer.errors import InvalidRequest, RelayTargetTaken

POSITION, SEQNO, SOURCE, ROLLBACK = "relay.position", "relay.seqno", "relay.source", "relay.rollback"
NUMBER = "relay.number"
MARKS = (POSITION, SEQNO, SOURCE, ROLLBACK, NUMBER)


class RelaySource(NamedTuple):
    """Which history of which topic was relayed."""

    topic: str
    incarnation: str
    version: int

    def __str__(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))


class RelayMark(NamedTuple):
    """What the last message of a target says: the source, and where in it the record stands."""

    source: RelaySource
    position: Position
    seqno: int | None

    @classmethod
    def of(cls, topic: str, properties: Mapping[str, str]) -> RelayMark:
        """Raises RelayTargetTaken for a message that no relay wrote."""
        try:
            source = RelaySource(**json.loads(properties[SOURCE]))
            seqno = properties.get(SEQNO)
            return cls(source, Position.parse(properties[POSITION]), None if seqno is None else int(seqno))
        except (KeyError, ValueError, TypeError):
            raise RelayTargetTaken(
                f"the last message of topic {topic!r} was written by no relay: relay to a topic of its own"
            ) from None


def marked(batch: RecordBatch, source: RelaySource, rollback: int | None = None) -> Batch:
    """The messages for records."""
    messages, count = batch.messages, len(batch)
    properties = {name: column for name, column in messages.properties.items() if name not in MARKS}
    properties[POSITION] = Labels.of(map(str, batch.positions))
    if batch.seqnos is not None:
        properties[SEQNO] = Numbers(batch.seqnos)
    properties[SOURCE] = Labels.constant(str(source), count)
    if rollback is not None:
        properties[ROLLBACK] = Labels(np.array([0, *[-1] * (count - 1)], np.int32), (str(rollback),))
    return Batch(messages.keys, messages.values, properties, messages.event_times)


def last_mark(broker: Broker, topic: str, max_unavailable: float) -> RelayMark | None:
    """What the last message of a topic says that has nothing but messages. Raises RelayTargetTaken."""
    last = broker.last_position(topic)
    if last is None:
        return None
    gone = RelayTargetTaken(
        f"the last message of topic {topic!r} is gone, so nobody knows how far was relayed: relay to another topic"
    )
    try:
        with broker.reader(topic, last._replace(batch=NO_INDEX)) as reader:
            placed = None
            while placed is None or placed.positions.last < last:
                placed = reader.read(timeout=max_unavailable)
                if placed is None:
                    raise gone
    except PositionTrimmed:
        raise gone from None
    (message,) = placed.messages.take(slice(len(placed) - 1, None))
    return RelayMark.of(topic, message.properties)


READING = 30.0
"""Seconds in which the last message of a target must be read."""
POLL = 0.1


class OwnedTarget:
    """A topic that the relay writes itself; an exclusive writer fences every other relay.

    `open_broker` opens its broker. With `release` only the last message is held on to, where brokers drop what nobody
    holds: what others still need is up to their subscriptions and the topic's retention, as anywhere.
    """

    def __init__(self, open_broker: Callable[[], Broker], topic: str, *, release: bool = False) -> None:
        self._open_broker = open_broker
        self._topic = topic
        self._release = release
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
        return last_mark(broker, self._topic, READING)

    def append(self, batch: Batch, seqno: int | None) -> Future[Positions]:
        return self._writer.append(batch)

    def landed(self, outcome: Positions) -> None:
        ledger = outcome.last.ledger
        if self._release and ledger != self._ledger:
            self._broker.trim(self._topic, ledger)
        self._ledger = ledger

    def close(self) -> None:
        self._stack.close()


class ServiceTarget:
    """A topic of a service, which writes it: every append is a transaction of a named producer.

    They are numbered 1, 2, 3 …: seqnos begin again where the source's history branched, and numbers may not.
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
        # This fences every other relay, and ends what it had open.
        number = self._number = client.committed_number(self._name)
        broker = client.client.open_broker()
        last = self._last_record(broker, number) if self._topic in broker.topics() else None
        if last is None:
            if number:
                raise RelayTargetTaken(
                    f"topic {self._topic!r} has lost what was relayed last, by transaction {number}: relay to "
                    "another one"
                )
            return None
        mark = RelayMark.of(self._topic, last.properties)
        if not number or _number_of(last) != str(number):
            raise RelayTargetTaken(f"topic {self._topic!r} holds what no relay wrote: relay to a topic of its own")
        return mark

    def append(self, batch: Batch, seqno: int | None) -> Future[Any]:
        if seqno is None:
            raise InvalidRequest(
                "the source has had no transactions, so its records have no numbers: relay to a log or a cluster"
            )
        number = self._number = self._number + 1
        properties = {**batch.properties, NUMBER: Labels.constant(str(number), len(batch))}
        rows = rows_of(replace(batch, properties=properties))
        self._last = self._client.start(self._commit, self._client.client, rows, number, self._last)
        return self._last

    def landed(self, outcome: Any) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """What is not acknowledged may still stand there afterwards: whoever opens it next finds out."""
        self._stack.close()

    async def _commit(self, client: Client, rows: SendColumns, number: int, before: Future[None] | None) -> None:
        if before is not None:
            await asyncio.wrap_future(before)  # where one fails, none behind it may stand
        async with client.transaction(name=self._name, number=number) as txn:
            await txn.send_rows(self._topic, rows)

    def _last_record(self, broker: Broker, number: int) -> Record | None:
        """The last visible record, which is waited for if a transaction has been committed."""
        deadline = time.monotonic() + READING
        while True:
            last = _newest(broker, self._topic)
            is_it = last is not None and _number_of(last) == str(number)
            if not number or is_it or time.monotonic() > deadline:
                return last
            time.sleep(POLL)


def _number_of(record: Record) -> str | None:
    """The number of the transaction that relayed a record."""
    return record.properties.get(NUMBER, record.properties.get(SEQNO))


def _newest(broker: Broker, topic: str) -> Record | None:
    """The newest record that is visible now."""
    for ledger in reversed(broker.ledgers(topic)):
        last: RecordBatch | None = None
        with CommittedReader(broker, topic, start=Position(ledger.ledger, 0)) as reader:
            while (batch := reader.read()) is not None:
                last = batch
        if last is not None:
            *_, record = last
            return record
    return None


def rows_of(batch: Batch) -> SendColumns:
    """Messages as the records of a transaction."""
    keys, values = batch.keys.to_list(), batch.values.to_list()
    names, columns = [*batch.properties], [column.to_list() for column in batch.properties.values()]
    properties = [
        {name: text for name, text in zip(names, row, strict=True) if text is not None}
        for row in zip(*columns, strict=True)
    ]
    times = None if batch.event_times is None else batch.event_times.tolist()
    return SendColumns(keys, values, properties, times, int(batch.sizes().sum()))
