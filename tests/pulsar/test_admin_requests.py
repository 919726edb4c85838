"""What services and clients ask the cluster's REST interface when they start: each answer is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from service_setup import eventually, on_a_loop

from broker_io.environment import SystemClock
from broker_io.port import AnnotatedBroker, Broker
from broker_io.pulsar.admin import AdminClient
from snapshots.policy import SnapshotPolicy
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.engine import Engine
from txnbuffer.service.takeover import Identity, take_over

OWN = ("__txnbuffer_decisions", "__txnbuffer_snapshots")


def start(broker: Broker, address: str = "") -> None:
    opened = take_over(
        broker, Identity("tests", address), CoordinatorConfig(), SnapshotPolicy(), SystemClock(), time.time
    )
    opened.decisions.close()
    opened.manager.close()


def test_a_service_that_starts_again_asks_for_the_policies_of_each_topic_once(
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
    assert changes == [("PUT", f"{OWN[0]}/properties")]  # neither made nor held a second time
    for topic in OWN:
        for policy in ("messageTTL", "backlogQuotaMap", "replication?applied=true"):
            assert asked.count(("GET", f"{topic}/{policy}")) == 1


@on_a_loop
async def test_registering_a_topic_asks_few_questions_and_none_twice_that_tells_the_same(
    opening: Callable[..., Broker], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await Engine.start(opening(), shared=True)
    asked: list[str] = []
    ask = AdminClient.ask

    def counted(admin: AdminClient, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith((f"persistent/{namespace}/orders", f"namespaces/{namespace}/")):
            asked.append(f"{method} {path.rpartition('/')[2]}")
        return ask(admin, method, path, *arguments, **options)

    try:
        monkeypatch.setattr(AdminClient, "ask", counted)
        await engine.registrar.register_now("orders")
        topic = engine.topics.get("orders")
        assert topic is not None
        assert topic.followed is not None
        await eventually(lambda: topic.followed.buffer.applied is not None)  # the border
        times = Counter(asked)
    finally:
        await engine.stop()
    assert times["GET lastMessageId"] == 0, "it was seen that the log is empty"
    policies = [times[f"GET {policy}"] for policy in ("messageTTL", "backlogQuotaMap?applied=true")]
    assert policies == [1, 1], "its border needs no second look"
    assert times["GET internalStats"] <= 5
    assert times.total() <= 28


def test_a_service_that_starts_notes_where_it_is_for_clients_that_ask_once(
    opening: Callable[..., Broker], namespace: str
) -> None:
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
