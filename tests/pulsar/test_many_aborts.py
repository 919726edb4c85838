"""A topic with more aborts than Pulsar's own transactions can store; `make soak` writes a million.

Pulsar writes all aborts of a topic in one message, which no longer fits from about 640,000 on.
"""

from __future__ import annotations

import asyncio
import os
import urllib.request
from functools import partial

import pytest
from cluster_app import App
from pulsar_cluster import Cluster
from raw_session import OverGrpc, RawSession
from service_process import ServiceProcess
from service_setup import visible

from broker_io import open_broker
from broker_io.port import Broker
from snapshots.format import SNAPSHOT_TOPIC
from txnbuffer.model import Outcome, TxnId
from txnbuffer.recovery.verify import Level, verify
from txnbuffer.rpc.frames import Abort, ClientFrame

FULL = os.environ.get("SOAK") == "full"
ABORTS = 1_000_001 if FULL else 9_001
AT_ONCE = 8_000
MORE = 2_500
"""Aborts after a recovery, whose snapshots contain only the changes."""
ABORT_BYTES, SNAPSHOT_BYTES = 8, 2**20
"""Maximum bytes that an abort, and one snapshot of many aborts, may add to the snapshot topic."""
SECONDS = 600.0


async def app_at(service: ServiceProcess, broker: Broker) -> App:
    session = RawSession(OverGrpc(service.port))
    await session.hello()
    await session.register("a")
    return App(broker, session, range(0))


async def abort(app: App, count: int) -> None:
    """Abort `count` transactions of one record."""
    for done in range(0, count, AT_ONCE):
        ids = await app.session.lease(min(AT_ONCE, count - done))
        await app.write("a", ids)
        aborts = tuple(Abort(10 + number, TxnId(0, one), ("a",)) for number, one in enumerate(ids))
        app.session.answers.clear()
        app.session.link.send(ClientFrame(aborts=aborts))
        await app.session.until(partial(answered, app.session, len(ids)), SECONDS)
        assert {*app.session.answers.values()} == {Outcome.ABORT}
        app.session.request = 10 + AT_ONCE


def answered(session: RawSession, count: int) -> bool:
    return len(session.answers) == count


async def commit(app: App) -> None:
    (txn,) = await app.session.lease(1)
    await app.write("a", [txn], b"kept")
    assert await app.commit(txn, "a") is Outcome.COMMIT


async def reached(service: ServiceProcess, name: str, least: float) -> float:
    """Wait until a metric of the service reaches a value; the metric."""
    async with asyncio.timeout(SECONDS):
        while (value := await asyncio.to_thread(metric, service.http, name)) < least:
            await asyncio.sleep(0.1)
    return value


def metric(http: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def snapshot_bytes(broker: Broker) -> int:
    return sum(ledger.bytes for ledger in broker.ledgers(SNAPSHOT_TOPIC))


@pytest.mark.timeout(SECONDS * (3 if FULL else 1))
async def test_topic_with_many_aborts_recovers_and_takes_snapshots(cluster: Cluster, namespace: str) -> None:
    address, flags = f"{cluster.url}/{namespace}", ("--admin-url", cluster.admin)
    with open_broker(address, admin_url=cluster.admin) as broker:
        with ServiceProcess(address, *flags) as first:
            app = await app_at(first, broker)
            await commit(app)
            await abort(app, ABORTS)
            assert await reached(first, "txnbuffer_aborts", ABORTS) == ABORTS
            await reached(first, "txnbuffer_snapshots_total", 1)
            await app.session.link.cut()
            first.kill()
        with ServiceProcess(address, *flags) as second:
            assert await reached(second, "txnbuffer_aborts", ABORTS) == ABORTS
            written = await reached(second, "txnbuffer_snapshots_total", 0)
            stored = snapshot_bytes(broker)
            app = await app_at(second, broker)
            await abort(app, MORE)
            await commit(app)
            assert await reached(second, "txnbuffer_snapshots_total", written + 1) > written
            assert snapshot_bytes(broker) - stored < SNAPSHOT_BYTES
            await app.session.link.cut()
            second.kill()
        with ServiceProcess(address, *flags) as third:
            assert await reached(third, "txnbuffer_aborts", ABORTS + MORE) == ABORTS + MORE
        print(second.event("took over"), third.event("took over"), snapshot_bytes(broker))
        assert snapshot_bytes(broker) < SNAPSHOT_BYTES + ABORT_BYTES * ABORTS
        assert {found.level for found in verify(broker, "a")} == {Level.OK}
        assert await asyncio.to_thread(visible, broker, "a") == {b"kept": 2}
