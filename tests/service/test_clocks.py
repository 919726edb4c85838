"""The wall clock is set while a service runs: open transactions continue, and end when their timeout expires."""

from __future__ import annotations

import pytest
from raw_session import transactional
from service_setup import engine_on, eventually, session_on, visible

from broker_io.testing.disk import SimulatedClock
from txnbuffer.coordinator.messages import Begin, CoordinatorConfig
from txnbuffer.errors import TransactionAborted
from txnbuffer.model import Outcome, TxnId
from txnbuffer.rpc.frames import ClientFrame

LONG = CoordinatorConfig(transaction_timeout=100.0)
AN_HOUR = 3_600_000


@pytest.mark.parametrize("jump", [-AN_HOUR, AN_HOUR], ids=["back", "ahead"])
async def test_a_timeout_does_not_depend_on_the_wall_clock(broker, quick, jump):
    clock = SimulatedClock()
    async with engine_on(broker, config=LONG, clock=clock) as engine:
        session, ids = await session_on(engine, "a")
        session.link.send(ClientFrame(begins=(Begin(1000, TxnId(0, ids[0])), Begin(1001, TxnId(0, ids[1])))))
        await session.write(("a", transactional([ids[0]], b"hung")), ("a", transactional([ids[1]], b"ended")))
        clock.set_ms(clock.now_ms() + jump)
        clock.advance(1.0)
        engine.coordinator.tick(engine.now())
        assert await session.commit(ids[1], ["a"], [1]) is Outcome.COMMIT
        assert visible(broker, "a") == {}
        clock.advance(100.0)
        await eventually(lambda: visible(broker, "a") == {b"ended": 1})
        assert isinstance(await session.commit(ids[0], ["a"], [1]), TransactionAborted)


async def test_a_new_owner_takes_the_wall_clock_as_it_finds_it(broker):
    clock = SimulatedClock()
    for jump in (0, AN_HOUR, -2 * AN_HOUR):
        clock.set_ms(clock.now_ms() + jump)
        async with engine_on(broker, clock=clock) as engine:
            assert engine.now() == pytest.approx(clock.now_ms() / 1000)
            clock.advance(5.0)
            clock.set_ms(0)
            assert engine.now() == pytest.approx(SimulatedClock().now_ms() / 1000, abs=2 * AN_HOUR)
            clock.set_ms(round(engine.now() * 1000))
