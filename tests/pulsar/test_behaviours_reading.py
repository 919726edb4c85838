"""Behaviours of Pulsar's readers, and how readers of the port handle them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from cluster_contract import Dead
from pulsar_cluster import Cluster

from broker_io.batch import Message, PlacedMessage
from broker_io.errors import Error, PositionTrimmed, TopicNotFound
from broker_io.port import Broker
from broker_io.position import EARLIEST, LATEST, Position
from broker_io.pulsar import broker as broker_module
from broker_io.pulsar import reader as reader_module
from broker_io.pulsar import reader as source_module
from broker_io.pulsar.cluster import INCARNATION
from broker_io.standalone import ask
from broker_io.testing.contract.base import (
    WAIT_SECONDS,
    drain,
    fill,
    numbered,
    positions_of,
    put,
    read_all,
    read_count,
    values,
)

Opening = Callable[..., Broker]


@pytest.fixture
def broker(opening: Opening) -> Broker:
    made = opening()
    made.create_topic("orders")
    return made


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send readers one message at a time, so that later ones can still be dropped."""
    monkeypatch.setattr(broker_module, "AHEAD", 1)
    monkeypatch.setattr(broker_module, "AHEAD_OF_LARGE", 1)


@pytest.mark.parametrize("size", [2, 3, 200])
def test_ids_tell_the_last_message_of_a_batch(broker: Broker, client: pulsar.Client, namespace: str, size: int) -> None:
    name = f"persistent://{namespace}/orders"
    batched = client.create_producer(
        name, batching_enabled=True, batching_max_messages=size, batching_max_publish_delay_ms=60_000
    )
    for number in range(2 * size):
        batched.send_async(b"%d" % number, lambda *_: None)
    batched.flush()
    client.create_producer(name).send(b"alone")
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    found = [reader_module.ends_entry(reader.read_next(10_000).message_id()) for _ in range(2 * size + 1)]
    assert found == [*[False] * (size - 1), True] * 2 + [True]


def test_messages_of_other_programs_are_read_as_they_are(broker: Broker, client: pulsar.Client, namespace: str) -> None:
    """Batched or not, with a schema, an ordering key, compressed: the fields of the port are read."""
    name = f"persistent://{namespace}/orders"
    batched = client.create_producer(
        name, batching_enabled=True, batching_max_messages=3, compression_type=pulsar.CompressionType.ZSTD
    )
    for number in range(3):
        batched.send_async(b"%d" % number, lambda *_: None, partition_key="k", properties={"n": str(number)})
    batched.flush()
    single = client.create_producer(name)
    single.send(b"3", ordering_key="o", event_timestamp=77)
    single.send(b"")
    single.send(None, partition_key="k")
    found = read_all(broker, "orders")
    expected = [Message(b"k", b"%d" % number, {"n": str(number)}) for number in range(3)]
    expected += [Message(None, b"3", {}, 77), Message(None, b""), Message(b"k", None)]
    assert [placed.message for placed in found] == expected
    assert [position.batch for position in positions_of(found)] == [0, 1, 2, -1, -1, -1]
    for index, position in enumerate(positions_of(found)):
        assert positions_of(read_all(broker, "orders", position)) == positions_of(found)[index:]
        behind = read_all(broker, "orders", position, inclusive=False)
        assert positions_of(behind) == positions_of(found)[index + 1 :]


def test_start_without_a_batch_index_reads_the_whole_batch(broker: Broker) -> None:
    """Pulsar returns the first message of a batch also to a reader that starts after its entry."""
    (positions,) = fill(broker, "orders", numbered(4))
    entry = positions[0]._replace(batch=-1)
    assert positions_of(read_all(broker, "orders", entry)) == positions
    assert positions_of(read_all(broker, "orders", entry, inclusive=False)) == positions
    past = positions[-1]._replace(batch=99)
    with broker.writer("orders") as writer:
        more = put(writer, numbered(2, 4))
    assert positions_of(read_all(broker, "orders", past)) == more


def test_gap_of_a_chunked_message_is_accepted(broker: Broker, client: pulsar.Client, namespace: str) -> None:
    """A chunked message is at its last chunk only; a reopened reader skips the others too."""
    producer = client.create_producer(f"persistent://{namespace}/orders", chunking_enabled=True)
    producer.send(b"before")
    producer.send(random.Random(1).randbytes(6 * 1024 * 1024))
    producer.send(b"after")
    found = read_all(broker, "orders")
    assert [len(value or b"") for value in values(found)] == [6, 6 * 1024 * 1024, 5]
    entries = [position.entry for position in positions_of(found)]
    assert entries[1] > entries[0] + 1


def test_reader_that_truncation_moves_past_dropped_messages_raises(
    broker: Broker, asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncation drops all ledgers but the newest, despite subscriptions, and moves open readers to the end."""
    one_by_one(monkeypatch)
    fill(broker, "orders", *([message] for message in numbered(4)))
    with broker.reader("orders") as reader:
        found = read_count_at_most(reader, 1)
        asking("DELETE", "truncate")
        with broker.writer("orders") as writer:
            put(writer, numbered(1, 4))
        with pytest.raises(PositionTrimmed):
            drain(reader, found, timeout=WAIT_SECONDS)
    assert [placed.message for placed in found] == numbered(5)[: len(found)]


def test_reader_that_truncation_moves_past_existing_messages_reads_them(
    opening: Opening, asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader in the newest ledger is moved to its end too, past messages that still exist."""
    one_by_one(monkeypatch)
    broker = opening(batching=False)
    broker.create_topic("orders")
    fill(broker, "orders", numbered(1), numbered(9, 1))
    with broker.reader("orders") as reader:
        found = read_count_at_most(reader, 3)
        asking("DELETE", "truncate")
        with broker.writer("orders") as writer:
            put(writer, numbered(1, 10))
        found += read_count(reader, 8)
    assert [placed.message for placed in found] == numbered(11)


def read_count_at_most(reader: Any, count: int) -> list[PlacedMessage]:
    found: list[PlacedMessage] = []
    while len(found) < count:
        batch = reader.read(limit=1, timeout=WAIT_SECONDS)
        assert batch is not None
        found += batch
    return found


@pytest.mark.parametrize("behind", ["message", "ledger", "chunks"])
def test_reader_continues_after_a_chunked_message_of_another_program(
    broker: Broker, client: pulsar.Client, namespace: str, asking: Any, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """A new source does not get the chunked message again, because only its last chunk has its position."""
    monkeypatch.setattr(reader_module, "FIRST_CHECK_SECONDS", 0.05)
    producer = client.create_producer(f"persistent://{namespace}/orders", chunking_enabled=True)
    producer.send(b"before")
    producer.send(random.Random(1).randbytes(6 * 1024 * 1024))
    with broker.reader("orders") as reader:
        read_count(reader, 2)
        reader._source = Dead()  # type: ignore[attr-defined]  # a state that can't be provoked
        if behind == "ledger":
            asking("PUT", "unload")
        size = 6 * 1024 * 1024 if behind == "chunks" else 1
        producer.send(random.Random(1).randbytes(size))
        producer.send(b"last")
        found = [len(value or b"") for value in values(read_count(reader, 2))]
    assert found == [size, 4]


@pytest.mark.parametrize("compacted", [False, True])
def test_silently_dead_reader_is_reopened(opening: Opening, monkeypatch: pytest.MonkeyPatch, compacted: bool) -> None:
    """The reader reports that it is connected and has no more messages, although there are some."""
    monkeypatch.setattr(reader_module, "FIRST_CHECK_SECONDS", 0.05)
    broker = opening(compacted_prefix="orders" if compacted else "own")
    broker.create_topic("orders")
    fill(broker, "orders", numbered(10), numbered(10, 10))
    with broker.reader("orders", compacted=compacted) as reader:
        found = read_count_at_most(reader, 4)
        reader._source = Dead()  # type: ignore[attr-defined]  # a state that can't be provoked
        while len(found) < 20:
            batch = reader.read(timeout=WAIT_SECONDS)
            assert batch is not None
            found += batch
    assert [placed.message for placed in found] == numbered(20)


def test_an_end_that_was_compacted_away_is_an_end(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """The raw end of a compacted topic may be a delete that no reader gets."""
    monkeypatch.setattr(reader_module, "FIRST_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(reader_module, "LONGEST_CHECK_SECONDS", 0.02)
    broker = opening(compacted_prefix="orders")
    broker.create_topic("orders")
    fill(broker, "orders", [Message(b"a", b"1"), Message(b"b", b"1"), Message(b"b", None)])
    broker.roll("orders")
    broker.compact("orders")
    with broker.reader("orders", compacted=True) as reader:
        assert values(read_count(reader, 1)) == [b"1"]
        assert reader.read(timeout=0.5) is None
        with broker.writer("orders") as writer:
            more = put(writer, [Message(b"c", b"2")])
        assert positions_of(read_count(reader, 1)) == more


def test_placeholders_of_compacted_messages_are_skipped(
    broker: Broker, client: pulsar.Client, namespace: str, asking: Callable[..., Any]
) -> None:
    """Pulsar returns empty messages in place of those of a batch that compaction dropped."""
    producer = client.create_producer(f"persistent://{namespace}/orders", batching_enabled=True)
    for number in range(5):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"k{number % 2}")
    producer.flush()
    asking("PUT", "compaction")
    found = read_all(broker, "orders", compacted=True)
    while len(found) == 5:  # not compacted yet
        found = read_all(broker, "orders", compacted=True)
    assert values(found) == [b"3", b"4"]
    assert [position.batch for position in positions_of(found)] == [3, 4]


def test_reader_does_not_continue_in_a_re_created_topic(opening: Opening, broker: Broker) -> None:
    """The client library continues silently with the new topic and would return its messages."""
    fill(broker, "orders", numbered(3))
    with broker.reader("orders") as reader, broker.reader("orders", LATEST) as late, broker.reader("orders") as idle:
        assert len(read_count(reader, 3)) == 3
        other = opening()
        other.delete_topic("orders")
        other.create_topic("orders")
        fill(other, "orders", numbered(3, 100))
        for each in (reader, late, idle):
            found: list[PlacedMessage] = []
            with pytest.raises(Error) as caught:
                drain(each, found, timeout=WAIT_SECONDS)
            assert isinstance(caught.value, TopicNotFound | PositionTrimmed)
            assert [placed.message for placed in found] in ([], numbered(3))  # prefetched messages may be read


def test_a_topic_of_another_program_has_an_incarnation(
    broker: Broker, client: pulsar.Client, namespace: str, cluster: Cluster
) -> None:
    """It has no incarnation property; its creation time identifies it, unchanged by trimming and unloading."""

    def make() -> str:
        producer = client.create_producer(f"persistent://{namespace}/foreign")
        producer.send(b"x")
        producer.close()
        return broker.incarnation("foreign")

    first = make()
    with broker.writer("foreign") as writer:
        put(writer, numbered(1))
    broker.roll("foreign")
    broker.trim("foreign", 2**62)
    assert broker.incarnation("foreign") == first
    assert INCARNATION not in (ask(cluster.admin, f"persistent/{namespace}/foreign/properties") or {})
    broker.delete_topic("foreign")
    assert make() != first


def test_first_and_last_position_have_batch_indexes(broker: Broker) -> None:
    """The REST interface returns the batch size of the last entry only."""
    first, second = fill(broker, "orders", numbered(3), numbered(4, 3))
    assert broker.first_position("orders") == first[0] == Position(first[0].ledger, 0, 0)
    assert broker.last_position("orders") == second[-1] == Position(second[0].ledger, 0, 3)
    assert broker.position_at("orders", 0) == first[0]


def test_last_position_is_known_without_messages(opening: Opening, broker: Broker) -> None:
    """An empty topic loses its last position when it is reloaded, and the batch index even before."""
    (positions,) = fill(broker, "orders", numbered(3))
    broker.roll("orders")
    broker.trim("orders", 2**62)
    assert read_all(broker, "orders", EARLIEST) == []
    for _ in range(2):
        assert opening().last_position("orders") == positions[-1]
        broker._cluster.ask("PUT", "orders", "unload")  # type: ignore[attr-defined]  # an empty ledger is not rolled


def test_reader_waits_once_for_messages_that_never_arrive(
    broker: Broker, cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reports more messages of a reloaded topic after all were read."""
    fill(broker, "orders", numbered(1))
    with broker.reader("orders", LATEST) as reader:
        assert isinstance(reader, reader_module.PulsarReader)
        assert reader.read() is None
        ask(cluster.admin, f"persistent/{namespace}/orders/unload", "PUT")
        monkeypatch.setattr(reader_module, "RECONNECT_SECONDS", 0.5)
        for _ in range(600):
            reader.read(timeout=0.1)
            if reader._source.is_connected() and reader._source.has_more() is not None:
                break
        assert reader.read(timeout=1.0) is None
        monkeypatch.setattr(reader_module, "RECONNECT_SECONDS", WAIT_SECONDS)
        monkeypatch.setattr(source_module, "ASK_SECONDS", WAIT_SECONDS)
        looks = []
        take = reader._take
        monkeypatch.setattr(reader, "_take", lambda *given: looks.append(given) or take(*given))
        assert reader.read() is None
        assert len(looks) == 1
        fill(broker, "orders", numbered(1, 1))
        assert values(read_count(reader, 1)) == [b"value-1"]


def test_readers_subscriptions_have_the_product_in_their_names(broker: Broker, asking: Callable[..., Any]) -> None:
    """A broker knows by it who reads the log with its markers, whatever else reads the topic."""
    keyed = [Message(b"%d" % number, b"v") for number in range(3)]
    fill(broker, "orders", keyed)

    def subscriptions() -> set[str]:
        return {*asking("GET", "stats")["subscriptions"]} - {"__txnbuffer", "__compaction"}

    with broker.reader("orders") as raw, broker.reader("orders", compacted=True) as compacted:
        assert read_count(raw, 3)
        assert read_count(compacted, 3)
        first = subscriptions()
        asking("PUT", "unload")
        fill(broker, "orders", keyed)
        assert read_count(raw, 3)
        assert read_count(compacted, 3)
        found = first | subscriptions()
        assert len(first) == 2
        assert all(name.startswith("__txnbuffer-reader-") for name in found), found
