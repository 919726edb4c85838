"""What a service asks the cluster's REST interface when it starts: each answer is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_io.environment import SystemClock
from broker_io.port import Broker
from broker_io.pulsar.admin import Admin
from snapshots.policy import SnapshotPolicy
from txnbuffer.coordinator.config import Config
from txnbuffer.service.opening import Identity, take_over

OWN = ("__txnbuffer_decisions", "__txnbuffer_snapshots")


def start(broker: Broker) -> None:
    opened = take_over(broker, Identity("tests"), Config(), SnapshotPolicy(), SystemClock())
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
    assert {method for method, _ in asked} == {"GET"}  # neither made nor held a second time
    for topic in OWN:
        for policy in ("messageTTL", "backlogQuotaMap", "replication?applied=true"):
            assert asked.count(("GET", f"{topic}/{policy}")) == 1
