"""Sessions: clients that hang, disappear and reconnect; owners that change, drain and fail."""

from __future__ import annotations

import asyncio

import pytest
from raw_session import InProcess, RawSession, transactional
from service_setup import QUICK, engine_on, eventually, session_on, visible

from broker_io import open_broker
from broker_io.batch import Batch, Message
from broker_io.errors import DiskWatermark
from broker_io.memory import MemoryBroker
from broker_io.testing.disk import SimulatedClock
from txnbuffer.coordinator.messages import Begin, Commit, CoordinatorConfig, Done, ProducerSequence, State
from txnbuffer.errors import (
    AlreadyCommitted,
    CoordinatorStopped,
    InvalidRequest,
    ProducerFenced,
    TransactionAborted,
    UnknownSession,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame, Deletion, LeaseRequest, NamedRequest, Query, SessionHello
from txnbuffer.service.engine import engine as engine_module
from txnbuffer.service.topics import appends


def plain(*values: bytes) -> Batch:
    return Batch.of([Message(None, value) for value in values])


async def test_a_hung_client_holds_readers_back_no_longer_than_its_time(broker, quick):
    clock = SimulatedClock()
    async with engine_on(broker, config=CoordinatorConfig(transaction_timeout=100.0), clock=clock) as engine:
        hung, theirs = await session_on(engine, "a")
        lively, ids = await session_on(engine, "a")
        hung.link.send(ClientFrame(begins=(Begin(1000, TxnId(0, theirs[0])),)))
        await hung.write(("a", transactional(theirs[:1], b"hung")))
        await lively.write(("a", transactional(ids[:1])))
        assert await lively.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        assert visible(broker, "a") == {}
        clock.advance(101.0)
        await eventually(lambda: visible(broker, "a") == {b"v": 1})
        assert isinstance(await hung.commit(theirs[0], ["a"], [1]), TransactionAborted)


async def test_begin_gives_a_transaction_its_own_time(broker, quick):
    clock = SimulatedClock()
    async with engine_on(broker, config=QUICK, clock=clock) as engine:
        session, ids = await session_on(engine, "a")
        begins = (Begin(1000, TxnId(0, ids[0]), 5.0), Begin(1001, TxnId(0, ids[1]), 60.0))
        session.link.send(ClientFrame(begins=begins))
        await session.write(("a", transactional(ids[:1])))
        clock.advance(1.0)
        engine.coordinator.tick(engine.now())
        assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        assert isinstance(session.answers[1001], InvalidRequest)


async def test_a_client_that_comes_back_continues_with_what_it_names(broker, quick):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        kept, left = ids[:2]
        await session.write(("a", transactional([kept, left])))
        await session.link.cut()
        again = RawSession(InProcess(engine))
        welcome = await again.hello(session.session, [TxnId(0, kept)])
        assert welcome.session == session.session
        assert welcome.states == ((TxnId(0, kept), State.OPEN),)
        assert (
            await again.write(("a", transactional([kept], b"twice")), ("a", transactional([kept], b"on", seq=2))) == []
        )
        assert await again.commit(kept, ["a"], [2]) is Outcome.COMMIT
        assert isinstance(await again.commit(left, ["a"], [1]), TransactionAborted)
        await eventually(lambda: visible(broker, "a") == {b"v": 1, b"on": 1})


async def test_the_session_of_a_client_that_does_not_reconnect_ends(broker, quick):
    async with engine_on(broker, config=CoordinatorConfig(session_timeout=0.1, transaction_timeout=900.0)) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        await session.link.cut()
        await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert engine.topics.get("a").followed.buffer.is_aborted(TxnId(0, ids[0]))


async def test_another_connection_of_a_session_ends_the_older_one(broker):
    async with engine_on(broker) as engine:
        session, _ = await session_on(engine, "a")
        again = RawSession(InProcess(engine))
        await again.hello(session.session)
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert isinstance(session.goodbye, UnknownSession)
        assert len(await again.lease(5)) == 5


async def test_a_session_is_resumed_in_the_turn_that_answers_its_older_connection(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        session.link.send(ClientFrame(queries=(Query(1000, TxnId(0, ids[0])),)))
        again = RawSession(InProcess(engine))
        async with asyncio.timeout(10.0):
            welcome = await again.hello(session.session)
        assert welcome.session == session.session


async def test_a_new_owner_takes_over_what_the_last_one_left(tmp_path):
    address = f"file:{tmp_path}"
    with open_broker(address) as broker:
        engine = await engine_module.Engine.start(broker)
        session, ids = await session_on(engine, "a", "b")
        done, opened, lost = ids[:3]
        await session.write(("a", transactional([done, opened, lost])), ("b", transactional([opened])))
        assert await session.commit(done, ["a"], [1]) is Outcome.COMMIT
        engine.fail(CoordinatorStopped("as if it had crashed"))
        await engine.stop()
    with open_broker(address) as broker:
        async with engine_on(broker) as engine:
            assert engine.coordinator.epoch == 2
            again = RawSession(InProcess(engine))
            welcome = await again.hello(session.session, [TxnId(0, opened), TxnId(0, done)])
            assert welcome.states == ((TxnId(0, opened), State.OPEN), (TxnId(0, done), State.COMMITTED))
            assert (
                await again.write(("a", transactional([opened], b"twice")), ("b", transactional([opened], b"on", 2)))
                == []
            )
            assert await again.commit(opened, ["a", "b"], [1, 2]) is Outcome.COMMIT
            assert await again.commit(done, ["a"], [1]) is Outcome.COMMIT
            await eventually(lambda: not engine.topics.get("b").followed.buffer.ongoing)
            await eventually(lambda: visible(broker, "a") == {b"v": 2})
            assert visible(broker, "b") == {b"v": 1, b"on": 1}
            fresh, new = await session_on(engine, "a")
            assert not set(new) & set(ids)
            assert await fresh.write(("a", transactional(new[:1]))) == []


async def test_named_producers_and_groups(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        opened = await session.ask(open_names=lambda r: (NamedRequest(r, "bank"),))
        await session.write(("a", transactional(ids[:2])))

        def commit(least, opening):
            sequence = ProducerSequence("bank", 1, opening)
            return lambda r: (Commit(r, TxnId(0, least), ("a",), (1,), sequence=sequence),)

        assert await session.ask(commits=commit(ids[0], opened.epoch)) is Outcome.COMMIT
        assert isinstance(await session.ask(commits=commit(ids[1], opened.epoch)), AlreadyCommitted)
        other, _ = await session_on(engine, "a")
        assert (await other.ask(open_names=lambda r: (NamedRequest(r, "bank"),))).committed == 1
        await session.write(("a", transactional(ids[2:3])))
        assert isinstance(await session.ask(commits=commit(ids[2], opened.epoch)), ProducerFenced)
        assert await session.ask(delete_names=lambda r: (Deletion(r, "bank"),)) == Done()
        joined = await other.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        assert (joined.generation, joined.positions) == (1, ())


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "\udc80", "x" * 401, "ü" * 201])
async def test_an_invalid_name_is_refused_and_the_session_continues(name):
    async with engine_on(MemoryBroker()) as engine:
        session, _ = await session_on(engine, "a")
        for kind in ("open_names", "joins"):
            refusal = await session.ask(**{kind: lambda r: (NamedRequest(r, name),)})
            assert isinstance(refusal, InvalidRequest)
            assert "1 to 400 bytes of printable UTF-8" in str(refusal)
            assert len(str(refusal)) < 300
        assert list(engine.coordinator.consumer_groups.all_groups()) == []
        assert (await session.ask(joins=lambda r: (NamedRequest(r, "ü" * 200),))).generation == 1


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (ClientFrame(leases=(LeaseRequest(1, 1),)), "must contain hello"),
        (ClientFrame(hello=SessionHello("no good")), "use the id that the service assigned"),
        (ClientFrame(hello=SessionHello("x" * 101)), "use the id that the service assigned"),
    ],
)
async def test_a_connection_that_begins_wrongly_ends_with_one_clear_error(frame, message):
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        session.link.send(frame)
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert message in str(session.goodbye)
        await session_on(engine, "a")


async def test_hello_twice_ends_the_connection():
    async with engine_on(MemoryBroker()) as engine:
        session, _ = await session_on(engine)
        session.link.send(ClientFrame(hello=SessionHello("")))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert "hello was sent twice" in str(session.goodbye)


async def test_draining_lets_what_is_open_end(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        assert await session.ask(queries=lambda r: (Query(r, TxnId(0, ids[0])),)) is State.OPEN
        engine.effects.ask()
        draining = asyncio.ensure_future(engine.drain(20))
        await session.until(lambda: session.draining)
        assert not draining.done()
        late = RawSession(InProcess(engine))
        with pytest.raises(EOFError):
            await late.hello()
        assert isinstance(late.goodbye, CoordinatorStopped)
        assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        await draining
    with pytest.raises(EOFError):
        await session.until(lambda: False)
    assert isinstance(session.goodbye, CoordinatorStopped)


async def test_a_client_that_says_bye_leaves_nothing_open(broker, quick):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        session.link.send(ClientFrame(bye=True))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert session.goodbye is None
        await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert list(engine.coordinator.sessions()) == []


async def test_a_log_that_failed_ends_everything_and_nothing_unsure_is_answered(monkeypatch):
    broker = MemoryBroker()
    engine = await engine_module.Engine.start(broker)
    session, ids = await session_on(engine, "a", "b")
    await session.write(("a", transactional(ids[:1])), ("b", transactional(ids[:1])))
    broker.faults.lose_acknowledgement(topic="__txnbuffer_decisions")
    with pytest.raises(EOFError):
        await session.commit(ids[0], ["a", "b"], [1, 1])
    assert isinstance(session.goodbye, CoordinatorStopped)
    assert engine.ended.result() is not None
    await engine.stop()


async def test_a_nearly_full_disk_delays_decisions(monkeypatch):
    monkeypatch.setattr(appends, "PAUSE", 0.02)
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        one = ids[0]
        await session.write(("a", transactional([one])), ("b", transactional([one])))
        for _ in range(3):
            broker.faults.fail_append(DiskWatermark("nearly full"), topic="__txnbuffer_decisions")
        assert await session.commit(one, ["a", "b"], [1, 1]) is Outcome.COMMIT
    assert visible(broker, "a") == visible(broker, "b") == {b"v": 1}
