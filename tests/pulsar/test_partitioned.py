"""Partitioned topics of a real cluster: written, read and consumed, together with Pulsar's clients, while they grow."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pulsar
import pytest
from commands import txnbuf
from pulsar_cluster import Cluster
from reading import read_records
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import NotSupported, UnsafePolicy
from broker_io.partitions import choose, partition_name
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually
from txnbuffer import Outcome, Record, SyncClient, SyncTransaction, connect
from txnbuffer.client.path import routing
from txnbuffer.client.reading import reader as reader_module

LONG = 60.0
WIDE = [partition_name("wide", number) for number in range(3)]
KEYS = [f"key {number}" for number in range(100)]


@contextmanager
def beside_a_service(cluster: Cluster, namespace: str) -> Iterator[SyncClient]:
    ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "PUT", 3)
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    with (
        ServiceProcess(address, "--admin-url", cluster.admin).wait_serving(),
        connect(address, broker_options=options) as client,
    ):
        yield client


def test_a_transaction_on_a_partitioned_topic_is_whole(cluster: Cluster, namespace: str) -> None:
    with beside_a_service(cluster, namespace) as client:
        with client.transaction() as txn:
            txn.send_many("wide", KEYS, keys=KEYS)
            txn.send_many("wide", ["none"] * 3, batching="records")
            txn.send("wide", b"named", partition=2)
        with client.transaction() as gone:
            gone.send_many("wide", KEYS, keys=KEYS)
            gone.abort()
        assert client.outcome(txn.id) is Outcome.COMMIT
        records = read_records(client, "wide", 104)
        assert {record.txn for record in records} == {txn.id}
        places = choose([key.encode() for key in KEYS], 3).tolist()
        for number, name in enumerate(WIDE):
            mine = [record for record in records if record.topic == name]
            assert [record.seqno for record in mine] == [*range(1, len(mine) + 1)]
            wanted = [key.encode() for key, place in zip(KEYS, places, strict=True) if place == number]
            assert [record.key for record in mine if record.key] == wanted
        assert [record.topic for record in records if record.value == b"named"] == [WIDE[2]]
        assert sum(record.value == b"none" for record in records) == 3
        with pytest.raises(NotSupported, match="such as 'wide-partition-0'"), client.stream("wide") as stream:
            stream.next(timeout=LONG)


def test_a_partitioned_topic_grows_while_it_is_written_and_consumed(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "REFRESH", 0.0)
    monkeypatch.setattr(reader_module, "PARTITION_CHECK_INTERVAL", 0.2)

    def copy(txn: SyncTransaction, record: Record) -> None:
        txn.send("copied", record.topic)

    with beside_a_service(cluster, namespace) as client:
        client.client.open_broker().create_topic("copied")
        with client.transaction() as txn:
            for number in range(3):
                txn.send("wide", b"before", partition=number)
        ask(cluster.admin, f"persistent/{namespace}/wide/partitions", "POST", 4)
        with client.transaction() as txn:
            txn.send("wide", b"after", partition=3)
        for _ in range(100):  # on a busy machine a consumer may end too early and is continued
            client.process("wide", "group", copy, idle_timeout=0.5)
            with client.reader("copied") as reader:
                if sum(map(len, iter(reader.read, None))) >= 4:
                    break
        copied = sorted(str(record.value, "utf-8") for record in read_records(client, "copied", 4) if record.value)
        assert copied == [*WIDE, partition_name("wide", 3)]


def test_records_are_exchanged_with_plain_clients(cluster: Cluster, namespace: str) -> None:
    with beside_a_service(cluster, namespace) as client:
        other = pulsar.Client(cluster.url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
        try:
            url = f"persistent://{namespace}/wide"
            consumer = other.subscribe(url, "plain", initial_position=pulsar.InitialPosition.Earliest)
            producer = other.create_producer(url)
            for key in KEYS:
                producer.send(key.encode(), partition_key=key)
            with client.transaction() as txn:
                txn.send_many("wide", KEYS, keys=KEYS)
            assert len(read_records(client, "wide", 200)) == 200
            found: list[str] = []
            while len(found) < 200:
                message = consumer.receive(int(LONG * 1000))
                if "tb.marker" not in message.properties():
                    found.append(message.partition_key())
            assert sorted(found) == sorted(KEYS * 2)
        finally:
            other.close()


def test_policy_of_the_topic_applies_to_its_partitions(cluster: Cluster, namespace: str) -> None:
    path = f"persistent/{namespace}/wide"

    def limits() -> set[int]:
        return {quota["limitSize"] for quota in (ask(cluster.admin, f"{path}/backlogQuotaMap") or {}).values()}

    ask(cluster.admin, f"{path}/partitions", "PUT", 2)
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        broker.writer(WIDE[1]).close()
        eventually(lambda: limits() == {-1})
        broker.delete_topic(WIDE[1])
        broker.create_topic(WIDE[1])
        assert broker.topics() == WIDE[:2]
        ask(cluster.admin, f"{path}/messageTTL?messageTTL=3600", "POST")
        eventually(lambda: ask(cluster.admin, f"{path}/messageTTL") == 3600)
        with pytest.raises(UnsafePolicy, match=f"remove-message-ttl persistent://{namespace}/wide`"):
            broker.writer(WIDE[0])


def test_a_group_of_the_command_line_consumes_and_seeks_all_partitions(cluster: Cluster, namespace: str) -> None:
    address, set_admin = f"{cluster.url}/{namespace}", ("--set", f"pulsar.admin_url={cluster.admin}")

    def consume(*words: str) -> list[str]:
        done = txnbuf("consume", address, "wide", "--group", "g", *set_admin, "--output", "json", *words)
        assert done.returncode == 0, done.stderr
        return sorted(json.loads(line)["value"] for line in done.stdout.splitlines())

    def seek(place: str) -> subprocess.CompletedProcess[str]:
        words = ("--topic", "wide", "--to", place, "--output", "json", *set_admin)
        return txnbuf("groups", "seek", address, "g", *words)

    with beside_a_service(cluster, namespace) as client:
        with client.transaction() as txn:
            txn.send_many("wide", KEYS, keys=KEYS)
        first = consume("--limit", "30", "--batch", "7")
        assert sorted(first + consume("--idle", "3")) == sorted(KEYS)
        moved = json.loads(seek("beginning").stdout)
        assert [row["topic"] for row in moved] == WIDE
        assert consume("--idle", "3") == sorted(KEYS)
        refused = seek("5")
        assert (refused.returncode, "give a start for each partition" in refused.stderr) == (2, True), refused.stderr
        assert json.loads(seek("end").stdout)
        assert consume("--idle", "3") == []


def stored(client: SyncClient) -> list[bytes]:
    """All records of the topic, also those of open transactions."""
    with client.reader("wide", isolation="read_uncommitted", until="now") as reader:
        return [record.value for record in reader.records()]


def test_a_reader_until_now_ends_before_what_an_open_transaction_holds_back(cluster: Cluster, namespace: str) -> None:
    with beside_a_service(cluster, namespace) as client:
        with client.transaction() as txn:
            txn.send_many("wide", KEYS, keys=KEYS)
            txn.commit(wait_visible=True)
        with client.transaction() as held:
            held.send("wide", b"held", partition=1)
            eventually(lambda: b"held" in stored(client))
            client.send("wide", b"behind it", partition=1)
            client.send("wide", b"free", partition=2)
            with client.reader("wide", until="now") as reader:
                found = sorted(record.value.decode() for record in reader.records())
                assert [one.messages for one in reader.held_back()] == [1]
            assert found == sorted([*KEYS, "free"])
            held.abort()
        table = client.read_table("wide", columns=["value"], decode={"value": "text"})
        assert sorted(table["value"].to_pylist()) == sorted([*KEYS, "free", "behind it"])
