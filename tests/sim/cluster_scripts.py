"""Short scripts for a Pulsar cluster, real or simulated; each returns what it observed, without the ids of ledgers.

A script gets a broker of the port, an `admin` that returns status and body of a request about topic `orders`, and a
client of Pulsar's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pulsar

from broker_io.batch import Message
from broker_io.errors import Error
from broker_io.port import Broker
from broker_io.position import EARLIEST, Position
from broker_io.testing.contract.base import fill, numbered, positions_of, put, read_all, values


@dataclass
class Rig:
    """`open` opens another broker of the namespace; `ask` sends a request about the topic."""

    open: Callable[..., Broker]
    ask: Callable[..., tuple[int, Any]]
    topic: str = "orders"


def _made(rig: Rig, **options: Any) -> Broker:
    broker = rig.open(**options)
    broker.create_topic(rig.topic)
    return broker


def _fails(call: Callable[[], object]) -> str:
    try:
        call()
    except (Error, pulsar.PulsarException) as error:
        return type(error).__name__
    return "ok"


def _places(positions: list[Position]) -> list[tuple[int, int]]:
    return [(position.entry, position.batch) for position in positions]


def _shape(rig: Rig) -> list[int]:
    """The entries of each ledger."""
    stats = rig.ask("GET", "internalStats")[1]
    counts = [row["entries"] for row in stats["ledgers"]]
    counts[-1] = max(counts[-1], stats["currentLedgerEntries"])
    return counts


def missing_topic(rig: Rig) -> Any:
    """All requests about a topic that does not exist are refused with 404."""
    asked = [("GET", "properties"), ("GET", "internalStats"), ("GET", "lastMessageId"), ("PUT", "unload")]
    asked += [("GET", "partitions"), ("POST", "trim"), ("PUT", "compaction"), ("DELETE", "?force=true")]
    return [rig.ask(method, resource)[0] for method, resource in asked]


def created_twice(rig: Rig) -> Any:
    broker = _made(rig)
    first = broker.incarnation(rig.topic)
    broker.create_topic(rig.topic)
    return rig.ask("PUT", "", {})[0], broker.incarnation(rig.topic) == first


def subscribed_twice(rig: Rig) -> Any:
    _made(rig)
    start = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1, "batchIndex": -1}
    return [rig.ask("PUT", "subscription/mine", start)[0] for _ in range(2)]


def fenced_producer(rig: Rig) -> Any:
    """A producer that another one fenced is dead; the topic has the messages of both."""
    broker, other = _made(rig), rig.open()
    with broker.writer(rig.topic, exclusive=True) as first, other.writer(rig.topic, exclusive=True) as second:
        refused = _fails(lambda: first.append(numbered_batch()).result(30))
        again = _fails(lambda: first.append(numbered_batch()).result(30))
        put(second, numbered(1, 5))
        shared = _fails(lambda: rig.open(max_unavailable=1.0).writer(rig.topic))
    return refused, again, shared, values(read_all(broker, rig.topic))


def numbered_batch() -> Any:
    from broker_io.batch import Batch

    return Batch.of(numbered(1))


def unload_between_sends(rig: Rig) -> Any:
    """A producer and its messages survive an unload; what follows is in another ledger."""
    broker = _made(rig)
    with broker.writer(rig.topic) as writer:
        before = put(writer, numbered(2))
        status = rig.ask("PUT", "unload")[0]
        after = put(writer, numbered(1, 2))
    return status, _places(before), _places(after), before[0].ledger < after[0].ledger, _shape(rig)


def empty_ledger_is_replaced(rig: Rig) -> Any:
    broker = _made(rig)
    fill(broker, rig.topic, numbered(1))
    rig.ask("PUT", "unload")
    first = broker.ledgers(rig.topic)[-1].ledger
    rig.ask("PUT", "unload")
    return broker.ledgers(rig.topic)[-1].ledger > first, _shape(rig)


def trimmed_position(rig: Rig) -> Any:
    """The port reports what Pulsar skips."""
    broker = _made(rig)
    (first,) = fill(broker, rig.topic, numbered(2))
    broker.roll(rig.topic)
    fill(broker, rig.topic, numbered(2, 2))
    broker.trim(rig.topic, 2**62)
    opened = _fails(lambda: broker.reader(rig.topic, first[0]))
    return opened, values(read_all(broker, rig.topic, EARLIEST)), _shape(rig)


def subscription_keeps_ledgers(rig: Rig) -> Any:
    """Trimming drops nothing that the durable subscription has not passed."""
    broker = _made(rig)
    fill(broker, rig.topic, numbered(1))
    broker.roll(rig.topic)
    fill(broker, rig.topic, numbered(1, 1))
    status = rig.ask("POST", "trim")[0]
    return status, _shape(rig), values(read_all(broker, rig.topic))


def truncated(rig: Rig) -> Any:
    """Truncation ignores subscriptions."""
    broker = _made(rig)
    fill(broker, rig.topic, numbered(2))
    broker.roll(rig.topic)
    fill(broker, rig.topic, numbered(1, 2))
    return rig.ask("DELETE", "truncate")[0], _shape(rig), values(read_all(broker, rig.topic))


def read_from_a_batch_index(rig: Rig) -> Any:
    broker = _made(rig)
    (positions,) = fill(broker, rig.topic, numbered(4))
    entry = positions[0]._replace(batch=-1)
    starts = [(positions[2], True), (positions[2], False), (entry, True), (entry, False), (positions[3], False)]
    return [_places(positions_of(read_all(broker, rig.topic, at, inclusive=inside))) for at, inside in starts]


def compacted_with_deletes(rig: Rig) -> Any:
    """The newest message of each key stays at its position, without deletes and keyless messages."""
    broker = _made(rig, compacted_prefix=rig.topic)
    rows = [Message(b"a", b"1"), Message(b"b", b"1"), Message(None, b"x"), Message(b"a", b"2"), Message(b"b", None)]
    fill(broker, rig.topic, rows)
    broker.compact(rig.topic)
    fill(broker, rig.topic, [Message(b"a", None)])
    found = read_all(broker, rig.topic, compacted=True)
    return [(placed.message.key, placed.message.value, placed.position.entry) for placed in found]


def deleted_and_re_created(rig: Rig) -> Any:
    broker, other = _made(rig), rig.open()
    fill(broker, rig.topic, numbered(2))
    before = broker.incarnation(rig.topic)
    other.delete_topic(rig.topic)
    gone = _fails(lambda: other.incarnation(rig.topic))
    other.create_topic(rig.topic)
    fill(other, rig.topic, numbered(1, 7))
    return gone, other.incarnation(rig.topic) != before, values(read_all(other, rig.topic)), _shape(rig)


def last_message_id(rig: Rig) -> Any:
    """It names the last message of a batch, and nothing once the topic is empty."""
    broker = _made(rig)
    empty = rig.ask("GET", "lastMessageId")[1]["entryId"]
    fill(broker, rig.topic, numbered(3))
    found = rig.ask("GET", "lastMessageId")[1]
    return empty, found["entryId"], found["batchIndex"]


SCRIPTS: tuple[Callable[[Rig], Any], ...] = (
    missing_topic,
    created_twice,
    subscribed_twice,
    fenced_producer,
    unload_between_sends,
    empty_ledger_is_replaced,
    trimmed_position,
    subscription_keeps_ledgers,
    truncated,
    read_from_a_batch_index,
    compacted_with_deletes,
    deleted_and_re_created,
    last_message_id,
)
