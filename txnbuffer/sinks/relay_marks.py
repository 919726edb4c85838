"""What a relay writes: messages whose readers need to know nothing of transactions, and that tell how far it was.

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

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from broker_io.batch import Batch, Labels, Numbers
from broker_io.errors import PositionTrimmed
from broker_io.port import Broker
from broker_io.position import NO_INDEX, Position
from txnbuffer.client.records import RecordBatch
from txnbuffer.errors import RelayTargetTaken

POSITION, SEQNO, SOURCE, ROLLBACK = "relay.position", "relay.seqno", "relay.source", "relay.rollback"
NUMBER = "relay.number"
MARKS = (POSITION, SEQNO, SOURCE, ROLLBACK, NUMBER)


class Source(NamedTuple):
    """Which history of which topic was relayed."""

    topic: str
    incarnation: str
    version: int

    def __str__(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))


class Mark(NamedTuple):
    """What the last message of a target says: the source, and where in it the record stands."""

    source: Source
    position: Position
    seqno: int | None

    @classmethod
    def of(cls, topic: str, properties: Mapping[str, str]) -> Mark:
        """Raises RelayTargetTaken for a message that no relay wrote."""
        try:
            source = Source(**json.loads(properties[SOURCE]))
            seqno = properties.get(SEQNO)
            return cls(source, Position.parse(properties[POSITION]), None if seqno is None else int(seqno))
        except (KeyError, ValueError, TypeError):
            raise RelayTargetTaken(
                f"the last message of topic {topic!r} was written by no relay: relay to a topic of its own"
            ) from None


def marked(batch: RecordBatch, source: Source, rollback: int | None = None) -> Batch:
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


def last_mark(broker: Broker, topic: str, patience: float) -> Mark | None:
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
                placed = reader.read(timeout=patience)
                if placed is None:
                    raise gone
    except PositionTrimmed:
        raise gone from None
    (message,) = placed.messages.take(slice(len(placed) - 1, None))
    return Mark.of(topic, message.properties)
