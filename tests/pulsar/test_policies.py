"""Policies that would stop or empty a topic: lifted where they are nobody's wish, else named; also later ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pulsar_cluster import Cluster

from broker_io.errors import UnsafePolicy
from broker_io.port import Broker
from broker_io.pulsar.policies import UNLIMITED
from broker_io.testing.contract.base import eventually, numbered, put
from broker_io.testing.standalone import ask

Opening = Callable[..., Broker]
SMALL = {"limitSize": 500, "limitTime": -1, "policy": "producer_request_hold"}
QUOTA = "backlogQuota?backlogQuotaType=destination_storage"


def quotas(cluster: Cluster, namespace: str, topic: str) -> dict[str, Any]:
    found = ask(cluster.admin, f"persistent/{namespace}/{topic}/backlogQuotaMap?applied=true")
    return {kind: {word: quota[word] for word in UNLIMITED} for kind, quota in found.items()}


def has(cluster: Cluster, namespace: str, topic: str, kind: str, quota: dict[str, Any]) -> bool:
    return quotas(cluster, namespace, topic)[kind] == quota


def test_no_quota_counts_what_we_hold(opening: Opening, namespace: str, cluster: Cluster) -> None:
    """A topic's own win over those that its namespace gets later."""
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


def test_a_quota_of_the_namespace_is_named_and_not_for_our_own_topics(
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
def test_a_quota_of_the_topic_is_named_though_it_comes_later(
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


def test_a_time_to_live_that_comes_later_is_told(opening: Opening, namespace: str, cluster: Cluster) -> None:
    broker: Any = opening()
    broker.create_topic("orders")
    broker.check_topic("orders")
    ask(cluster.admin, f"namespaces/{namespace}/messageTTL", "POST", 60)

    def told() -> bool:
        try:
            broker.check_topic("orders")
        except UnsafePolicy as error:
            return "TTL" in str(error)
        return False

    eventually(told)
