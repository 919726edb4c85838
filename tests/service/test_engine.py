"""The engine: sessions in bare frames against real buffers, coordinator and logs."""

from __future__ import annotations

import asyncio

import pytest
from raw_session import InProcess, RawSession, transactional
from service_setup import QUICK, engine_on, eventually, on_a_loop, session_on, visible

from broker_io import open_broker
from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import DiskWatermark, InvalidTopicName, MessageTooLarge, TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.coordinator.config import Config
from txnbuffer.coordinator.messages import Begin, Commit, Done, Naming
from txnbuffer.coordinator.states import State
from txnbuffer.errors import (
    AlreadyCommitted,
    CoordinatorStopped,
    ForeignTransaction,
    InvalidRequest,
    ProducerFenced,
    TooManyTransactions,
    TransactionAborted,
    UnknownSession,
    UnknownTransaction,
    UnregisteredTopic,
)
from txnbuffer.frames import Abort, ClientFrame, Hello, LeaseRequest, NamedRequest, Query, Send
from txnbuffer.model import Outcome, TxnId
from txnbuffer.service import appends
from txnbuffer.service import engine as engine_module
from txnbuffer.service.limits import Limits


@pytest.fixture(params=["memory", "file"])
def broker(request, tmp_path):
    address = "memory:" if request.param == "memory" else f"file:{tmp_path / 'log'}"
    with open_broker(address) as opened:
        yield opened


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(engine_module, "TICK", 0.02)


def plain(*values: bytes) -> Batch:
    return Batch.of([Message(None, value) for value in values])


@on_a_loop
async def test_what_commits_is_seen_everywhere_and_what_aborts_nowhere(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        both, one, gone, plain_only = ids[0], ids[1], ids[2], b"plain"
        sends = [
            ("a", transactional([both, one, gone], size=2)),
            ("b", transactional([both, gone])),
            ("a", plain(plain_only)),
        ]
        assert await session.write(*sends) == []
        assert await session.commit(both, ["a", "b"], [2, 1]) is Outcome.COMMIT
        assert await session.commit(one, ["a"], [2]) is Outcome.COMMIT
        assert await session.ask(aborts=lambda r: (Abort(r, TxnId(0, gone), ("a", "b")),)) is Outcome.ABORT
        await eventually(lambda: not engine.topics.get("b").tail.buffer.ongoing)
        await eventually(lambda: not engine.topics.get("a").tail.buffer.ongoing)
        assert visible(broker, "a") == {b"v": 4, plain_only: 1}
        assert visible(broker, "b") == {b"v": 1}
        again = await session.ask(queries=lambda r: (Query(r, TxnId(0, gone)),))
        assert again is Outcome.ABORT


@on_a_loop
async def test_plain_records_need_no_registration_and_make_their_topic(broker):
    async with engine_on(broker) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        assert await session.write(("new", plain(b"1", b"2"))) == []
        await session.register("new")
        (txn,) = await session.lease(1)
        assert await session.write(("new", transactional([txn])), ("new", plain(b"3"))) == []
        assert await session.commit(txn, ["new"], [1]) is Outcome.COMMIT
    assert visible(broker, "new") == {b"1": 1, b"2": 1, b"3": 1, b"v": 1}


@on_a_loop
async def test_a_commit_whose_count_differs_aborts(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional([ids[0]], size=2)))
        answer = await session.commit(ids[0], ["a"], [3])
        assert isinstance(answer, TransactionAborted)
        assert "holds 2 of the 3" in str(answer)
    assert visible(broker, "a") == {}


@on_a_loop
async def test_a_commit_that_overtakes_its_records_waits_for_them(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        commits = tuple(Commit(1000 + one, TxnId(0, one), ("a", "b"), (3, 1)) for one in ids[:20])
        sends = (Send("a", transactional(ids[:20], size=3)), Send("b", transactional(ids[:20])))
        session.link.send(ClientFrame(sends=sends, commits=commits))
        await session.until(lambda: all(1000 + one in session.answers for one in ids[:20]))
        assert set(session.answers.values()) == {Outcome.COMMIT}
    assert visible(broker, "a") == {b"v": 60}


@on_a_loop
async def test_records_that_came_before_are_left_out_and_a_gap_is_refused(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        one, two = ids[:2]
        assert await session.write(("a", transactional([one], b"1", size=3))) == []
        assert await session.write(("a", transactional([one], b"2", seq=2, size=3))) == []
        assert await session.write(("a", transactional([one], b"3", size=2))) == []
        (failure,) = await session.write(("a", transactional([two], b"4", seq=2)))
        assert failure.txn == TxnId(0, two)
        assert "record 2 to 'a' where 1 is due" in str(failure.error)
        (failure,) = await session.write(("a", transactional([two], b"5", seq=1)))
        assert isinstance(failure.error, InvalidRequest)
        assert await session.commit(one, ["a"], [4]) is Outcome.COMMIT
        assert isinstance(await session.commit(two, ["a"], [1]), TransactionAborted)
    assert visible(broker, "a") == {b"1": 3, b"2": 1}


@on_a_loop
async def test_what_a_session_may_not_write_to_is_refused_and_the_rest_of_the_send_goes_on(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        other, others = await session_on(engine, "a")
        good, ended, aborted = ids[:3]
        await session.write(("a", transactional([ended, aborted])))
        await session.commit(ended, ["a"], [1])
        await session.ask(aborts=lambda r: (Abort(r, TxnId(0, aborted), ("a",)),))
        batch = transactional([ended, others[0], good, 999_999, aborted], b"x")
        failures = await session.write(("a", batch))
        kinds = {failure.txn.least: type(failure.error) for failure in failures}
        assert kinds == {
            ended: InvalidRequest,
            others[0]: ForeignTransaction,
            999_999: UnknownTransaction,
            aborted: TransactionAborted,
        }
        (failure,) = await session.write(("a", transactional([ids[5]], most=7)))
        assert isinstance(failure.error, ForeignTransaction)
        assert await session.commit(good, ["a"], [1]) is Outcome.COMMIT
        assert await other.write(("a", transactional([others[0]], b"y"))) == []
        assert await other.commit(others[0], ["a"], [1]) is Outcome.COMMIT
    assert visible(broker, "a") == {b"v": 1, b"x": 1, b"y": 1}


def odd(**properties) -> Batch:
    return Batch(
        Blobs.of([None]), Blobs.of([b""]), {name: Labels.constant(text, 1) for name, text in properties.items()}
    )


MALFORMED = [
    (odd(**{"tb.marker": "1"}), "properties under tb."),
    (odd(**{"tb.v": "1", "tb.txn": "0:1"}), "properties under tb."),
    (odd(**{"tb.v": "1", "tb.txn": "0:1", "tb.seq": "1", "tb.records": "2"}), "properties under tb."),
    (odd(**{"tb.v": "2", "tb.txn": "0:1", "tb.seq": "1"}), "all records of it need all three"),
    (odd(**{"tb.v": "1", "tb.txn": "zero", "tb.seq": "1"}), "all records of it need all three"),
    (odd(**{"tb.v": "1", "tb.txn": "0:1", "tb.seq": "0"}), "all records of it need all three"),
    (Batch.of([Message(None, b"x", {f"p{n}": "" for n in range(1001)})]), "1001 different properties"),
]


@pytest.mark.parametrize(("batch", "message"), MALFORMED)
@on_a_loop
async def test_a_send_that_can_not_be_is_one_clear_error(batch, message):
    async with engine_on(MemoryBroker()) as engine:
        session, ids = await session_on(engine, "a")
        (failure,) = await session.write(("a", batch))
        assert failure.txn is None
        assert message in str(failure.error)
        assert await session.write(("a", transactional(ids[:1]))) == []
        assert len(engine.topics.get("a").tail.buffer.ongoing) == 1


@on_a_loop
async def test_too_large_a_message_is_refused_and_the_others_go_on(broker):
    async with engine_on(broker, limits=Limits(max_message_bytes=1000)) as engine:
        session, ids = await session_on(engine, "a")
        failures = await session.write(
            ("a", plain(b"x" * 1001)), ("a", plain(b"x" * 1000)), ("a", transactional(ids[:1]))
        )
        (failure,) = failures
        assert (failure.send, type(failure.error)) == (1, MessageTooLarge)
        assert broker.last_position("a") is not None


@on_a_loop
async def test_topics_that_can_not_be(broker):
    async with engine_on(broker, limits=Limits(create_topics=False)) as engine:
        session = RawSession(InProcess(engine))
        await session.hello()
        for name, kind in (
            ("", InvalidTopicName),
            ("__txnbuffer_decisions", InvalidTopicName),
            ("none", TopicNotFound),
        ):
            with pytest.raises(kind):
                await session.register(name)
            (failure,) = await session.write((name, plain(b"x")))
            assert isinstance(failure.error, kind)
        broker.create_topic("there")
        await session.register("there")
        (txn,) = await session.lease(1)
        broker.create_topic("other")
        (failure,) = await session.write(("other", transactional([txn])))
        assert isinstance(failure.error, UnregisteredTopic)


@on_a_loop
async def test_limits_of_open_transactions_are_one_clear_error():
    async with engine_on(MemoryBroker(), config=Config(max_open_session=10, max_open=15)) as engine:
        session, _ = await session_on(engine, ids=10)
        assert isinstance(await session.ask(leases=lambda r: (LeaseRequest(r, 1),)), TooManyTransactions)
        other, _ = await session_on(engine, ids=5)
        assert isinstance(await other.ask(leases=lambda r: (LeaseRequest(r, 1),)), TooManyTransactions)


@on_a_loop
async def test_a_hung_client_holds_readers_back_no_longer_than_its_time(broker, quick):
    async with engine_on(broker, config=QUICK) as engine:
        hung, theirs = await session_on(engine, "a")
        lively, ids = await session_on(engine, "a")
        await hung.write(("a", transactional(theirs[:1], b"hung")))
        await lively.write(("a", transactional(ids[:1])))
        assert await lively.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        assert visible(broker, "a") == {}
        await eventually(lambda: visible(broker, "a") == {b"v": 1})
        assert isinstance(await hung.commit(theirs[0], ["a"], [1]), TransactionAborted)


@on_a_loop
async def test_begin_gives_a_transaction_its_own_time(broker, quick):
    async with engine_on(broker, config=QUICK) as engine:
        session, ids = await session_on(engine, "a")
        begins = (Begin(1000, TxnId(0, ids[0]), 5.0), Begin(1001, TxnId(0, ids[1]), 60.0))
        session.link.send(ClientFrame(begins=begins))
        await session.write(("a", transactional(ids[:1])))
        await asyncio.sleep(0.6)
        assert await session.commit(ids[0], ["a"], [1]) is Outcome.COMMIT
        assert isinstance(session.answers[1001], InvalidRequest)


@on_a_loop
async def test_a_client_that_comes_back_goes_on_with_what_it_names(broker, quick):
    async with engine_on(broker, config=QUICK) as engine:
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


@on_a_loop
async def test_a_client_that_does_not_come_back_is_given_up(broker, quick):
    async with engine_on(broker, config=QUICK) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        await session.link.cut()
        await eventually(lambda: not engine.topics.get("a").tail.buffer.ongoing)
        assert engine.topics.get("a").tail.buffer.is_aborted(TxnId(0, ids[0]))


@on_a_loop
async def test_another_connection_of_a_session_ends_the_older_one(broker):
    async with engine_on(broker) as engine:
        session, _ = await session_on(engine, "a")
        again = RawSession(InProcess(engine))
        await again.hello(session.session)
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert isinstance(session.goodbye, UnknownSession)
        assert len(await again.lease(5)) == 5


@on_a_loop
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
            await eventually(lambda: not engine.topics.get("b").tail.buffer.ongoing)
            await eventually(lambda: visible(broker, "a") == {b"v": 2})
            assert visible(broker, "b") == {b"v": 1, b"on": 1}
            fresh, new = await session_on(engine, "a")
            assert not set(new) & set(ids)
            assert await fresh.write(("a", transactional(new[:1]))) == []


@on_a_loop
async def test_named_producers_and_groups(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        opened = await session.ask(open_names=lambda r: (NamedRequest(r, "bank"),))
        await session.write(("a", transactional(ids[:2])))

        def commit(least, opening):
            naming = Naming("bank", 1, opening)
            return lambda r: (Commit(r, TxnId(0, least), ("a",), (1,), naming=naming),)

        assert await session.ask(commits=commit(ids[0], opened.opening)) is Outcome.COMMIT
        assert isinstance(await session.ask(commits=commit(ids[1], opened.opening)), AlreadyCommitted)
        other, _ = await session_on(engine, "a")
        assert (await other.ask(open_names=lambda r: (NamedRequest(r, "bank"),))).committed == 1
        await session.write(("a", transactional(ids[2:3])))
        assert isinstance(await session.ask(commits=commit(ids[2], opened.opening)), ProducerFenced)
        assert await session.ask(delete_names=lambda r: (NamedRequest(r, "bank"),)) == Done()
        joined = await other.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        assert (joined.generation, joined.positions) == (1, ())


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (ClientFrame(leases=(LeaseRequest(1, 1),)), "begins with hello"),
        (ClientFrame(hello=Hello(99, "")), "newer than"),
        (ClientFrame(hello=Hello(1, "no good")), "letters and digits"),
        (ClientFrame(hello=Hello(1, "x" * 65)), "letters and digits"),
    ],
)
@on_a_loop
async def test_a_connection_that_begins_wrongly_ends_with_one_clear_error(frame, message):
    async with engine_on(MemoryBroker()) as engine:
        session = RawSession(InProcess(engine))
        session.link.send(frame)
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert message in str(session.goodbye)
        await session_on(engine, "a")


@on_a_loop
async def test_hello_twice_ends_the_connection():
    async with engine_on(MemoryBroker()) as engine:
        session, _ = await session_on(engine)
        session.link.send(ClientFrame(hello=Hello(1, "")))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert "hello was said before" in str(session.goodbye)


@on_a_loop
async def test_draining_lets_what_is_open_end(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        assert await session.ask(queries=lambda r: (Query(r, TxnId(0, ids[0])),)) is State.OPEN
        engine.carrying.ask()
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


@on_a_loop
async def test_a_client_that_says_bye_leaves_nothing_open(broker, quick):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional(ids[:1])))
        session.link.send(ClientFrame(bye=True))
        with pytest.raises(EOFError):
            await session.until(lambda: False)
        assert session.goodbye is None
        await eventually(lambda: not engine.topics.get("a").tail.buffer.ongoing)
        assert list(engine.coordinator.sessions()) == []


@on_a_loop
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


@on_a_loop
async def test_a_nearly_full_disk_refuses_records_and_delays_decisions(monkeypatch):
    monkeypatch.setattr(appends, "PATIENCE", 0.02)
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        one, two = ids[:2]
        await session.write(("a", transactional([one])), ("b", transactional([one])))
        for _ in range(3):
            broker.faults.fail_append(DiskWatermark("nearly full"), topic="__txnbuffer_decisions")
        assert await session.commit(one, ["a", "b"], [1, 1]) is Outcome.COMMIT
        broker.faults.fail_append(DiskWatermark("nearly full"), topic="a")
        (failure,) = await session.write(("a", transactional([two])))
        assert isinstance(failure.error, DiskWatermark)
        (failure,) = await session.write(("a", transactional([two], seq=2)))
        assert isinstance(failure.error, DiskWatermark)
        assert isinstance(await session.commit(two, ["a"], [2]), TransactionAborted)
    assert visible(broker, "a") == visible(broker, "b") == {b"v": 1}
