"""Readers that return nothing although the log has more: that is an error which can be retried, never the end."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_app import app_on, cluster_engine
from cut_readers import cut_short
from writing import TopicWriter

from broker_io.errors import DiskFailed, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST, Position
from txnbuffer import follow
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.cli.inspect import _message_rows
from txnbuffer.errors import ReplayStalled
from txnbuffer.follow import LogFollower, read_existing
from txnbuffer.recovery import followed_topic
from txnbuffer.recovery.followed_topic import read_segment
from txnbuffer.recovery.rebuild import _shown_wrongly
from txnbuffer.sinks import relay_targets
from txnbuffer.sinks.relay_targets import last_mark

T = "t"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for module in (follow, followed_topic, relay_targets):
        monkeypatch.setattr(module, "READ_SECONDS", 0.1)
    return monkeypatch


def test_replay_without_any_message_is_stalled(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        TopicWriter(broker, T).plain("a")
        cut_short(impatient, broker, which=lambda _: True)
        with LogFollower(broker, T, TransactionBuffer(), EARLIEST) as log, pytest.raises(ReplayStalled):
            log.replay(timeout=0.3)
        with pytest.raises(ReplayStalled):
            list(read_existing(broker, T, EARLIEST, Position(0, 0), timeout=0.3))


def test_exact_replay_ends_where_no_message_is_at_the_end() -> None:
    """A native marker has a position, but no reader returns it."""
    with MemoryBroker() as broker:
        writer = TopicWriter(broker, T)
        first = writer.plain("a").last
        gap = Position(first.ledger, first.entry + 1)
        broker.roll(T)
        writer.plain("b")
        with LogFollower(broker, T, TransactionBuffer(), EARLIEST) as log:
            log.replay(gap, exactly=True, timeout=60.0)
            assert log.at == first
            log.replay(timeout=60.0)
            assert log.at == broker.last_position(T)


def test_check_of_a_snapshot_does_not_take_silence_for_the_end(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker, MemoryBroker() as other:
        writer = TopicWriter(broker, T)
        writer.records(1, "gone")
        writer.abort(1)
        different = TopicWriter(other, T)
        different.records(1, "gone")
        different.commit(1)
        right, wrong = TransactionBuffer(), TransactionBuffer()
        for source, buffer in ((broker, right), (other, wrong)):
            with LogFollower(source, T, buffer, EARLIEST) as log:
                log.replay()
        restored: Any = SimpleNamespace(buffer=wrong, topic=T)
        with impatient.context() as silent, pytest.raises(ReplayStalled):
            cut_short(silent, broker, which=lambda _: True)
            _shown_wrongly(broker, restored, right)
        (difference,) = _shown_wrongly(broker, restored, right)
        assert "1 record," in difference


def test_inspect_does_not_take_silence_for_the_end(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        second = TopicWriter(broker, T).plain("a", "b", "c")[1]
        with impatient.context() as silent, pytest.raises(ReplayStalled):
            cut_short(silent, broker, 1, which=lambda _: True)
            [*_message_rows(broker, T, second, 10)]
        assert [row["content"] for row in _message_rows(broker, T, second, 10)] == [b"b", b"c"]
        assert [row["content"] for row in _message_rows(broker, T, EARLIEST, 2)] == [b"a", b"b"]


def test_silence_is_not_reported_as_a_loss(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        last = TopicWriter(broker, T).plain("a").last
        cut_short(impatient, broker, which=lambda _: True)
        with pytest.raises(ServiceUnavailable, match="try again"):
            last_mark(broker, T)
        with pytest.raises(ServiceUnavailable, match="try again"):
            read_segment(broker, T, T, 1, last)


async def test_exclusive_work_stays_exclusive_when_its_caller_is_cancelled() -> None:
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            app = await app_on(engine, cluster, T)
            topic = engine.topics.get(T)
            assert topic is not None
            assert topic.followed is not None
            followed, go, seen = topic.followed, threading.Event(), []

            def work() -> None:
                before = followed.buffer.applied
                go.wait(120.0)
                seen.append((before, followed.buffer.applied))

            task = asyncio.ensure_future(engine.topics.exclusively([T], work))
            await asyncio.sleep(0.1)
            task.cancel()
            await app.write(T, [next(app.ids)])
            await asyncio.sleep(0.5)
            go.set()
            while topic.reader is None or topic.reader.paused:
                await asyncio.sleep(0.01)
            assert [before == after for before, after in seen] == [True]


async def test_failed_disk_in_sequencing_stops_one_topic() -> None:
    with MemoryBroker() as cluster:
        async with cluster_engine(cluster) as (engine, _):
            await app_on(engine, cluster, T, "other")
            topic = engine.topics.get(T)
            assert topic is not None
            assert topic.followed is not None
            engine.topics.sequencing_failed(topic, topic.followed, DiskFailed("reading topic t failed"))
            assert isinstance(topic.problem, DiskFailed)
            assert not engine.ended.done()
            other = engine.topics.get("other")
            assert other is not None
            assert other.followed is not None
