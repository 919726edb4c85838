"""Build 2: `topics()`, `last_visible(topic)` and `delete_topic(topic)` of a client, and what its objects print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from access_world import accessed
from client_world import run
from cluster_app import cluster_engine
from reading import read_values
from service_setup import engine_on, eventually

from broker_io import open_broker
from broker_io.batch import Batch
from broker_io.errors import InvalidTopicName, NotAuthorized, NotSupported, TopicNotFound
from broker_io.memory import MemoryBroker
from broker_io.position import Position
from txnbuffer import ChangeBatch, SyncClient, SyncTransaction, Transaction, TransactionAborted, connect
from txnbuffer.client.topic_queries import topic_names
from txnbuffer.errors import TopicInUse
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.service.engine.deletion import delete_topic
from txnbuffer.testing import ServiceProcess


@pytest.fixture(params=["memory", "file", "service"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SyncClient]:
    address = "memory:" if request.param == "memory" else f"file:{tmp_path / 'log'}"
    if request.param == "service":
        address = request.getfixturevalue("txnbuf_service").address
    with connect(address) as client:
        yield client


# topics()


def test_topics_lists_what_there_is_without_internal_ones(client: SyncClient) -> None:
    assert client.topics() == []
    with client.transaction() as txn:
        txn.send("stock", b"1")
        txn.send("orders", b"2")
    client.send("plain", b"3")
    assert client.topics() == ["orders", "plain", "stock"]


def test_a_partitioned_topic_is_listed_once() -> None:
    with MemoryBroker() as broker:
        broker.create_topic("orders")
        broker.create_topic("odd-partition-0")
        broker.partition("parts", 3)
        for number in range(3):
            broker.create_topic(f"parts-partition-{number}")
        assert topic_names(broker) == ["odd-partition-0", "orders", "parts"]


# last_visible()


@pytest.mark.usefixtures("early_sends")
def test_the_last_visible_record(client: SyncClient) -> None:
    client.send("orders", b"1")
    first = client.last_visible("orders")
    with client.transaction() as txn:
        txn.send_many("orders", [b"2", b"3"])
        txn.commit(wait_visible=True)
    last = client.last_visible("orders")
    with client.reader("orders") as reader:
        positions: list[Position] = []
        while len(positions) < 3 and (batch := reader.read(timeout=60.0)) is not None:
            positions += [record.position for record in batch]
    assert [first, last] == [positions[0], positions[2]]
    with client.transaction() as aborted:
        aborted.send("orders", b"never")
        aborted.abort()
    assert client.last_visible("orders") == last
    with client.transaction() as older:
        older.send("orders", b"4")
        assert older.id
        with client.transaction() as newer:
            newer.send("orders", b"5")
        assert client.last_visible("orders") == last
        older.commit(wait_visible=True)
    after = client.last_visible("orders")
    assert after is not None
    assert last is not None
    assert after > last


@pytest.mark.usefixtures("early_sends")
def test_a_topic_without_visible_records_has_none(client: SyncClient) -> None:
    with client.transaction() as aborted:
        aborted.send("orders", b"never")
        aborted.abort()
    assert client.last_visible("orders") is None
    with pytest.raises(TopicNotFound):
        client.last_visible("nothing")
    with pytest.raises(InvalidTopicName):
        client.last_visible(5)  # type: ignore[arg-type]  # on purpose


@pytest.mark.usefixtures("early_sends")
def test_the_last_visible_record_is_found_before_many_aborted_ones_and_in_older_ledgers() -> None:
    address = "memory:last-visible"
    with connect(address) as client, open_broker(address) as broker:
        client.send_many("orders", [b"%d" % index for index in range(10)])
        for count in (3000, 300):
            broker.roll("orders")
            with client.transaction() as aborted:
                aborted.send_many("orders", [b"never"] * count)
                aborted.abort()
        with client.reader("orders") as reader:
            batch = reader.read(timeout=30)
        assert batch is not None
        assert client.last_visible("orders") == batch.positions.last
        broker.trim("orders", broker.ledgers("orders")[1].ledger)
        assert client.last_visible("orders") is None


# delete_topic()


def test_a_deleted_topic_is_gone_and_its_name_is_free(client: SyncClient) -> None:
    with client.transaction() as txn:
        txn.send("orders", b"1", key=b"k")
        txn.send("stock", b"2")
    client.delete_topic("orders")
    assert client.topics() == ["stock"]
    with pytest.raises(TopicNotFound):
        client.reader("orders")
    with pytest.raises(TopicNotFound, match="no topic 'orders' to delete"):
        client.delete_topic("orders")
    with client.transaction() as txn:
        txn.send("orders", b"3")
        txn.send("stock", b"4")
        txn.commit(wait_visible=True)
    assert read_values(client, "orders", 1) == [b"3"]
    assert read_values(client, "stock", 2) == [b"2", b"4"]
    client.send("orders", b"5", key=b"k")
    with client.stream("orders", to=2) as stream:
        seqnos = [change.seqno for batch in stream if isinstance(batch, ChangeBatch) for change in batch]
    assert seqnos == [1, 2]


def test_a_topic_with_ordinary_sends_only_can_be_deleted(client: SyncClient) -> None:
    client.send("plain", b"1")
    client.delete_topic("plain")
    assert client.topics() == []
    client.send("plain", b"2")
    assert read_values(client, "plain", 1) == [b"2"]


def test_a_deletion_lasts(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client:
        with client.transaction() as txn:
            txn.send("orders", b"1")
            txn.send("kept", b"1")
        client.send("plain", b"1")
    with connect(address) as client:  # `plain` was not opened by this service
        client.delete_topic("plain")
        client.delete_topic("orders")
    with connect(address) as client:
        assert client.topics() == ["kept"]
        with client.transaction() as txn:
            txn.send("orders", b"2")
            txn.send("plain", b"2")
        assert read_values(client, "orders", 1) == [b"2"]
        assert read_values(client, "plain", 1) == [b"2"]


def test_deletion_cannot_be_confused_with_that_of_a_key(client: SyncClient) -> None:
    client.send("orders", b"1", key=b"k")
    assert not hasattr(Transaction, "delete_topic")
    assert not hasattr(SyncTransaction, "delete_topic")
    for arguments in ((), ("orders", b"k")):
        with pytest.raises(TypeError):
            client.delete_topic(*arguments)
    with pytest.raises(TypeError):
        client.delete("orders")  # type: ignore[call-arg]  # on purpose
    for name in (5, b"orders", ["orders"], "", None):
        with pytest.raises(InvalidTopicName):
            client.delete_topic(name)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidTopicName, match="is internal"):
        client.delete_topic("__txnbuffer_snapshots")
    assert read_values(client, "orders", 1) == [b"1"]


def refused(client: SyncClient, *texts: str) -> None:
    with pytest.raises(TopicInUse, match="'orders' is in use and was not deleted") as caught:
        client.delete_topic("orders")
    for text in texts:
        assert text in str(caught.value)


def test_an_open_transaction_prevents_it(client: SyncClient) -> None:
    with client.transaction() as txn:
        txn.send("orders", b"1")
        assert txn.id
        refused(client, f"transaction {txn.id} is open")
    assert read_values(client, "orders", 1) == [b"1"]
    client.delete_topic("orders")


def test_an_open_transaction_of_another_client_prevents_it(txnbuf_service: ServiceProcess) -> None:
    with connect(txnbuf_service.address) as client, connect(txnbuf_service.address) as other:
        with other.transaction() as txn:
            txn.send("orders", b"1")
            with client.reader("orders", isolation="read_uncommitted", wait=True) as reader:
                assert reader.read(timeout=30) is not None
            refused(client, f"transaction {txn.id} is open")
        assert read_values(client, "orders", 1) == [b"1"]


def test_a_transaction_that_has_just_committed_or_aborted_does_not(client: SyncClient) -> None:
    for number in range(5):
        with client.transaction() as txn:
            txn.send("orders", b"%d" % number)
        with pytest.raises(ZeroDivisionError), client.transaction() as aborted:
            aborted.send("orders", b"never")
            raise ZeroDivisionError
        client.delete_topic("orders")


def test_a_stream_prevents_it(client: SyncClient) -> None:
    client.send("orders", b"1", key=b"k")
    with client.stream("orders") as stream:
        assert stream.next(timeout=30) is not None
        refused(client, "a change stream of", "reads it: close it")
        client.send("orders", b"2", key=b"k")
        assert stream.next(timeout=30) is not None
    client.delete_topic("orders")


def test_a_durable_cursor_prevents_it(client: SyncClient) -> None:
    client.send("orders", b"1")
    client.cursors.add("orders", "billing")
    refused(client, "the durable cursor 'billing' is on it")
    client.cursors.remove("orders", "billing")
    client.delete_topic("orders")


def test_a_group_prevents_it(client: SyncClient) -> None:
    client.send("orders", b"1")
    messages: list[str] = []

    def handle(txn: SyncTransaction, record: Any) -> None:
        try:
            client.delete_topic("orders")
        except TopicInUse as error:
            messages.append(str(error))

    client.process("orders", "billing", handle, idle_timeout=1)
    assert "consumer group 'billing' reads it: stop its members, then forget_group('billing', 'orders')" in messages[0]
    refused(client, "consumer group 'billing' reads it: forget_group('billing', 'orders')")
    client.forget_group("billing", "orders")
    client.delete_topic("orders")


async def test_records_that_are_sent_meanwhile_are_lost_only_with_an_error(tmp_path: Path) -> None:
    async with connect(f"file:{tmp_path / 'log'}") as client:
        durable = 0
        stop = False

        async def send() -> None:
            nonlocal durable
            while not stop:
                try:
                    async with client.transaction() as txn:
                        await txn.send("orders", b"1")
                        await asyncio.sleep(0)
                except (TransactionAborted, TopicNotFound):
                    pass
                else:
                    durable += 1

        senders = [asyncio.ensure_future(send()) for _ in range(5)]
        refused = deleted = 0
        began = time.monotonic()
        while time.monotonic() - began < 5 or not deleted:
            await asyncio.sleep(0.1)
            try:
                await client.delete_topic("orders")
                deleted += 1
            except TopicInUse:
                refused += 1
                stop = refused >= 2
            except TopicNotFound:
                if stop:
                    break
        stop = True
        await asyncio.gather(*senders)
        assert durable
    with connect(f"file:{tmp_path / 'log'}") as client:
        client.send("orders", b"last")
        with client.reader("orders") as reader:
            found: list[bytes | None] = []
            while b"last" not in found:
                batch = reader.read(timeout=120.0)
                assert batch is not None
                found += [record.value for record in batch]
        assert found[-1] == b"last"


def test_the_log_is_sound_afterwards() -> None:
    with MemoryBroker() as broker:

        async def test() -> None:
            async with engine_on(broker) as engine:
                await engine.topics.register("orders")
                await engine.topics.register("stock")
                await delete_topic(engine, "orders")
                assert engine.topics.get("orders") is None
                assert "orders" not in engine.coordinator.topics()
                assert "orders" not in broker.topics()
                await engine.topics.register("orders")
                await eventually(lambda: "orders" in engine.coordinator.topics())

        run(test())
        assert {found.level for found in verify(broker)} == {Level.OK}


def test_a_deletion_that_was_interrupted_is_completed_by_the_next_owner(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with connect(address) as client, client.transaction() as txn:
        txn.send("orders", b"1")
        txn.send("stock", b"1")
    with open_broker(address) as broker:
        broker.delete_topic("orders")  # and then the machine crashed
    with connect(address) as client:
        assert client.topics() == ["stock"]
        with client.transaction() as txn:
            txn.send("orders", b"2")
            txn.send("stock", b"2")
        assert read_values(client, "orders", 1) == [b"2"]
        assert read_values(client, "stock", 2) == [b"1", b"2"]


async def test_only_operators_of_the_topic_may_delete_it(tmp_path: Path) -> None:
    async with engine_on(MemoryBroker()) as engine, accessed(engine, tmp_path) as service:
        async with service.connect("root") as client, client.transaction() as txn:
            await txn.send("a", b"1")
            await txn.send("b", b"1")
        for principal in ("writer", "reader", "processor"):
            async with service.connect(principal) as client:
                with pytest.raises(NotAuthorized, match=f"'{principal}' may not operate topic 'a'"):
                    await client.delete_topic("a")
        async with service.connect("operator") as client:
            with pytest.raises(NotAuthorized, match="'operator' may not operate topic 'b'"):
                await client.delete_topic("b")
            await client.delete_topic("a")
        async with service.connect("root") as client:
            assert await client.topics() == ["b"]
            await client.delete_topic("b")
            assert await client.topics() == []


# On a cluster


def test_on_a_cluster_the_service_deletes_it_and_notices_that() -> None:
    with MemoryBroker() as cluster:

        async def test() -> None:
            async with cluster_engine(cluster) as (engine, _):
                await engine.topics.register("orders")
                await eventually(lambda: "orders" in engine.coordinator.topics())
                await delete_topic(engine, "orders")
                assert engine.topics.get("orders") is None
                assert "orders" not in cluster.topics()
                assert "orders" not in engine.coordinator.topics()
                await engine.topics.register("orders")
                topic = engine.topics.get("orders")
                assert topic is not None
                assert topic.followed is not None

        run(test())
        assert {found.level for found in verify(cluster)} == {Level.OK}


def test_partitions_are_left_to_the_cluster() -> None:
    with MemoryBroker() as cluster:

        async def test() -> None:
            async with cluster_engine(cluster) as (engine, _):
                cluster.partition("orders", 2)
                for name in ("orders", "orders-partition-0"):
                    with pytest.raises(NotSupported, match="'orders' is partitioned"):
                        await delete_topic(engine, name)

        run(test())
        assert "orders-partition-0" in cluster.topics()


def test_ordinary_records_of_a_cluster_can_be_deleted_too() -> None:
    with MemoryBroker() as cluster:

        async def test() -> None:
            async with cluster_engine(cluster) as (engine, _):
                cluster.create_topic("plain")
                with cluster.writer("plain") as writer:
                    writer.append(Batch.of([]))
                await delete_topic(engine, "plain")
                assert "plain" not in cluster.topics()

        run(test())


# What is printed


def test_objects_of_a_client_are_readable() -> None:
    with connect("memory:") as client:
        assert repr(client) == "<SyncClient of memory:, no open transactions>"
        txn = client.transaction()
        assert repr(txn) == "<SyncTransaction not begun>"
        named = client.transaction(name="billing", number=7)
        assert repr(named) == "<SyncTransaction billing:7 not begun>"
        with txn:
            txn.send("orders", b"1")
            assert txn.id
            assert repr(client) == "<SyncClient of memory:, 1 open transaction>"
            assert repr(txn).startswith(f"<SyncTransaction {txn.id} open, ")
        assert repr(txn) == f"<SyncTransaction {txn.id} committed, records: 1 for 'orders'>"
        with client.transaction() as aborted:
            aborted.send("orders", b"2")
            aborted.abort()
        assert "ended" in repr(aborted)
        with client.reader("orders") as reader:
            assert repr(reader) == "<CommittedReader of 'orders', open>"
        assert repr(reader) == "<CommittedReader of 'orders', closed>"
        with client.stream("orders", to="now") as stream:
            assert repr(stream) == "<SyncStream of 'orders', not opened, open>"
            stream.next(timeout=30)
            assert "at seqno " in repr(stream)
        assert "closed" in repr(stream)
    assert repr(client) == "<SyncClient of memory:, closed>"


async def test_objects_of_an_asyncio_client_are_readable(tmp_path: Path) -> None:
    async with connect(f"file:{tmp_path}/log") as client:
        assert repr(client) == f"<Client of file:{tmp_path}/log, no open transactions>"
        async with client.transaction() as txn:
            await txn.send("orders", b"1")
            assert repr(txn) == f"<Transaction {txn.id} open, records: 1 for 'orders'>"
            assert "1 open transaction>" in repr(client)
        assert "committed" in repr(txn)
        async with await client.reader("orders") as reader:
            assert repr(reader) == "<AsyncReader of 'orders', open>"
        async with client.stream("orders") as stream:
            assert repr(stream) == "<ChangeStream of 'orders', not opened, open>"
