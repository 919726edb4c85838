"""Readers that return nothing although the log has more: another one is opened, and no silence is taken for the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from cluster_app import app_on, cluster_engine
from cut_readers import cut_short
from writing import TopicWriter

from broker_io.errors import DiskFailed, ServiceUnavailable
from broker_io.memory import MemoryBroker
from broker_io.position import EARLIEST, Position
from txnbuffer import follow
from txnbuffer.buffer.buffer import TransactionBuffer
from txnbuffer.buffer.visibility import Sequencer
from txnbuffer.cli.inspect import _message_rows
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.errors import ReplayStalled
from txnbuffer.follow import LogFollower, SequencedFollower, read_existing
from txnbuffer.recovery.followed_topic import read_segment
from txnbuffer.recovery.rebuild import _shown_wrongly
from txnbuffer.sinks.relay_targets import last_mark

T = "t"


def silence_first_reader(patch: pytest.MonkeyPatch, broker: MemoryBroker) -> None:
    cut_short(patch, broker, 0, which=lambda _: True, honest=True)


def within(seconds: float, reached: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not (done := reached()) and time.monotonic() < end:
        time.sleep(0.01)
    return done


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(follow, "REOPEN_AFTER", 0.05)
    monkeypatch.setattr(follow, "FIRST_CHECK", 0.1)
    return monkeypatch


def test_replay_goes_past_a_dead_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        TopicWriter(broker, T).plain("a", "b")
        silence_first_reader(monkeypatch, broker)
        with LogFollower(broker, T, TransactionBuffer(), EARLIEST) as log:
            log.replay(timeout=60.0)
            assert log.at == broker.last_position(T)


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


def test_decided_messages_are_read_again_past_a_dead_reader(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        writer = TopicWriter(broker, T)
        writer.records(1, "a", "b")
        sequencer = Sequencer()
        buffer = TransactionBuffer()
        with SequencedFollower(broker, T, buffer, EARLIEST, decided_after=EARLIEST, sequencer=sequencer) as log:
            log.held_limit = 0
            log.replay()
            assert log.lagging
            writer.commit(1)
            log.replay()
            silence_first_reader(impatient, broker)

            def numbered() -> bool:
                log.sequence_all()
                return sequencer.next_seqno == 3

            assert within(120.0, numbered)


def test_reader_of_a_client_replaces_a_dead_one(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        TopicWriter(broker, T).plain("a")
        silence_first_reader(impatient, broker)
        with CommittedReader(broker, T) as reader:
            assert within(120.0, lambda: reader.read(timeout=0.05) is not None)


def test_idle_reader_is_not_replaced(impatient: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        TopicWriter(broker, T).plain("a")
        with CommittedReader(broker, T) as reader:
            assert reader.read(timeout=60.0) is not None
            impatient.setattr(broker, "reader", None)  # another reader can't be opened
            assert reader.read(timeout=0.5) is None


def test_check_of_a_snapshot_does_not_take_silence_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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
        silence_first_reader(monkeypatch, broker)
        (difference,) = _shown_wrongly(broker, SimpleNamespace(buffer=wrong, topic=T), right)  # type: ignore[arg-type]  # all it needs
        assert "1 record," in difference


def test_inspect_does_not_take_silence_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        second = TopicWriter(broker, T).plain("a", "b", "c")[1]
        silence_first_reader(monkeypatch, broker)
        assert [row["content"] for row in _message_rows(broker, T, second, 10)] == [b"b", b"c"]
        assert [row["content"] for row in _message_rows(broker, T, EARLIEST, 2)] == [b"a", b"b"]


def test_silence_is_not_reported_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBroker() as broker:
        last = TopicWriter(broker, T).plain("a").last
        cut_short(monkeypatch, broker, which=lambda _: True)
        with pytest.raises(ServiceUnavailable, match="try again"):
            last_mark(broker, T, 0.1)
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
