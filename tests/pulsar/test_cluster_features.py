"""Features of a cluster on topics with transactions: schemas, deduplication, delayed delivery."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer
from pulsar.schema import Record as SchemaRecord
from pulsar_cluster import Cluster
from reading import read_values
from service_process import ServiceProcess

from broker_io.errors import Error
from broker_io.standalone import ask
from txnbuffer import SyncClient, connect
from txnbuffer.errors import InvalidRequest

LONG = 60.0


class Order(SchemaRecord):  # type: ignore[misc]  # the client library has no types
    apples = Integer(required=True)


SCHEMA = {
    "type": "AVRO",
    "schema": json.dumps({"type": "record", "name": "Order", "fields": [{"name": "apples", "type": "int"}]}),
    "properties": {},
}


@contextmanager
def beside_a_service(cluster: Cluster, namespace: str, **options: Any) -> Iterator[SyncClient]:
    address = f"{cluster.url}/{namespace}"
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options={"admin_url": cluster.admin}, **options) as client,
    ):
        yield client


@contextmanager
def another(cluster: Cluster) -> Iterator[pulsar.Client]:
    client = pulsar.Client(cluster.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    try:
        yield client
    finally:
        client.close()


def test_a_topic_with_a_schema_takes_transactions(cluster: Cluster, namespace: str) -> None:
    """Values are bytes of the schema, encoded by the sender; a consumer with the schema skips markers."""
    ask(cluster.admin, f"persistent/{namespace}/orders", "PUT", {})
    ask(cluster.admin, f"schemas/{namespace}/orders/schema", "POST", SCHEMA)
    url, schema = f"persistent://{namespace}/orders", AvroSchema(Order)
    with another(cluster) as other, beside_a_service(cluster, namespace) as client:
        other.create_producer(url, schema=schema).send(Order(apples=1))
        with client.transaction() as txn:
            txn.send("orders", schema.encode(Order(apples=2)))
            txn.commit(wait_visible=True)
        assert [schema.decode(value).apples for value in read_values(client, "orders", 2)] == [1, 2]
        consumer = other.subscribe(
            url, "plain", schema=schema, initial_position=pulsar.InitialPosition.Earliest, receiver_queue_size=10
        )
        apples: list[int] = []
        while len(apples) < 2:
            message = consumer.receive(int(LONG * 1000))
            apples += [] if "tb.marker" in message.properties() else [message.value().apples]
        assert apples == [1, 2]


@pytest.mark.parametrize("topic", ["orders", "orders-partition-1"])
def test_messages_have_the_schema_version(cluster: Cluster, namespace: str, topic: str) -> None:
    """The cluster registers the schema, and each message has its version for consumers."""
    if topic != "orders":
        ask(cluster.admin, f"persistent/{namespace}/orders/partitions", "PUT", 2)
    with (
        another(cluster) as other,
        beside_a_service(cluster, namespace, schemas={"orders": AvroSchema(Order)}) as client,
    ):
        with client.transaction() as txn:
            txn.send(topic, Order(apples=2))
            txn.send_many(topic, [Order(apples=3), Order(apples=4)])
            txn.commit(wait_visible=True)
        assert ask(cluster.admin, f"schemas/{namespace}/orders/schema")["type"] == "AVRO"
        url = f"persistent://{namespace}/{topic}"
        consumer = other.subscribe(url, "p", schema=AvroSchema(Order), initial_position=pulsar.InitialPosition.Earliest)
        records: list[tuple[int, int]] = []
        while len(records) < 3:
            message = consumer.receive(int(LONG * 1000))
            if "tb.marker" not in message.properties():
                version = message._message.int_schema_version()  # the wrapper has no accessor
                records.append((version, message.value().apples))
        assert records == [(0, 2), (0, 3), (0, 4)]
        decoded = [AvroSchema(Order).decode(value).apples for value in read_values(client, topic, 3)]
        assert decoded == [2, 3, 4]


def test_invalid_use_of_schemas_is_rejected_by_name(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/counts", "PUT", {})
    ask(cluster.admin, f"schemas/{namespace}/counts/schema", "POST", {"type": "INT32", "schema": "", "properties": {}})
    schemas = {"orders": AvroSchema(Order), "counts": AvroSchema(Order)}
    with beside_a_service(cluster, namespace, schemas=schemas) as client:
        with client.transaction() as txn:
            with pytest.raises(InvalidRequest, match="does not match its schema"):
                txn.send("orders", "no order")
            with pytest.raises(InvalidRequest, match="'orders' has a schema"):
                txn.send_many("orders", [Order(apples=1)], batching="records")
            txn.send("orders", Order(apples=1))
            txn.commit()
        with pytest.raises(Error, match="rejects the schema of topic 'counts'"):
            client.send("counts", Order(apples=1))
        with pytest.raises(Error, match="rejects the schema"), client.transaction() as txn:
            txn.send("counts", Order(apples=1))
            txn.commit()
        assert [AvroSchema(Order).decode(value).apples for value in read_values(client, "orders", 1)] == [1]


def test_namespace_that_enforces_schemas_is_rejected_by_name(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"persistent/{namespace}/orders", "PUT", {})
    ask(cluster.admin, f"schemas/{namespace}/orders/schema", "POST", SCHEMA)
    with beside_a_service(cluster, namespace) as client:
        ask(cluster.admin, f"namespaces/{namespace}/schemaValidationEnforced", "POST", True)
        with pytest.raises(Error, match="set-schema-validation-enforce"), client.transaction() as txn:
            txn.send("orders", b"1")


def test_deduplication_by_the_broker_changes_nothing(cluster: Cluster, namespace: str) -> None:
    ask(cluster.admin, f"namespaces/{namespace}/deduplication", "POST", True)
    with beside_a_service(cluster, namespace) as client:
        for number in range(20):
            with client.transaction() as txn:
                txn.send_many("orders", [str(number)] * 10, batching="records" if number % 2 else "messages")
        assert [int(value or b"") for value in read_values(client, "orders", 200)] == [
            number for number in range(20) for _ in range(10)
        ]


def test_delayed_message_is_read_at_its_position(cluster: Cluster, namespace: str) -> None:
    """A delay applies to shared subscriptions only; the log has the message at once."""
    with another(cluster) as other, beside_a_service(cluster, namespace) as client:
        with client.transaction() as txn:
            txn.send("orders", b"1")
        producer = other.create_producer(f"persistent://{namespace}/orders")
        producer.send(b"2", deliver_after=datetime.timedelta(hours=1))
        client.send("orders", b"3")
        assert read_values(client, "orders", 3) == [b"1", b"2", b"3"]
