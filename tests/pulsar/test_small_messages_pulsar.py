"""A cluster with a small message limit: larger messages are rejected, others commit, and the service continues."""

from __future__ import annotations

import pytest
from service_process import ServiceProcess

from broker_io import open_broker
from broker_io.errors import MessageTooLarge
from broker_io.standalone import Standalone
from txnbuffer import SyncClient, connect

KIB = 1024
TOPICS = [f"{number:03}-" + "long" * 95 for number in range(130)]


def commit(client: SyncClient, topics: list[str]) -> None:
    with client.transaction(timeout=300) as txn:
        for topic in topics:
            txn.send(topic, b"x" * 100)


def test_message_limit_is_that_of_the_cluster(odd_broker: Standalone) -> None:
    address = f"{odd_broker.url}/{odd_broker.namespace()}"
    with open_broker(address, admin_url=odd_broker.admin) as broker:
        assert broker.max_message_bytes == 48 * KIB
    service = ServiceProcess(address, "--admin-url", odd_broker.admin).wait_serving()
    try:
        with connect(address, broker_options={"admin_url": odd_broker.admin}) as client:
            with client.transaction() as txn:
                for _ in range(300):
                    txn.send("many", b"x" * 3000, key="k", properties={"p": "v" * 300})
            commit(client, TOPICS[:80])
            with pytest.raises(MessageTooLarge, match="130 topics"):
                commit(client, TOPICS)
            with pytest.raises(MessageTooLarge):
                client.send("many", b"x" * 60 * KIB)
            commit(client, TOPICS[:80])
            with client.reader(["many", TOPICS[0], TOPICS[100]]) as reader:
                found: list[str] = []
                while len(found) < 302:
                    batch = reader.read(timeout=300)
                    assert batch is not None
                    found += [record.topic for record in batch]
        assert found.count("many") == 300
        assert found.count(TOPICS[0]) == 2
        assert service.process.poll() is None
    finally:
        service.kill()
