"""What services and clients ask the cluster's REST interface when they start: each answer is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from broker_io.environment import SystemClock
from broker_io.port import Broker, NotingBroker
from broker_io.pulsar.admin import Admin
from snapshots.policy import SnapshotPolicy
from txnbuffer.client.finding import Finder
from txnbuffer.coordinator.config import Config
from txnbuffer.service.opening import Identity, take_over

OWN = ("__txnbuffer_decisions", "__txnbuffer_snapshots")


def start(broker: Broker, address: str = "") -> None:
    opened = take_over(broker, Identity("tests", address), Config(), SnapshotPolicy(), SystemClock(), time.time)
    opened.decisions.close()
    opened.keeper.close()


def test_a_service_that_starts_again_asks_for_the_policies_of_each_topic_once(
    opening: Callable[..., Broker], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(opening())
    broker = opening()
    asked: list[tuple[str, str]] = []
    ask = Admin.ask

    def counted(admin: Admin, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        asked.append((method, path.removeprefix(f"persistent/{namespace}/")))
        return ask(admin, method, path, *arguments, **options)

    monkeypatch.setattr(Admin, "ask", counted)
    start(broker)
    changes = [(method, path) for method, path in asked if method != "GET"]
    assert changes == [("PUT", f"{OWN[0]}/properties")]  # neither made nor held a second time
    for topic in OWN:
        for policy in ("messageTTL", "backlogQuotaMap", "replication?applied=true"):
            assert asked.count(("GET", f"{topic}/{policy}")) == 1


def test_a_service_that_starts_notes_where_it_is_for_clients_that_ask_once(
    opening: Callable[..., Broker], namespace: str
) -> None:
    broker = opening()
    for address in ("here:1", "there:2"):
        start(broker, address)
        assert Finder(broker, namespace).noted() == address
        assert Finder(broker, namespace).look() == address
    incarnation = broker.incarnation(OWN[0])
    assert isinstance(broker, NotingBroker)
    broker.note(OWN[0], "nothing that a client understands")
    assert Finder(broker, namespace).noted() is None
    assert broker.incarnation(OWN[0]) == incarnation
    broker.delete_topic(OWN[0])
    assert Finder(broker, namespace).noted() is None
    broker.create_topic(OWN[0])
    assert broker.noted(OWN[0]) is None
