"""Policies of a cluster's topic that another service changes between two requests."""

from __future__ import annotations

from typing import Any, cast

from broker_io.pulsar.admin import AdminClient
from broker_io.pulsar.policies import DEFAULT_QUOTA_BYTES, UNLIMITED, Policies, override_policies

STOCK = {"limitSize": DEFAULT_QUOTA_BYTES, "limitTime": -1, "policy": "producer_request_hold"}


class Silent:
    """An admin client that must not be called."""

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        raise AssertionError(f"{method} {path}")


def test_quotas_set_by_another_service_meanwhile_count() -> None:
    own = {"destination_storage": UNLIMITED, "message_age": UNLIMITED}
    policies = Policies(0, {"destination_storage": STOCK}, None, None, None, own, 0)
    lifted = override_policies(
        cast("AdminClient", Silent()), "public/default", "persistent/public/default/t", policies, ours=True
    )
    assert lifted.quotas == own
