"""The engine: sessions of plain frames with real buffers, coordinator and logs."""

from __future__ import annotations

import pytest
from raw_session import InProcess, RawSession, transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io.batch import Batch, Blobs, Labels, Message
from broker_io.errors import InvalidTopicName, MessageTooLarge, TopicNotFound
from broker_io.memory import MemoryBroker
from txnbuffer.coordinator.messages import Commit, CoordinatorConfig
from txnbuffer.errors import (
    ForeignTransaction,
    InvalidRequest,
    TooManyTransactions,
    TransactionAborted,
    UnknownTransaction,
    UnregisteredTopic,
)
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort, ClientFrame, LeaseRequest, Query, Send
from txnbuffer.service.door.connection import Limits


def plain(*values: bytes) -> Batch:
    return Batch.of([Message(None, value) for value in values])


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
        await eventually(lambda: not engine.topics.get("b").followed.buffer.ongoing)
        await eventually(lambda: not engine.topics.get("a").followed.buffer.ongoing)
        assert visible(broker, "a") == {b"v": 4, plain_only: 1}
        assert visible(broker, "b") == {b"v": 1}
        again = await session.ask(queries=lambda r: (Query(r, TxnId(0, gone)),))
        assert again is Outcome.ABORT


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


async def test_a_commit_whose_count_differs_aborts(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.write(("a", transactional([ids[0]], size=2)))
        answer = await session.commit(ids[0], ["a"], [3])
        assert isinstance(answer, TransactionAborted)
        assert "has 2 records of" in str(answer)
    assert visible(broker, "a") == {}


async def test_a_commit_that_overtakes_its_records_waits_for_them(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        commits = tuple(Commit(1000 + one, TxnId(0, one), ("a", "b"), (3, 1)) for one in ids[:20])
        sends = (Send("a", transactional(ids[:20], size=3)), Send("b", transactional(ids[:20])))
        session.link.send(ClientFrame(sends=sends, commits=commits))
        await session.until(lambda: all(1000 + one in session.answers for one in ids[:20]))
        assert set(session.answers.values()) == {Outcome.COMMIT}
    assert visible(broker, "a") == {b"v": 60}


async def test_records_that_came_before_are_left_out_and_a_gap_is_refused(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        one, two = ids[:2]
        assert await session.write(("a", transactional([one], b"1", size=3))) == []
        assert await session.write(("a", transactional([one], b"2", seq=2, size=3))) == []
        assert await session.write(("a", transactional([one], b"3", size=2))) == []
        (failure,) = await session.write(("a", transactional([two], b"4", seq=2)))
        assert failure.txn == TxnId(0, two)
        assert "sent record 2 to 'a', expected record 1" in str(failure.error)
        (failure,) = await session.write(("a", transactional([two], b"5", seq=1)))
        assert isinstance(failure.error, InvalidRequest)
        assert await session.commit(one, ["a"], [4]) is Outcome.COMMIT
        assert engine.topics.get("a").followed.buffer.counters.duplicates == 0
        assert isinstance(await session.commit(two, ["a"], [1]), TransactionAborted)
    assert visible(broker, "a") == {b"1": 3, b"2": 1}


async def test_foreign_transactions_are_refused_and_the_rest_of_the_send_continues(broker):
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
    (odd(**{"tb.marker": "1"}), "properties that begin with tb."),
    (odd(**{"tb.v": "1", "tb.txn": "0:1"}), "properties that begin with tb."),
    (odd(**{"tb.v": "1", "tb.txn": "0:1", "tb.seq": "1", "tb.records": "2"}), "properties that begin with tb."),
    (odd(**{"tb.v": "2", "tb.txn": "0:1", "tb.seq": "1"}), "give each record valid ones"),
    (odd(**{"tb.v": "1", "tb.txn": "zero", "tb.seq": "1"}), "give each record valid ones"),
    (odd(**{"tb.v": "1", "tb.txn": "0:1", "tb.seq": "0"}), "give each record valid ones"),
    (Batch.of([Message(None, b"x", {f"p{n}": "" for n in range(1001)})]), "1001 different properties"),
]


@pytest.mark.parametrize(("batch", "message"), MALFORMED)
async def test_an_invalid_send_is_one_clear_error(batch, message):
    async with engine_on(MemoryBroker()) as engine:
        session, ids = await session_on(engine, "a")
        (failure,) = await session.write(("a", batch))
        assert failure.txn is None
        assert message in str(failure.error)
        assert await session.write(("a", transactional(ids[:1]))) == []
        assert len(engine.topics.get("a").followed.buffer.ongoing) == 1


async def test_too_large_a_message_is_refused_and_the_others_continue(broker):
    async with engine_on(broker, limits=Limits(max_message_bytes=5000)) as engine:
        session, ids = await session_on(engine, "a")
        failures = await session.write(
            ("a", plain(b"x" * 5001)), ("a", plain(b"x" * 5000)), ("a", transactional(ids[:1]))
        )
        (failure,) = failures
        assert (failure.send, type(failure.error)) == (1, MessageTooLarge)
        assert broker.last_position("a") is not None


async def test_invalid_topics(broker):
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


async def test_limits_of_open_transactions_are_one_clear_error():
    async with engine_on(MemoryBroker(), config=CoordinatorConfig(max_open_session=10, max_open=15)) as engine:
        session, _ = await session_on(engine, ids=10)
        assert isinstance(await session.ask(leases=lambda r: (LeaseRequest(r, 1),)), TooManyTransactions)
        other, _ = await session_on(engine, ids=5)
        assert isinstance(await other.ask(leases=lambda r: (LeaseRequest(r, 1),)), TooManyTransactions)
