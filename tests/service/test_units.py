"""What arrives in one turn of the engine is one append: records, markers, decisions, names and positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from raw_session import InProcess, RawSession, transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io.batch import Batch, Message
from broker_io.errors import DiskWatermark, Error
from broker_io.memory import MemoryBroker
from broker_io.port import TogetherAppend, TogetherResult
from txnbuffer import Outcome, TxnId
from txnbuffer.coordinator.messages import Commit, ProducerSequence
from txnbuffer.errors import TransactionAborted
from txnbuffer.rpc.frames import ClientFrame, NamedRequest, Send
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.topics import appends
from txnbuffer.service.topics.appends import ServiceTopic

DECISIONS = "__txnbuffer_decisions"
ORDINARY = Batch.of([Message(b"k", b"ordinary")])


class Watched(MemoryBroker):
    """Notes the topics, and the numbers of their messages, of each append to several topics."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[dict[str, int]] = []
        self.full: DiskWatermark | None = None

    def append_together(self, appends: Sequence[TogetherAppend], done: Callable[[TogetherResult], None]) -> None:
        unit: Counter[str] = Counter()
        for writer, batch in appends:
            unit[writer.topic] += len(batch)  # type: ignore[attr-defined]  # of the broker in memory
        self.units.append(dict(unit))
        if self.full is not None:
            done(self.full)
        else:
            super().append_together(appends, done)


@asynccontextmanager
async def begun(*topics: str) -> AsyncIterator[tuple[Watched, Engine, RawSession, list[int]]]:
    """A broker whose units are noted from now on, its engine, and a session with topics and ids."""
    with Watched() as broker:
        async with engine_on(broker) as engine:
            session, ids = await session_on(engine, *topics)
            broker.units.clear()
            yield broker, engine, session, ids


def topic_of(engine: Engine, name: str) -> ServiceTopic:
    topic = engine.topics.get(name)
    assert topic is not None
    return topic


def whole(
    request: int, least: int, *topics: str, records: int = 1, sequence: ProducerSequence | None = None
) -> ClientFrame:
    """A frame with the records of a transaction and its commit."""
    sends = tuple(Send(topic, transactional([least], size=records)) for topic in topics)
    commit = Commit(request, TxnId(0, least), topics, (records,) * len(topics), sequence=sequence)
    return ClientFrame(sends=sends, commits=(commit,))


def units_of(engine: Engine) -> appends.UnitAppends:
    assert isinstance(engine.appends, appends.UnitAppends)
    return engine.appends


async def answered(session: RawSession, *requests: int) -> list[object]:
    await session.until(lambda: all(request in session.answers for request in requests))
    return [session.answers.pop(request) for request in requests]


async def test_a_transaction_on_one_topic_is_one_append_without_a_decision() -> None:
    async with begun("t") as (broker, _, session, ids):
        session.link.send(whole(1000, ids[0], "t", records=3))
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert broker.units == [{"t": 4}]
        assert visible(broker, "t") == {b"v": 3}


async def test_a_transaction_on_two_topics_is_one_append_with_its_decision() -> None:
    async with begun("t", "u") as (broker, _, session, ids):
        session.link.send(whole(1000, ids[0], "t", "u"))
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert broker.units == [{"t": 2, "u": 2, DECISIONS: 1}]
        assert visible(broker, "t") == visible(broker, "u") == {b"v": 1}


async def test_a_number_and_positions_are_in_the_same_append() -> None:
    async with begun("t") as (broker, _, session, ids):
        opened = await session.ask(open_names=lambda request: (NamedRequest(request, "shop"),))
        broker.units.clear()
        session.link.send(whole(1000, ids[0], "t", sequence=ProducerSequence("shop", 1, opened.epoch)))
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert broker.units == [{"t": 2, DECISIONS: 1}]


async def test_the_transactions_of_one_turn_share_an_append_and_a_refused_one_fails_alone() -> None:
    async with begun("t", "u") as (broker, _, session, ids):
        missing = Commit(1001, TxnId(0, ids[1]), ("t",), (2,))
        session.link.send(whole(1000, ids[0], "t"))
        session.link.send(ClientFrame(sends=(Send("t", transactional([ids[1]])),), commits=(missing,)))
        session.link.send(whole(1002, ids[2], "t", "u"))
        first, second, third = await answered(session, 1000, 1001, 1002)
        assert (first, third) == (Outcome.COMMIT, Outcome.COMMIT)
        assert isinstance(second, TransactionAborted)
        assert broker.units[0] == {"t": 5, "u": 2, DECISIONS: 1}
        assert visible(broker, "t") == {b"v": 2}


async def test_a_commit_whose_records_are_in_flight_waits_for_them() -> None:
    async with begun("t") as (broker, engine, session, ids):
        broker.faults.hold(topic="t", written=False)
        session.send(("t", transactional(ids[:1])))
        await eventually(lambda: broker.faults.held)
        session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, ids[0]), ("t",), (1,)),)))
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, ids[0])))
        topic = topic_of(engine, "t")
        assert not topic.waiting  # there is no marker yet
        broker.faults.release()
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert visible(broker, "t") == {b"v": 1}


async def test_a_frame_that_is_repeated_on_a_new_connection_writes_nothing_again() -> None:
    async with begun("t", "u") as (broker, engine, session, ids):
        broker.faults.hold(topic="u")
        frame = whole(1000, ids[0], "t", "u")
        session.link.send(frame)
        await eventually(lambda: broker.faults.held)
        await session.link.cut()
        again = RawSession(InProcess(engine))
        await again.hello(session.session, [TxnId(0, ids[0])])
        again.link.send(frame)
        await again.until(lambda: again.acknowledged == 2)
        broker.faults.release()
        assert await answered(again, 1000) == [Outcome.COMMIT]
        again.link.send(frame)  # and once more, after the end
        assert await answered(again, 1000) == [Outcome.COMMIT]
        assert visible(broker, "t") == visible(broker, "u") == {b"v": 1}


async def test_units_that_are_refused_are_written_later_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "PAUSE", 0.01)
    async with begun("t", "u") as (broker, engine, session, ids):
        broker.full = DiskWatermark("nearly full")
        session.link.send(whole(1000, ids[0], "t", "u"))
        await eventually(lambda: units_of(engine).refusal is not None)
        session.link.send(whole(1001, ids[1], "t"))
        await session.until(lambda: session.failures)
        assert isinstance(session.failures[0].error, DiskWatermark)
        session.link.send(ClientFrame(sends=(Send("t", transactional([ids[2]])),)))
        await session.until(lambda: len(session.failures) == 2)
        broker.full = None
        first, second = await answered(session, 1000, 1001)
        assert first is Outcome.COMMIT
        assert isinstance(second, TransactionAborted)
        assert engine.appends.idle
        assert visible(broker, "t") == visible(broker, "u") == {b"v": 1}


async def test_frames_wait_while_the_next_unit_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "UNIT_BYTES", 1000)
    async with begun("t") as (broker, engine, session, ids):
        broker.faults.hold(topic="t")
        for number in range(10):
            session.link.send(whole(1000 + number, ids[number], "t", records=10))
        await eventually(lambda: broker.faults.held)
        assert engine.appends.waiting_bytes < 5000
        assert engine.requests.connections[session.session[:32]].frames
        broker.faults.release()
        assert await answered(session, *range(1000, 1010)) == [Outcome.COMMIT] * 10
        assert visible(broker, "t") == {b"v": 100}


async def test_what_a_topic_was_held_with_is_appended_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "BACKLOG_BYTES", 100)
    monkeypatch.setattr(appends, "FLIGHT_BYTES", 100)
    async with begun("t") as (broker, engine, session, ids):
        topic = topic_of(engine, "t")
        topic.held = True
        for _ in range(9):
            session.send(("t", ORDINARY))
        session.send(("t", transactional(ids[:1])))
        await eventually(lambda: len(topic.waiting) == 10)
        broker.units.clear()
        engine.appends.release(topic)
        session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, ids[0]), ("t",), (1,)),)))
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert len(broker.units) > 3
        assert not topic.backlog
        assert visible(broker, "t") == {b"ordinary": 9, b"v": 1}


async def test_decisions_are_reported_before_the_markers_of_their_unit() -> None:
    async with begun("t", "u") as (_, engine, session, ids):
        for number in range(20):
            session.link.send(whole(1000 + number, ids[number], *("tu" if number % 2 else "ut")))
        assert await answered(session, *range(1000, 1020)) == [Outcome.COMMIT] * 20
        assert engine.coordinator.stopped is None
        assert not [*engine.coordinator.transactions()]


@pytest.mark.parametrize("stopped", [False, True], ids=["held", "stopped"])
async def test_what_belongs_to_a_unit_is_appended_although_its_topic_is_held_or_stopped(stopped: bool) -> None:
    async with begun("t", "u") as (broker, engine, session, ids):
        topic = topic_of(engine, "t")
        broker.faults.hold(topic="u")
        session.send(("u", transactional(ids[:1])))
        await eventually(lambda: broker.faults.held)
        session.link.send(whole(1000, ids[2], "t", "u"))
        await eventually(lambda: topic.formed == 2)
        topic.held = True
        if stopped:
            units_of(engine).fail(topic, Error("stopped by the test"))
        broker.units.clear()
        broker.faults.release()
        await eventually(lambda: broker.units)
        assert broker.units[0] == {"t": 2, "u": 2, DECISIONS: 1}
        assert visible(broker, "t") == {b"v": 1}


async def test_a_commit_waits_for_records_of_a_topic_that_was_held_when_they_came() -> None:
    async with begun("t", "u") as (broker, engine, session, ids):
        topic = topic_of(engine, "t")
        topic.held = True
        session.send(("t", transactional(ids[:1])))
        await eventually(lambda: topic.waiting)
        broker.units.clear()
        session.send(("u", transactional(ids[:1])))
        await eventually(lambda: broker.units == [{"u": 1}])
        await eventually(lambda: engine.appends.idle)
        broker.units.clear()
        session.link.send(ClientFrame(commits=(Commit(1000, TxnId(0, ids[0]), ("t", "u"), (1, 1)),)))
        await eventually(lambda: engine.coordinator.transaction(TxnId(0, ids[0])))
        assert not broker.units
        engine.appends.release(topic)
        assert await answered(session, 1000) == [Outcome.COMMIT]
        assert visible(broker, "t") == visible(broker, "u") == {b"v": 1}


@pytest.mark.parametrize("stopped", [False, True], ids=["held", "stopped"])
async def test_records_for_a_topic_that_is_held_or_stopped_delay_no_other_client(stopped: bool) -> None:
    async with begun("t", "u") as (_, engine, session, ids):
        topic = topic_of(engine, "t")
        if stopped:
            engine.topics.mark_damaged("t", Error("damaged by the test"))
        topic.held = not stopped
        for _ in range(2):
            session.send(("t", Batch.of([Message(b"k", b"x" * appends.UNIT_BYTES)])))
        session.link.send(whole(1000, ids[0], "u"))
        assert await answered(session, 1000) == [Outcome.COMMIT]
        topic.held = False
