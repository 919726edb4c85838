"""A deleted or truncated decision log of a namespace is reported by name, and can be repaired."""

from __future__ import annotations

import asyncio

import pytest
from cluster_app import app_on
from pulsar_cluster import Cluster
from service_setup import engine_on, eventually, visible

from broker_io import open_broker
from broker_io.port import Broker
from broker_io.standalone import ask
from broker_io.testing.contract.base import eventually as sooner_or_later
from snapshots.shards import ONLY
from txnbuffer.coordinator.decisions import TOPIC
from txnbuffer.errors import DecisionsLost
from txnbuffer.model import Outcome
from txnbuffer.recovery.decision_log import read_decisions, reset_decisions
from txnbuffer.service.engine.engine import Engine

pytestmark = pytest.mark.timeout(300)


async def commit_one(broker: Broker, value: bytes) -> None:
    async with engine_on(broker, cluster_mode=True) as engine:
        app = await app_on(engine, broker, "orders")
        txn = next(app.ids)
        await app.write("orders", [txn], value)
        assert await app.commit(txn, "orders") is Outcome.COMMIT
        states = engine.topics.by_name["orders"].followed.buffer.coordinators  # type: ignore[union-attr]  # it exists
        await eventually(lambda: 0 in states and txn in states[0].committed, 120.0)


async def serve(broker: Broker) -> None:
    await (await Engine.start(broker, cluster_mode=True)).stop()


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_lost_decision_log(cluster: Cluster, namespace: str, how: str) -> None:
    with open_broker(f"{cluster.url}/{namespace}", admin_url=cluster.admin) as broker:
        asyncio.run(commit_one(broker, b"old"))
        path = f"persistent/{namespace}/{TOPIC}"
        if how == "deleted":
            ask(cluster.admin, f"{path}?force=true", "DELETE")
        else:
            before = broker.ledgers(TOPIC)[-1].ledger
            ask(cluster.admin, f"{path}/unload", "PUT")

            def truncated() -> bool:
                ask(cluster.admin, f"{path}/truncate", "DELETE")
                return broker.ledgers(TOPIC)[0].ledger > before

            sooner_or_later(truncated)
        for _ in range(2):
            with pytest.raises(DecisionsLost, match="recover ADDRESS --decisions --write"):
                asyncio.run(serve(broker))
        assert reset_decisions(broker, ONLY, "test").lost is not None
        assert read_decisions(broker, ONLY).lost is None
        asyncio.run(commit_one(broker, b"new"))
        assert visible(broker, "orders") == {b"old": 1, b"new": 1}
