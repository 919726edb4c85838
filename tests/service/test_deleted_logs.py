"""A decision log that is deleted on a cluster, alone or with its namespace, under a service or its standby."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cluster_app import App, app_on, cluster_engine
from service_setup import engine_on, eventually, visible

from broker_io.batch import Batch
from broker_io.errors import ClusterRefused, ServiceUnavailable, TopicNotFound
from broker_io.memory import MemoryBroker
from snapshots.shards import ONLY
from txnbuffer.coordinator.decisions import TOPIC, Lease, Owner, encode
from txnbuffer.coordinator.history import History
from txnbuffer.coordinator.takeover import ID_MARGIN, IDS_PER_SECOND, initial_low_water_mark
from txnbuffer.coordinator.transaction import bitmap_of, within
from txnbuffer.errors import DecisionsLost, LogDeleted
from txnbuffer.model import Outcome
from txnbuffer.recovery.decision_log import reset_decisions
from txnbuffer.service.cluster import cluster as beside_module
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.process import Shutdown
from txnbuffer.service.standby import takeover as standby_module
from txnbuffer.service.standby.decision_log import as_log_deleted
from txnbuffer.service.standby.takeover import Standby


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(beside_module, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(standby_module, "SLICE", 0.1)
    with MemoryBroker() as opened:
        yield opened


class Guarded(MemoryBroker):
    """A cluster that other processes change too."""

    def check_topic(self, topic: str) -> None:
        pass


@asynccontextmanager
async def connected(cluster: MemoryBroker) -> AsyncIterator[tuple[Engine, App]]:
    """A service in cluster mode, and an application."""
    async with engine_on(Guarded(log=cluster.log), cluster_mode=True) as engine:
        yield engine, await app_on(engine, cluster, "orders")


def delete_all(cluster: MemoryBroker) -> None:
    for topic in cluster.topics():
        cluster.delete_topic(topic)


async def test_a_service_whose_log_is_deleted_ends_though_it_writes_nothing(cluster):
    async with cluster_engine(cluster) as (engine, _):
        delete_all(cluster)
        error = await engine.ended
        assert isinstance(error, LogDeleted)
        assert (error.exit_code, TOPIC in str(error)) == (3, True)


async def test_it_ends_though_its_reader_waits_for_what_never_comes(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, broker):
        monkeypatch.setattr(broker, "incarnation", lambda _: "another one")
        assert isinstance(await engine.ended, LogDeleted)


async def test_one_that_decides_meanwhile_says_the_same(cluster, monkeypatch):
    monkeypatch.setattr(beside_module, "CHECK_INTERVAL", 60.0)
    async with cluster_engine(cluster) as (engine, _):
        app = await app_on(engine, cluster, "orders")
        txn = next(app.ids)
        await app.write("orders", [txn])
        with cluster.log.changed:
            delete_all(cluster)
            cluster.create_topic(TOPIC)
        deciding = asyncio.ensure_future(app.commit(txn, "orders"))
        assert isinstance(await engine.ended, LogDeleted)
        deciding.cancel()


async def test_a_log_that_is_missed_for_a_moment_ends_nothing(cluster, monkeypatch):
    async with cluster_engine(cluster) as (engine, broker):
        asked, told = 0, broker.incarnation

        def incarnation(topic: str) -> str:
            nonlocal asked
            asked += 1
            if asked % 3 == 0:
                raise TopicNotFound("not now")
            if asked % 3 == 1:
                raise ServiceUnavailable("the cluster is away")
            return told(topic)

        monkeypatch.setattr(broker, "incarnation", incarnation)
        while asked < 20:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        app = await app_on(engine, cluster, "orders")
        txn = next(app.ids)
        await app.write("orders", [txn], b"kept")
        assert await app.commit(txn, "orders") is Outcome.COMMIT


async def test_a_standby_whose_log_is_deleted_ends(cluster):
    async with cluster_engine(cluster):
        standby = Standby(cluster.connect())
        waiting = asyncio.ensure_future(standby.wait(asyncio.Event()))
        while standby._log is None:
            await asyncio.sleep(0.01)
        delete_all(cluster)
        with pytest.raises(LogDeleted, match="restart the service"):
            await waiting


def test_which_errors_of_a_cluster_mean_a_deleted_log():
    assert isinstance(as_log_deleted(ClusterRefused("…", 404, "Namespace is deleted")), LogDeleted)
    assert not isinstance(as_log_deleted(ClusterRefused("…", 409, "Conflict")), LogDeleted)


async def test_ids_of_a_recreated_namespace_were_in_no_older_one(monkeypatch):
    """Records still being written to a topic of the old namespace belong to no transaction of the new one."""
    now = int(time.time())
    with Guarded() as cluster:
        async with connected(cluster) as (_, app):
            first = app.ids
            assert next(first) > now * IDS_PER_SECOND
            await app.write("orders", [next(first)])
        async with connected(cluster) as (_, app):
            again = next(app.ids)
            assert next(first) < again < next(first) + IDS_PER_SECOND  # the same log continues
        delete_all(cluster)
        monkeypatch.setattr("broker_io.system.SystemClock.now_ms", lambda _: (now + 2) * 1000)
        async with connected(cluster) as (_, app):
            late, txn = next(first), next(app.ids)
            assert txn > late + IDS_PER_SECOND // 2
            await app.write("orders", [late], b"of the older one")
            await app.write("orders", [txn], b"of the newer one")
            assert await app.commit(txn, "orders") is Outcome.COMMIT
            await eventually(lambda: visible(cluster, "orders") == {b"of the newer one": 1})


async def test_a_log_with_entries_of_an_older_service_is_refused_until_it_is_reset():
    """Records with its ids may still be written to any topic."""
    with Guarded() as cluster:
        cluster.create_topic(TOPIC)
        with cluster.writer(TOPIC) as older:
            older.append(Batch.of([encode(Lease(101, 100, "s", 0))])).result()
        for _ in range(2):
            with pytest.raises(DecisionsLost, match=r"entries but no owner.*--decisions --write"):
                async with connected(cluster):
                    pass
        found = reset_decisions(cluster, ONLY, "tests")
        assert "no owner" in (found.lost or "")
        async with connected(cluster) as (_, app):
            assert next(app.ids) > 200 + ID_MARGIN


def test_ids_are_settled_by_a_log_without_any():
    now = 1_700_000_000_000
    first = initial_low_water_mark(History.read([encode(Owner(1, "o"))]), now)
    assert first is not None
    assert History.read([first]).low_water_mark == 1_700_000_000 * IDS_PER_SECOND
    assert initial_low_water_mark(History.read([first]), now) is None
    assert initial_low_water_mark(History.read([encode(Lease(1, 100, "s", 0))]), now) is None


def test_ids_up_to_a_limit_take_no_time_by_how_high_it_is():
    ids = bitmap_of([3, 2**60, 2**60 + 5])
    assert list(within(ids, 0, 2**60)) == [3, 2**60]
    assert list(within(ids, 0, 2)) == []
    assert list(within(ids, 0, 2**61)) == [3, 2**60, 2**60 + 5]
    assert list(within(bitmap_of([]), 0, 2**61)) == []


def test_a_shortened_shutdown_does_not_wait_as_long():
    left = threading.Event()
    leaving = Shutdown(3600.0, left.set)
    leaving.begin()
    leaving.shorten(0.01)
    assert left.wait(60.0)
    leaving.done()
