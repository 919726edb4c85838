"""Build 3: a topic's registered schema is used by readers and checked by senders, on Pulsar's own schema registry."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer
from pulsar.schema import Record as SchemaRecord
from pulsar_cluster import Cluster
from reading import read_values
from service_process import ServiceProcess

from broker_io.batch import Batch, Message, Numbers
from broker_io.memory import MemoryBroker
from broker_io.port import SCHEMA_VERSION, TopicSchema
from broker_io.standalone import ask
from txnbuffer import (
    AvroSerializer,
    CommittedReader,
    JsonSerializer,
    RegistryDeserializer,
    RegistrySerializer,
    SyncClient,
    UndecodableValue,
    connect,
)
from txnbuffer.client.serializers import Serializers
from txnbuffer.errors import InvalidRequest, ServiceUnavailable

LONG = 60.0
APPLES = {"name": "apples", "type": "int"}
PEARS = {"name": "pears", "type": "int", "default": 7}
FIRST = {"type": "record", "name": "Order", "fields": [APPLES]}
SECOND = {"type": "record", "name": "Order", "fields": [PEARS, APPLES]}
OTHER = {"type": "record", "name": "Other", "fields": [{"name": "x", "type": "string"}]}


class RegistryBroker(MemoryBroker):
    """A log in memory with a schema registry, whose messages have the versions in the property `v`."""

    def __init__(self) -> None:
        super().__init__()
        self.schemas: dict[str, list[TopicSchema]] = {}
        self.declared: dict[str, TopicSchema] = {}
        self.requests = 0
        self.away = 0

    def add(self, topic: str, kind: str, definition: Any) -> None:
        versions = self.schemas.setdefault(topic, [])
        versions.append(TopicSchema(kind, json.dumps(definition), len(versions)))

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        self.requests += 1
        if self.away:
            self.away -= 1
            raise ServiceUnavailable("the registry is away")
        found = self.schemas.get(topic, [])
        return found[-1 if version is None else version] if found else None

    def write_with(self, topic: str, schema: TopicSchema) -> None:
        self.declared[topic] = schema

    def put(self, topic: str, *values: bytes | None, versions: list[int] | None = None) -> None:
        self.create_topic(topic)
        batch = Batch.of([Message(b"k", value) for value in values])
        if versions is not None:
            column = np.array(versions, np.int64)
            batch = Batch(batch.keys, batch.values, {SCHEMA_VERSION: Numbers(column, column >= 0)})
        with self.writer(topic) as writer:
            writer.append(batch).result()


@pytest.fixture
def broker() -> Iterator[RegistryBroker]:
    with RegistryBroker() as broker:
        broker.add("orders", "avro", FIRST)
        broker.add("orders", "avro", SECOND)
        broker.add("prices", "json", FIRST)
        broker.add("counts", "int32", "")
        yield broker


def values(broker: RegistryBroker, topic: str, **options: Any) -> list[Any]:
    with CommittedReader(broker, topic, deserializers=RegistryDeserializer(), **options) as reader:
        return [record.value for record in reader.records(timeout=0.0)]


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_each_value_is_decoded_with_the_version_it_was_written_with(broker: RegistryBroker, isolation: str) -> None:
    first, second = AvroSerializer(FIRST), AvroSerializer(SECOND)
    broker.put(
        "orders",
        first.dumps({"apples": 1}), second.dumps({"apples": 2, "pears": 3}), second.dumps({"apples": 4}), None,
        versions=[0, 1, -1, -1],
    )  # fmt: skip
    found = [{"apples": 1}, {"apples": 2, "pears": 3}, {"apples": 4, "pears": 7}, None]
    assert values(broker, "orders", isolation=isolation) == found
    assert broker.requests == 3  # the newest, and both versions


def test_json_values_are_decoded(broker: RegistryBroker) -> None:
    broker.put("prices", b'{"apples":1}', b"{")
    with CommittedReader(broker, "prices", deserializers={"prices": RegistryDeserializer()}) as reader:
        records = reader.records(timeout=0.0)
        assert next(records).value == {"apples": 1}
        with pytest.raises(UndecodableValue):
            next(records)


def test_a_read_while_the_registry_is_away_loses_no_record(broker: RegistryBroker) -> None:
    broker.put("prices", b'{"apples":1}')
    broker.away = 1
    with CommittedReader(broker, "prices", deserializers=RegistryDeserializer()) as reader:
        with pytest.raises(ServiceUnavailable):
            reader.read()
        assert [record.value for record in reader.read() or ()] == [{"apples": 1}]


def test_senders_encode_with_the_newest_schema_and_declare_it(broker: RegistryBroker) -> None:
    serializers = Serializers(RegistrySerializer())
    serializers.use(broker)
    assert serializers.must_load("orders-partition-1", None)
    serializer = serializers.of("orders-partition-1", None)
    assert serializer is not None
    assert serializer.dumps({"apples": 2}) == AvroSerializer(SECOND).dumps({"apples": 2, "pears": 7})
    assert broker.declared == {"orders": broker.schemas["orders"][1]}
    assert not serializers.must_load("orders", None)
    assert not serializers.must_load("prices", JsonSerializer())
    with pytest.raises(InvalidRequest, match="'orders' has a schema"):
        serializers.check_sets("orders")


@pytest.mark.parametrize(
    ("topic", "wrong"),
    [
        ("orders", {"pears": 1}), ("orders", {"apples": "x"}), ("orders", {"apples": 1, "plums": 2}), ("orders", 5),
        ("prices", {"pears": 1}), ("prices", {"apples": "x"}), ("prices", [1]),
    ],
)  # fmt: skip
def test_senders_refuse_what_does_not_match_the_schema(broker: RegistryBroker, topic: str, wrong: Any) -> None:
    serializers = Serializers({topic: RegistrySerializer()})
    serializers.use(broker)
    serializer = serializers.of(topic, None)
    assert serializer is not None
    with pytest.raises(InvalidRequest, match="does not match the schema of its topic"):
        serializer.dumps(wrong)


@pytest.mark.parametrize(
    ("topic", "words"), [("none", "has no schema in the registry"), ("counts", "of type int32: only Avro and JSON")]
)
def test_topics_without_a_usable_schema_are_named(broker: RegistryBroker, topic: str, words: str) -> None:
    serializers = Serializers(RegistrySerializer())
    serializers.use(broker)
    with pytest.raises(InvalidRequest, match=rf"'{topic}'.* {words}|{words}"):
        serializers.of(topic, None)
    broker.put(topic, b"x")
    with pytest.raises(InvalidRequest, match=words):
        values(broker, topic)


def test_other_logs_have_no_registry() -> None:
    with connect("memory:", serializer=RegistrySerializer(), deserializers=RegistryDeserializer()) as client:
        with pytest.raises(InvalidRequest, match="needs a Pulsar cluster"):
            client.send("orders", {"apples": 1})
        client.send("orders", b"x", serializer=JsonSerializer())
        with pytest.raises(InvalidRequest, match="needs a Pulsar cluster"):
            client.reader("orders")


# On a real Pulsar


class Order(SchemaRecord):  # type: ignore[misc]  # the client library has no types
    apples = Integer(required=True)


def register(cluster: Cluster, namespace: str, topic: str, kind: str, definition: Any) -> None:
    body = {"type": kind, "schema": json.dumps(definition), "properties": {}}
    ask(cluster.admin, f"schemas/{namespace}/{topic}/schema", "POST", body)


@contextmanager
def a_client(cluster: Cluster, namespace: str, **options: Any) -> Iterator[SyncClient]:
    address = f"{cluster.url}/{namespace}"
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options={"admin_url": cluster.admin}, **options) as client,
    ):
        yield client


@pytest.mark.timeout(900)
def test_registered_schemas_of_a_cluster(cluster: Cluster, namespace: str) -> None:
    """Avro with two versions, also written by another program; JSON; values that do not match."""
    for topic in ("orders", "prices", "plain"):
        ask(cluster.admin, f"persistent/{namespace}/{topic}", "PUT", {})
    register(cluster, namespace, "orders", "AVRO", FIRST)
    register(cluster, namespace, "prices", "JSON", FIRST)
    url = f"persistent://{namespace}/orders"
    other = pulsar.Client(cluster.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    options = {"serializer": RegistrySerializer(), "deserializers": RegistryDeserializer()}
    try:
        other.create_producer(url, schema=AvroSchema(Order)).send(Order(apples=1))
        with a_client(cluster, namespace, **options) as client:
            with client.transaction() as txn:
                txn.send("orders", {"apples": 2})
                with pytest.raises(InvalidRequest, match="does not match the schema of its topic"):
                    txn.send("orders", {"apples": "two"})
                txn.send("prices", {"apples": 5})
                txn.commit(wait_visible=True)
            with pytest.raises(InvalidRequest, match="'plain' has no schema"):
                client.send("plain", {"apples": 1})
            assert read_values(client, "orders", 2) == [{"apples": 1}, {"apples": 2}]
            assert read_values(client, "prices", 1) == [{"apples": 5}]
            consumer = other.subscribe(
                url, "plain", schema=AvroSchema(Order), initial_position=pulsar.InitialPosition.Earliest
            )
            seen: list[tuple[int, int]] = []
            while len(seen) < 2:
                message = consumer.receive(int(LONG * 1000))
                if "tb.marker" not in message.properties():
                    seen.append((message._message.int_schema_version(), message.value().apples))
            assert seen == [(0, 1), (0, 2)]
            register(cluster, namespace, "orders", "AVRO", SECOND)

            async def later() -> None:
                address = f"{cluster.url}/{namespace}"
                async with connect(address, broker_options={"admin_url": cluster.admin}, **options) as new:
                    await new.send("orders", {"apples": 3})
                    async with await new.reader("orders") as reader:
                        found = []
                        async for record in reader.records(timeout=LONG):
                            found.append(record.value)
                            if len(found) == 3:
                                break
                    assert found == [{"apples": 1}, {"apples": 2}, {"apples": 3, "pears": 7}]

            asyncio.run(later())
    finally:
        other.close()
