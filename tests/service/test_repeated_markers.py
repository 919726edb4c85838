"""Cluster mode: how often the marker of a transaction is written while the topic's buffer or writer is blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_app import App, app_on, cluster_engine
from service_setup import engine_on, eventually

from broker_io.errors import ServiceUnavailable
from broker_io.memory import MemoryBroker
from txnbuffer.model import Outcome, TxnId
from txnbuffer.protocol import MARKER, decode_marker
from txnbuffer.rpc.frames import Abort
from txnbuffer.service.engine import engine as engine_module
from txnbuffer.service.engine.engine import Engine

TICK = 0.02
MANY = 20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBroker]:
    monkeypatch.setattr(engine_module, "TICK", TICK)
    with MemoryBroker() as opened:
        yield opened


def told(cluster: MemoryBroker, topic: str, txn: int) -> list[Outcome]:
    """The outcomes of a transaction in the markers of a topic, in order."""
    found = []
    with cluster.reader(topic) as reader:
        while (placed := reader.read()) is not None:
            markers = [message for message in placed.messages if MARKER in (message.properties or {})]
            items = [item for message in markers for item in decode_marker(message.value).items]
            found += [item.outcome for item in items if item.txn.least == txn]
    return found


async def ongoing(engine: Engine, topic: str, *ids: int) -> None:
    """Wait until transactions have been ongoing in a topic's buffer for long enough to be queried."""
    buffer = engine.topics.by_name[topic].followed.buffer  # type: ignore[union-attr]  # it is followed
    await eventually(lambda: all(buffer.ongoing.get(TxnId(0, one)) is not None for one in ids))
    await asyncio.sleep(3 * TICK)


async def written(engine: Engine, cluster: MemoryBroker, *topics: str) -> tuple[App, int]:
    """An open transaction with records in topics."""
    app = await app_on(engine, cluster, *topics)
    txn = next(app.ids)
    for topic in topics:
        await app.write(topic, [txn])
        await ongoing(engine, topic, txn)
    return app, txn


async def test_a_commit_is_reported_once_however_long_its_marker_is_not_read(cluster: MemoryBroker) -> None:
    async with cluster_engine(cluster) as (engine, _):
        app, txn = await written(engine, cluster, "a")
        topic = engine.topics.by_name["a"]
        assert topic.reader is not None
        topic.reader.paused += 1
        assert await app.commit(txn, "a") is Outcome.COMMIT
        await eventually(lambda: engine.coordinator.has_ended(txn))
        await eventually(lambda: topic.awaiting_markers == {TxnId(0, txn)})
        await asyncio.sleep(MANY * TICK)
        assert told(cluster, "a", txn) == [Outcome.COMMIT]
        assert topic.awaiting_markers == {TxnId(0, txn)}
        topic.reader.paused -= 1
        await eventually(lambda: not topic.awaiting_markers)
        await asyncio.sleep(3 * TICK)
        assert told(cluster, "a", txn) == [Outcome.COMMIT]


async def test_a_commit_that_still_waits_for_another_topic_is_reported_once(cluster: MemoryBroker) -> None:
    async with cluster_engine(cluster) as (engine, its):
        app, txn = await written(engine, cluster, "a", "b")
        topic = engine.topics.by_name["a"]
        assert topic.reader is not None
        topic.reader.paused += 1
        its.faults.hold(topic="b", written=False)
        assert await app.commit(txn, "a", "b") is Outcome.COMMIT
        await eventually(lambda: told(cluster, "a", txn))
        await asyncio.sleep(MANY * TICK)
        assert told(cluster, "a", txn) == [Outcome.COMMIT]
        its.faults.release()
        topic.reader.paused -= 1
        await eventually(lambda: engine.coordinator.has_ended(txn))
        await asyncio.sleep(3 * TICK)
        assert told(cluster, "a", txn) == told(cluster, "b", txn) == [Outcome.COMMIT]


class Away:
    """No writer of a topic can be opened until `back` is set."""

    def __init__(self, broker: MemoryBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.back = False
        self._opened, self._topic = broker.writer, topic
        monkeypatch.setattr(broker, "writer", self.writer)

    def writer(self, topic: str, **options: Any) -> Any:
        if topic == self._topic and not self.back:
            raise ServiceUnavailable("the broker is away")
        return self._opened(topic, **options)


@pytest.mark.parametrize("named", [True, False])
async def test_an_abort_is_queued_once_while_nothing_can_be_written(
    cluster: MemoryBroker, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """`named`: the client names the topic; else the topic's buffer queries the outcome."""
    async with cluster_engine(cluster) as (engine, its):
        app, txn = await written(engine, cluster, "a")
        away = Away(its, "a", monkeypatch)
        topic = engine.topics.by_name["a"]
        topic.writer, topic.held = None, True
        topics = ("a",) if named else ()
        answer = await app.session.ask(aborts=lambda request: (Abort(request, TxnId(0, txn), topics),))
        assert answer is Outcome.ABORT
        await eventually(lambda: topic.waiting)
        await asyncio.sleep(MANY * TICK)
        assert sum(len(part.batch) for part in topic.waiting) == 1
        away.back = True
        await eventually(lambda: told(cluster, "a", txn))
        await asyncio.sleep(3 * TICK)
        assert told(cluster, "a", txn) == [Outcome.ABORT]


async def test_a_new_owner_queues_once_what_was_decided_before(
    cluster: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_engine(cluster) as (engine, its):
        app, txn = await written(engine, cluster, "a")
        its.faults.hold(topic="a", written=False)
        assert await app.commit(txn, "a") is Outcome.COMMIT
        engine.fail(ServiceUnavailable("its process is gone"))
        its.close()
    with cluster.connect() as its:
        away = Away(its, "a", monkeypatch)
        async with engine_on(its, cluster_mode=True) as engine:
            await eventually(lambda: engine.topics.by_name["a"].waiting)
            await asyncio.sleep(MANY * TICK)
            assert sum(len(part.batch) for part in engine.topics.by_name["a"].waiting) == 1
            away.back = True
            await eventually(lambda: engine.coordinator.has_ended(txn))
            await asyncio.sleep(3 * TICK)
            assert told(cluster, "a", txn) == [Outcome.COMMIT]
