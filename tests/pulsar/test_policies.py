"""Policies that would stop or empty a topic: overridden on internal topics, else reported; also later changes."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pulsar_cluster import Cluster
from service_process import ServiceProcess

from broker_io.errors import UnsafePolicy
from broker_io.port import Broker
from broker_io.pulsar.policies import UNLIMITED
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually, numbered, put
from txnbuffer import connect
from txnbuffer.cli.admin_client import ServiceAddress as Called
from txnbuffer.cli.admin_client import call

Opening = Callable[..., Broker]
SMALL = {"limitSize": 500, "limitTime": -1, "policy": "producer_request_hold"}
QUOTA = "backlogQuota?backlogQuotaType=destination_storage"


def quotas(cluster: Cluster, namespace: str, topic: str) -> dict[str, Any]:
    found = ask(cluster.admin, f"persistent/{namespace}/{topic}/backlogQuotaMap?applied=true")
    return {kind: {word: quota[word] for word in UNLIMITED} for kind, quota in found.items()}


def has(cluster: Cluster, namespace: str, topic: str, kind: str, quota: dict[str, Any]) -> bool:
    return quotas(cluster, namespace, topic)[kind] == quota


def test_no_quota_applies_to_kept_messages(opening: Opening, namespace: str, cluster: Cluster) -> None:
    """Quotas of a topic override those that its namespace gets later."""
    broker = opening()
    for topic in ("orders", "__txnbuffer_own"):
        broker.create_topic(topic)
        eventually(partial(has, cluster, namespace, topic, "destination_storage", UNLIMITED))
    ask(cluster.admin, f"namespaces/{namespace}/{QUOTA}", "POST", SMALL)
    with broker.writer("orders") as writer:
        put(writer, numbered(100))
    ask(cluster.admin, f"persistent/{namespace}/orders/unload", "PUT")
    with broker.writer("orders", exclusive=True) as writer:
        put(writer, numbered(1))
    assert set(map(str, quotas(cluster, namespace, "orders").values())) == {str(UNLIMITED)}
    assert broker.topics() == ["__txnbuffer_own", "orders"]


def test_quota_of_the_namespace_is_reported_except_for_internal_topics(
    opening: Opening, namespace: str, cluster: Cluster
) -> None:
    ask(cluster.admin, f"namespaces/{namespace}/{QUOTA}", "POST", SMALL)
    broker = opening()
    with pytest.raises(UnsafePolicy, match=f"namespaces remove-backlog-quota {namespace} -t destination_storage"):
        broker.create_topic("orders")
    broker.create_topic("__txnbuffer_own")
    with broker.writer("__txnbuffer_own", exclusive=True) as writer:
        put(writer, numbered(3))


@pytest.mark.parametrize(
    ("kind", "quota"),
    [
        ("destination_storage", SMALL),
        ("message_age", {"limitSize": -1, "limitTime": 60, "policy": "producer_exception"}),
        ("message_age", {"limitSize": -1, "limitTime": 60, "policy": "consumer_backlog_eviction"}),
    ],
)
def test_later_quota_of_the_topic_is_reported(
    opening: Opening, namespace: str, cluster: Cluster, kind: str, quota: dict[str, Any]
) -> None:
    broker: Any = opening()
    for topic in ("orders", "__txnbuffer_own"):
        broker.create_topic(topic)
        ask(cluster.admin, f"persistent/{namespace}/{topic}/backlogQuota?backlogQuotaType={kind}", "POST", quota)
        eventually(partial(has, cluster, namespace, topic, kind, quota))
    with pytest.raises(UnsafePolicy, match=f"topicPolicies remove-backlog-quota persistent://{namespace}/orders -t"):
        broker.check_topic("orders")
    broker.check_topic("__txnbuffer_own")
    eventually(partial(has, cluster, namespace, "__txnbuffer_own", kind, UNLIMITED))


def ttl(cluster: Cluster, namespace: str, topic: str) -> int:
    """The effective TTL of a topic in seconds."""
    return int(ask(cluster.admin, f"persistent/{namespace}/{topic}/messageTTL?applied=true"))


def danger(broker: Any, topic: str) -> str:
    try:
        broker.check_topic(topic)
    except UnsafePolicy as error:
        return str(error)
    return ""


def test_later_ttl_of_the_namespace_does_not_apply_to_its_topics(
    opening: Opening, namespace: str, cluster: Cluster
) -> None:
    broker: Any = opening()
    for topic in ("orders", "__txnbuffer_own"):
        broker.create_topic(topic)
        eventually(partial(lambda name: ask(cluster.admin, f"persistent/{namespace}/{name}/messageTTL") == 0, topic))
    ask(cluster.admin, f"namespaces/{namespace}/messageTTL", "POST", 60)
    eventually(lambda: ask(cluster.admin, f"namespaces/{namespace}/messageTTL") == 60)
    assert [ttl(cluster, namespace, topic) for topic in ("orders", "__txnbuffer_own")] == [0, 0]
    assert danger(broker, "orders") == ""
    with pytest.raises(UnsafePolicy, match=f"TTL of 60 s .* `pulsar-admin namespaces remove-message-ttl {namespace}`"):
        broker.create_topic("late")


def test_later_ttl_of_a_topic_is_reported_except_for_internal_topics(
    opening: Opening, namespace: str, cluster: Cluster
) -> None:
    broker: Any = opening()
    for topic in ("orders", "__txnbuffer_own"):
        broker.create_topic(topic)
        eventually(partial(lambda name: ask(cluster.admin, f"persistent/{namespace}/{name}/messageTTL") == 0, topic))
        ask(cluster.admin, f"persistent/{namespace}/{topic}/messageTTL?messageTTL=60", "POST")
        eventually(partial(lambda name: ttl(cluster, namespace, name) == 60, topic))
    name = f"persistent://{namespace}/orders"
    assert f"run `pulsar-admin topicPolicies remove-message-ttl {name}`" in danger(broker, "orders")
    assert danger(broker, "__txnbuffer_own") == ""
    eventually(lambda: ttl(cluster, namespace, "__txnbuffer_own") == 0)
    ask(cluster.admin, f"persistent/{namespace}/orders/messageTTL", "DELETE")
    eventually(lambda: danger(broker, "orders") == "")


def test_service_reports_a_ttl_at_its_next_policy_check(cluster: Cluster, namespace: str) -> None:
    address, options = f"{cluster.url}/{namespace}", {"admin_url": cluster.admin}
    flags = ["--admin-url", cluster.admin, "--set", "retention.check_seconds=0.5"]
    with ServiceProcess(address, *flags) as service, connect(address, broker_options=options) as client:
        with client.transaction() as txn:
            txn.send("orders", b"1")

        def told() -> bool:
            if ttl(cluster, namespace, "orders") != 60:  # the service may not have overridden it yet
                ask(cluster.admin, f"persistent/{namespace}/orders/messageTTL?messageTTL=60", "POST")
            return said(service.http, "txnbuffer_topics_endangered 1")

        eventually(told)
        asked = Called(f"127.0.0.1:{service.port}")
        (row,) = [row for row in call(asked, "List") if row["topic"] == "orders"]
        assert "a message TTL of 60 s drops messages that are still needed" in row["problem"]
        eventually(lambda: any("policies of orders" in str(event.get("what")) for event in service.events))
        ask(cluster.admin, f"persistent/{namespace}/orders/messageTTL", "DELETE")
        eventually(partial(said, service.http, "txnbuffer_topics_endangered 0"))


def said(port: int, line: str) -> bool:
    """Whether the metrics of a service have a line."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
        return line in answer.read().decode()
