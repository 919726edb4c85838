"""Applications on a real cluster: they write records to it directly, and a service coordinates transactions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pulsar
import pytest
from client_world import until
from pulsar_cluster import PLUG_IN, Cluster
from streamed import Follower

from broker_io import open_broker
from snapshots.errors import OwnershipLost
from txnbuffer import (
    Client,
    CommittedReader,
    MessageTooLarge,
    Outcome,
    Record,
    ServiceUnavailable,
    Transaction,
    connect,
)
from txnbuffer.client.connection import PendingConnection
from txnbuffer.client.path.record_path import GROUP
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer
from txnbuffer.sinks.relay import Relay
from txnbuffer.sinks.relay_targets import OwnedTarget

LONG = 300.0
"""Seconds after which a hanging test fails."""


class Place:
    """A namespace of the cluster."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.address = f"{cluster.url}/{namespace}"
        self.options = {"admin_url": cluster.admin}
        self.topic_prefix = f"persistent://{namespace}/"
        self.url = cluster.url

    def connect(self, **more: Any) -> PendingConnection:
        return connect(self.address, broker_options=self.options, **more)

    def read(self, topic: str, count: int) -> list[Record]:
        """The first `count` committed records, read as by another process."""
        records: list[Record] = []
        with open_broker(self.address, **self.options) as broker:
            while topic not in broker.topics():
                time.sleep(0.05)
            with CommittedReader(broker, topic) as reader:
                while len(records) < count:
                    batch = reader.read(timeout=LONG)
                    assert batch is not None
                    records += batch
        return records

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Engine]:
        """A service that publishes its address in the decision log."""
        broker = await asyncio.to_thread(lambda: open_broker(self.address, **self.options))
        server = GrpcServer(Limits(), max_clients=10)
        await server.start("127.0.0.1:0")
        engine = await Engine.start(broker, cluster_mode=True, address=f"127.0.0.1:{server.port}")
        await server.serve(engine, ServiceAdmin(engine))
        try:
            yield engine
        finally:
            await server.stop()
            with contextlib.suppress(OwnershipLost):  # if another one took over
                await engine.stop()
            await asyncio.to_thread(broker.close)


@pytest.fixture
def place(cluster: Cluster, namespace: str) -> Place:
    return Place(cluster, namespace)


@asynccontextmanager
async def beside_a_service(place: Place) -> AsyncIterator[Client]:
    async with asyncio.timeout(LONG), place.service(), place.connect() as client:
        yield client


async def test_transaction_over_topics_is_visible_whole(place: Place) -> None:
    async with beside_a_service(place) as client:
        async with client.transaction() as txn:
            await txn.send_many("orders", [b"1", b"2"], keys=["a", None])
            await txn.send("stock", "-3", key=b"\xff", properties={"of": "apples"}, event_time=7)
            await txn.delete("stock", "gone")
        assert await client.outcome(txn.id) is Outcome.COMMIT
        orders = await asyncio.to_thread(place.read, "orders", 2)
        stock = await asyncio.to_thread(place.read, "stock", 2)
        assert [(one.key, one.value, one.seqno, one.txn) for one in orders] == [
            (b"a", b"1", 1, txn.id),
            (None, b"2", 2, txn.id),
        ]
        assert [(one.key, one.value, one.properties, one.event_time) for one in stock] == [
            (b"\xff", b"-3", {"of": "apples"}, 7),
            (b"gone", None, {}, 0),
        ]


async def test_aborted_transaction_is_invisible(place: Place) -> None:
    async with beside_a_service(place) as client:
        async with client.transaction() as first:
            await first.send("orders", b"1")
        with pytest.raises(KeyError):
            async with client.transaction() as txn:
                await txn.send("orders", b"never")
                raise KeyError
        while await client.outcome(txn.id) is None:
            await asyncio.sleep(0.01)
        async with client.transaction() as last:
            await last.send("orders", b"2")
            await last.commit(wait_visible=True)
        records = await asyncio.to_thread(place.read, "orders", 2)
        assert [record.value for record in records] == [b"1", b"2"]


async def test_plain_consumer_gets_a_record_as_one_message(place: Place) -> None:
    async with beside_a_service(place) as client:
        async with client.transaction() as txn:
            await txn.send("orders", "3 apples", key="order-1", properties={"of": "apples"}, event_time=77)
        await client.send("orders", b"ordinary", key="order-2")
        records = await asyncio.to_thread(consume, place, 2, 1)
        assert records == [
            ("order-1", b"3 apples", 77, {"of": "apples", "tb.v": "1", "tb.txn": str(txn.id), "tb.seq": "1"}),
            ("order-2", b"ordinary", 0, {}),
        ]


def entries(place: Place, topic: str) -> list[list[Mapping[str, str]]]:
    """The properties of the messages of each entry of a topic."""
    found: dict[tuple[int, int], list[Mapping[str, str]]] = {}
    with open_broker(place.address, **place.options) as broker, broker.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            for position, message in zip(placed.positions, placed.messages, strict=True):
                found.setdefault(position[:2], []).append(message.properties)
    return [*found.values()]


def decisions(place: Place) -> int:
    """How many messages the decision log has with the decisions of a group of transactions."""
    return sum(message.get("tb.kind") == "group" for entry in entries(place, DECISIONS) for message in entry)


def verify_and_relay(place: Place) -> None:
    """Check that nothing is wrong with the namespace, and relay topic `orders` to topic `copy`."""
    opened = partial(open_broker, place.address, **place.options)
    with opened() as broker:
        assert [found.what for found in verify(broker) if found.level is Level.ERROR] == []
    Relay(opened, "orders", OwnedTarget(opened, "copy", release=True)).run(follow=False)


async def test_many_transactions_take_few_entries_that_plain_consumers_can_read(place: Place) -> None:
    groups, rest = 3, 10
    count = groups * GROUP + rest

    async with beside_a_service(place) as client:
        async with client.transaction() as first:  # so that the topic is registered, and has a writer
            await first.send("orders", b"first", key="k")
            await first.commit(wait_visible=True)
        before = await asyncio.to_thread(decisions, place)
        transactions = [await client.transaction().begin() for _ in range(count)]
        for number, txn in enumerate(transactions):
            await txn.send("orders", str(number), key="k")
        await asyncio.gather(*(txn.commit(wait_visible=True) for txn in transactions))
        found = await asyncio.to_thread(entries, place, "orders")
        # a writer with several appends under way lets them share entries
        records = [entry for entry in found if not all("tb.marker" in message for message in entry)]
        total = sum("tb.marker" in message for entry in found for message in entry)
        assert sum(map(len, found)) - total == 1 + count
        assert len(records) <= 1 + groups + 1
        # one marker and one decision for each group of commits, besides those at the start of the service
        assert total <= 3 + groups + 1
        assert await asyncio.to_thread(decisions, place) - before <= groups + 1
        messages = await asyncio.to_thread(consume, place, 1 + count, total)
        values = {str(number).encode(): str(txn.id) for number, txn in enumerate(transactions)}
        assert {row[1]: row[3]["tb.txn"] for row in messages} == values | {b"first": str(first.id)}
        seen = await asyncio.to_thread(place.read, "orders", count + 1)
        assert [(one.value, one.txn) for one in seen[1:]] == [
            (str(number).encode(), txn.id) for number, txn in enumerate(transactions)
        ]
        follower = Follower(client.stream("orders"))
        await follower.until(count + 1)
        assert follower.table == {b"k": str(count - 1).encode()}
        await asyncio.to_thread(verify_and_relay, place)
        copies = await asyncio.to_thread(consume, place, count + 1, 0, "copy")
        assert [row[:2] for row in copies] == [row[:2] for row in messages]


def consume(
    place: Place, records: int, markers: int, topic: str = "orders"
) -> list[tuple[str, bytes, int, dict[str, str]]]:
    """The records that a plain consumer of a topic gets; it gets markers too, unless the broker has the plug-in."""
    count = records + (0 if PLUG_IN else markers)
    other = pulsar.Client(place.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    try:
        consumer = other.subscribe(
            f"{place.topic_prefix}{topic}", "plain", initial_position=pulsar.InitialPosition.Earliest
        )
        messages = [consumer.receive(int(LONG * 1000)) for _ in range(count)]
        rows = [(one.partition_key(), one.data(), one.event_timestamp(), one.properties()) for one in messages]
        found = [row for row in rows if "tb.marker" not in row[3]]
        assert len(found) == records
        return sorted(found)
    finally:
        other.close()


async def test_each_record_is_processed_exactly_once(place: Place) -> None:
    async def double(txn: Transaction, record: Record) -> None:
        assert record.value is not None
        await txn.send("doubled", str(2 * int(record.value)), key=record.key)

    async with beside_a_service(place) as client:
        await client.send_many("numbers", [str(number) for number in range(25)])
        await client.send("numbers", b"not a number")
        async with client.transaction() as txn:
            await txn.send_many("numbers", [str(number) for number in range(25, 50)])
        for count in (30, 51):  # as two processes, the second of which continues after the first
            work = asyncio.create_task(client.process("numbers", "doubling", double, on_error="skip", batch=10))
            await asyncio.to_thread(place.read, "doubled", count - 1)
            if count == 51:
                await client.send("numbers", b"50")
                await asyncio.to_thread(place.read, "doubled", count)
            work.cancel()
            await asyncio.wait([work])
        records = await asyncio.to_thread(place.read, "doubled", 51)
        assert [int(record.value or b"") for record in records] == [2 * number for number in range(51)]


async def test_ordinary_records_and_readers_need_no_service_and_transactions_wait_for_one(place: Place) -> None:
    async with asyncio.timeout(LONG), place.connect(max_unavailable=1.0) as client:
        await client.send("orders", b"1")
        with pytest.raises(ServiceUnavailable, match="no service has ever taken over namespace"):
            await client.transaction().begin()
        async with await client.reader("orders") as reader:
            batch = await reader.read(timeout=LONG)
            assert batch is not None
            assert [record.value for record in batch] == [b"1"]
        async with place.service():
            await until(lambda: client.session.core.welcomed)
            client.session.max_unavailable = LONG  # registering a topic may take more than a second on a busy cluster
            async with client.transaction() as txn:
                await txn.send("orders", b"2")


async def test_client_accepts_the_address_of_the_service(place: Place) -> None:
    async with asyncio.timeout(LONG), place.service() as engine:
        address = newest_address(engine)
        async with place.connect(service=address) as client, client.transaction() as txn:
            await txn.send("orders", b"1")
        async with place.connect(service="127.0.0.1:1", timeout=0.1, max_unavailable=0.1) as client:
            with pytest.raises(ServiceUnavailable, match="no service answers at"):
                await client.transaction().begin()


def newest_address(engine: Engine) -> str:
    return ServiceDiscovery(engine.broker, "").newest_address()


async def test_service_of_another_namespace_is_rejected(cluster: Cluster, place: Place) -> None:
    namespace = cluster.namespace()
    other = Place(cluster, namespace)
    async with asyncio.timeout(LONG), place.service(), other.service() as theirs:
        address = await asyncio.to_thread(newest_address, theirs)
        async with place.connect(service=address, max_unavailable=1.0) as client:
            with pytest.raises(ServiceUnavailable, match="this service serves another log"):
                async with client.transaction() as txn:
                    await txn.send("orders", b"1")
        assert not [*theirs.coordinator.sessions()]
        async with place.connect() as client, client.transaction() as txn:
            await txn.send("orders", b"2")
        assert [one.value for one in await asyncio.to_thread(place.read, "orders", 1)] == [b"2"]
    await asyncio.to_thread(cluster.drop, namespace)


async def test_rejected_record_affects_no_other(place: Place) -> None:
    async with beside_a_service(place) as client:
        async with client.transaction() as txn:
            await txn.send("orders", b"1")
            with pytest.raises(MessageTooLarge):
                await txn.send("orders", bytes(5 * 1024 * 1024))
            await txn.send("orders", random.Random(1).randbytes(4 * 1024 * 1024))
        with pytest.raises(MessageTooLarge):
            await client.send("orders", bytes(5 * 1024 * 1024))
        assert len(await asyncio.to_thread(place.read, "orders", 2)) == 2


async def test_many_concurrent_transactions_from_threads(place: Place) -> None:
    def work() -> None:
        with place.connect() as client:
            for number in range(10):
                with client.transaction() as txn:
                    txn.send("orders", str(number))
                    txn.send("stock", str(number))

    async with beside_a_service(place):
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(3)))
        for topic in ("orders", "stock"):
            records = await asyncio.to_thread(place.read, topic, 30)
            assert sorted(int(record.value or b"") for record in records) == sorted([*range(10)] * 3)
