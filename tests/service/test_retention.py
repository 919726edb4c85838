"""Retention: what is trimmed by age and size, and what is kept anyway."""

from __future__ import annotations

import asyncio

import pytest
from raw_session import transactional
from service_setup import engine_on, session_on, visible

from broker_io.batch import Batch, Message
from broker_io.errors import PositionTrimmed
from broker_io.memory import MemoryBroker
from broker_io.testing.disk import SimulatedClock
from txnbuffer.client.reading.reader import CommittedReader
from txnbuffer.config import RetentionConfig
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.coordinator.messages import Commit, ConsumerPosition
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import Abort, NamedRequest
from txnbuffer.service.topics import retention
from txnbuffer.service.topics.retention import LogRetention


def with_limits(engine, seconds=0.0, size=0, clock=None):
    config = RetentionConfig(seconds=seconds, bytes=size)
    return LogRetention(engine.topics, engine.snapshots, config, clock or engine.clock, engine.trim_floors)


async def fill(broker, session, topic, ids):
    """A ledger for each transaction."""
    for one in ids:
        await session.write((topic, transactional([one], b"%d" % one)))
        assert await session.commit(one, [topic], [1]) is Outcome.COMMIT
        broker.roll(topic)


async def test_old_messages_go_and_the_rest_stays_readable(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await fill(broker, session, "a", ids[:5])
        later = SimulatedClock(engine.clock.now_ms() + 60_000)
        keep = with_limits(engine, seconds=30.0, clock=later)
        for _ in range(3):
            await keep.check(engine.topics.get("a"))
        assert len(broker.ledgers("a")) < 5
        assert keep.trimmed > 0
        await fill(broker, session, "a", ids[5:6])
        assert b"%d" % ids[5] in visible(broker, "a")


async def test_the_oldest_go_where_a_topic_is_too_long(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await fill(broker, session, "a", ids[:6])
        size = sum(ledger.bytes for ledger in broker.ledgers("a"))
        keep = with_limits(engine, size=size // 2)
        for _ in range(3):
            await keep.check(engine.topics.get("a"))
        left = sum(ledger.bytes for ledger in broker.ledgers("a"))
        assert size // 2 <= left < size
        assert b"%d" % ids[5] in visible(broker, "a")
        assert b"%d" % ids[0] not in visible(broker, "a")


async def test_nothing_goes_until_it_is_certain_that_nobody_else_is_the_owner():
    broker = MemoryBroker()
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await fill(broker, session, "a", ids[:6])
        config = RetentionConfig(bytes=1)
        keep = LogRetention(engine.topics, engine.snapshots, config, engine.clock, engine.trim_floors)

        async def check() -> None:
            for _ in range(3):
                await keep.check(engine.topics.get("a"))

        broker.faults.hold(topic=DECISIONS, written=False)
        checking = asyncio.ensure_future(check())
        await asyncio.wait([checking], timeout=0.3)
        assert (checking.done(), keep.trimmed) == (False, 0)
        broker.faults.release()
        await checking
        assert keep.trimmed > 0


async def test_an_open_transaction_keeps_its_records(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        held = ids[50]
        await fill(broker, session, "a", ids[:2])
        await session.write(("a", transactional([held], b"held")))
        await fill(broker, session, "a", ids[2:6])
        keep = with_limits(engine, size=1)
        for _ in range(3):
            await keep.check(engine.topics.get("a"))
        assert keep.trimmed > 0
        assert await session.commit(held, ["a"], [1]) is Outcome.COMMIT
        assert visible(broker, "a")[b"held"] == 1


async def test_a_group_keeps_what_it_has_not_consumed(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        await fill(broker, session, "a", ids[:6])
        third = broker.ledgers("a")[2].ledger
        joined = await session.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        await session.write(("b", transactional([ids[60]])))
        at = broker.first_position("a")
        moved = ConsumerPosition("readers", "a", joined.generation, at, at._replace(ledger=third))
        answer = await session.ask(commits=lambda r: (Commit(r, TxnId(0, ids[60]), ("b",), (1,), positions=(moved,)),))
        assert answer is Outcome.COMMIT
        keep = with_limits(engine, size=1)
        for _ in range(3):
            await keep.check(engine.topics.get("a"))
        assert broker.ledgers("a")[0].ledger == third


async def test_readers_and_groups_without_a_position_keep_nothing(broker):
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a")
        await session.ask(joins=lambda r: (NamedRequest(r, "readers"),))
        with CommittedReader(broker, "a") as reader:
            await fill(broker, session, "a", ids[:1])
            assert reader.read(limit=1) is not None
            await fill(broker, session, "a", ids[1:6])
            keep = with_limits(engine, size=1)
            for _ in range(3):
                await keep.check(engine.topics.get("a"))
            assert broker.first_position("a").ledger > 3
            with pytest.raises(PositionTrimmed):
                while reader.read(limit=1) is not None:
                    pass
        assert b"%d" % ids[0] not in visible(broker, "a")


async def test_topics_without_transactions_are_kept_short_too(broker):
    async with engine_on(broker) as engine:
        session, _ = await session_on(engine)
        for _ in range(4):
            await session.write(("plain", Batch.of([Message(None, b"x" * 100)])))
            broker.roll("plain")
        await with_limits(engine, size=1).check(engine.topics.get("plain"))
        assert len(broker.ledgers("plain")) <= 2


async def test_the_decision_log_is_compacted(broker, monkeypatch):
    monkeypatch.setattr(retention, "COMPACT_BYTES", 1)
    async with engine_on(broker) as engine:
        session, ids = await session_on(engine, "a", "b")
        await session.write(("a", transactional(ids[:20])), ("b", transactional(ids[:20])))
        for one in ids[:20]:
            await session.ask(aborts=lambda r, one=one: (Abort(r, TxnId(0, one), ("a", "b")),))
        await with_limits(engine).compact()
        assert await session.lease(1)
    async with engine_on(broker) as engine:
        assert engine.coordinator.epoch == 2
