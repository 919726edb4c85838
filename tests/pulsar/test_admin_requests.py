"""The REST requests of starting services and clients, which wait for each answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from service_setup import eventually

from broker_io.port import AnnotatedBroker, Broker
from broker_io.pulsar.admin import AdminClient
from broker_io.system import SystemClock
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.standby.takeover import Identity, take_over

OWN = ("__txnbuffer_decisions", "__txnbuffer_snapshots")


def start(broker: Broker, address: str = "") -> None:
    opened = take_over(
        broker, Identity("tests", address), CoordinatorConfig(), SnapshotPolicy(), SystemClock(), time.time
    )
    opened.decisions.close()
    opened.manager.close()


def test_restarting_service_requests_policies_once_per_topic(
    opening: Callable[..., Broker], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(opening())
    broker = opening()
    asked: list[tuple[str, str]] = []
    ask = AdminClient.ask

    def counted(admin: AdminClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        asked.append((method, path.removeprefix(f"persistent/{namespace}/")))
        return ask(admin, method, path, *arguments, **options)

    monkeypatch.setattr(AdminClient, "ask", counted)
    start(broker)
    changes = [(method, path) for method, path in asked if method != "GET"]
    assert changes == [("PUT", f"{OWN[0]}/properties")]  # neither created nor subscribed again
    for topic in OWN:
        for policy in ("messageTTL", "backlogQuotaMap", "replication?applied=true"):
            assert asked.count(("GET", f"{topic}/{policy}")) == 1


async def test_registration_of_a_topic_repeats_no_request(
    opening: Callable[..., Broker], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await Engine.start(opening(), cluster_mode=True)
    asked: list[str] = []
    ask = AdminClient.ask

    def counted(admin: AdminClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith((f"persistent/{namespace}/orders", f"namespaces/{namespace}/")):
            asked.append(f"{method} {path.rpartition('/')[2]}")
        return ask(admin, method, path, *arguments, **options)

    try:
        monkeypatch.setattr(AdminClient, "ask", counted)
        await engine.topics.register("orders")
        topic = engine.topics.get("orders")
        assert topic is not None
        assert topic.followed is not None
        await eventually(lambda: topic.followed.buffer.applied is not None)  # the epoch marker
        times = Counter(asked)
    finally:
        await engine.stop()
    assert times["GET lastMessageId"] == 0, "the log is known to be empty"
    policies = [times[f"GET {policy}"] for policy in ("messageTTL", "backlogQuotaMap?applied=true")]
    assert policies == [1, 1], "its epoch marker needs no second check"
    assert times["GET internalStats"] <= 5
    assert times.total() <= 28


def test_starting_service_publishes_its_address_for_one_request(opening: Callable[..., Broker], namespace: str) -> None:
    broker = opening()
    for address in ("here:1", "there:2"):
        start(broker, address)
        assert ServiceDiscovery(broker, namespace).property_address() == address
        assert ServiceDiscovery(broker, namespace).newest_address() == address
    incarnation = broker.incarnation(OWN[0])
    assert isinstance(broker, AnnotatedBroker)
    broker.annotate(OWN[0], "nothing that a client understands")
    assert ServiceDiscovery(broker, namespace).property_address() is None
    assert broker.incarnation(OWN[0]) == incarnation
    broker.delete_topic(OWN[0])
    assert ServiceDiscovery(broker, namespace).property_address() is None
    broker.create_topic(OWN[0])
    assert broker.annotation(OWN[0]) is None
