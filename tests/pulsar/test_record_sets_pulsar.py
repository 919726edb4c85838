"""Record sets on a real cluster: one message of many records, for all kinds of readers."""

from __future__ import annotations

import os

import pulsar
import pytest
from pulsar_cluster import Cluster
from reading import read_records
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.position import Position
from broker_io.pulsar.messages import decode_messages
from txnbuffer import CommittedReader, Record, SyncClient, SyncTransaction, connect
from txnbuffer.recordset import unpack

LONG = 60.0
TEXTS = [str(number) for number in range(3000)]


def test_sets_are_read_as_records_and_by_plain_clients_by_their_property(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options=options, batching="records") as client,
    ):
        with client.transaction() as txn:
            txn.send_many("orders", TEXTS, keys=[f"key {text}" for text in TEXTS])
            txn.send("orders", b"by itself", batching="messages")
        client.send_many("orders", ["a", "b"])
        with client.transaction() as gone:
            gone.send_many("orders", TEXTS)
            gone.abort()
        records = read_records(client, "orders", 3003)
        assert [record.value for record in records] == [text.encode() for text in (*TEXTS, "by itself", "a", "b")]
        assert [record.seqno for record in records] == [*range(1, 3004)]
        assert records[7].key == b"key 7"
        assert records[7].txn == txn.id
        with CommittedReader(client.client.open_broker(), "orders", start=records[1234].position) as reader:
            batch = reader.read(limit=1, timeout=LONG)
            assert batch is not None
            assert next(iter(batch)).seqno == 1235
        assert exactly_once(client) == [*range(3000)]
        assert in_messages(cluster, f"persistent://{namespace}/orders", 3000) == TEXTS


def exactly_once(client: SyncClient) -> list[int]:
    """The output of two consecutive consumers of a group, each of which stops within a set."""

    def copy(txn: SyncTransaction, record: Record) -> None:
        if record.value is not None and record.value.isdigit():
            txn.send("copied", record.value)

    def stop(txn: SyncTransaction, record: Record) -> None:
        if record.value == b"1500":
            raise KeyError
        copy(txn, record)

    with pytest.raises(KeyError):
        client.process("orders", "group", stop, batch=400)
    for _ in range(100):  # on a busy machine a consumer may end too early and is continued
        client.process("orders", "group", copy, batch=700, idle_timeout=0.5)
        with client.reader("copied") as reader:
            if sum(map(len, iter(reader.read, None))) >= 3000:
                break
    return [int(record.value or b"") for record in read_records(client, "copied", 3000)]


def in_messages(cluster: Cluster, topic: str, count: int) -> list[str]:
    """Values of the first committed records that a plain client gets; a property marks record sets."""
    other = pulsar.Client(cluster.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    found: list[str] = []
    try:
        reader = other.create_reader(topic, pulsar.MessageId.earliest)
        while len(found) < count:
            message = reader.read_next(int(LONG * 1000))
            if "tb.records" in message.properties():
                assert message.message_id().batch_index() == -1
                (row,) = decode_messages([message._message], [message.properties()])
                found += [(record.value or b"").decode() for record in unpack(Position(0, 0), row)]
    finally:
        other.close()
    return found


def test_topic_of_alternating_sets_and_messages_keeps_its_order(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options=options) as client,
    ):
        with client.transaction() as txn:
            for number in range(40):
                batching = "records" if number // 3 % 2 else "messages"
                txn.send_many("orders", [str(number)] * 50, batching=batching)
        found = [int(record.value or b"") for record in read_records(client, "orders", 2000)]
        assert found == [number for number in range(40) for _ in range(50)]
    with open_broker(address, **options) as broker, broker.reader("orders") as reader:
        placed = reader.read(timeout=LONG)
        assert placed is not None
        assert (placed.positions.indexes >= 0).any()
