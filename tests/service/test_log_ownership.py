"""Several services for one log: the one that the cluster gives it to serves, and the others do not fence."""

from __future__ import annotations

import asyncio

import pytest
from service.running_services import Running, owners
from service_setup import eventually

from broker_io.errors import StillHeld
from broker_io.memory import MemoryBroker
from txnbuffer.service.standby import takeover as standing_module


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(standing_module, "SLICE", 0.1)
    monkeypatch.setattr(standing_module, "READ_SECONDS", 0.02)
    monkeypatch.setattr(standing_module, "RELEASE_WAIT", 0.3)
    with MemoryBroker() as opened:
        yield opened


async def test_a_service_without_standby_leaves_the_log_to_its_owner(cluster):
    active = Running(cluster, advertise="first:7")
    await active.event("serving")
    standby, direct = Running(cluster, standby=True), Running(cluster)
    await standby.event("standing by")
    with pytest.raises(
        StillHeld, match=r"another service owns this log, which serves at first:7: .*--standby.*--fence"
    ):
        await asyncio.wait_for(direct.task, 30)
    assert StillHeld.exit_code == 3
    assert [event for event, _ in direct.events] == ["recovering", "stopped"]
    assert not active.task.done()
    assert not standby.task.done()
    assert len(owners(cluster)) == 1
    await standby.end()
    await active.end()


@pytest.mark.parametrize("late", [False, True])
async def test_of_a_standby_and_a_plain_service_one_serves_and_continues(cluster, monkeypatch, late):
    """The one that the cluster gives the log to."""
    monkeypatch.setattr(standing_module, "RELEASE_WAIT", 1.0)
    active = Running(cluster)
    await active.event("serving")
    standby = Running(cluster, standby=True)
    await standby.event("standing by")
    if late:
        active.broker.close()
        await standby.event("serving")
    direct = Running(cluster)
    if not late:
        await direct.event("recovering")
        await asyncio.sleep(0.1)
        active.broker.close()
    await eventually(lambda: any(event == "serving" for running in (standby, direct) for event, _ in running.events))
    if any(event == "serving" for event, _ in direct.events):
        await asyncio.sleep(0.5)
        assert not late
        assert not direct.task.done()
        assert [event for event, _ in standby.events] == ["standing by"]
    else:
        with pytest.raises(StillHeld, match="another service owns this log"):
            await asyncio.wait_for(direct.task, 30)
    assert not standby.task.done()
    assert [owner.epoch for owner in owners(cluster)] == [1, 2]
    for running in (direct, standby, active):
        await running.end()


async def test_a_service_without_standby_waits_a_little_for_an_owner_that_ends(cluster, monkeypatch):
    monkeypatch.setattr(standing_module, "RELEASE_WAIT", 30.0)
    active = Running(cluster)
    await active.event("serving")
    direct = Running(cluster)
    await direct.event("recovering")
    await asyncio.sleep(0.2)
    active.broker.close()
    await direct.event("serving")
    for running in (direct, active):
        await running.end()


async def test_a_standby_that_is_fenced_during_its_takeover_is_a_standby_again(cluster):
    """A cluster without storage gives the log to the next process that opens it."""
    active = Running(cluster)
    await active.event("serving")
    standby = Running(cluster, standby=True)
    await standby.event("standing by")
    standby.broker.faults.fence_append(topic="__txnbuffer_decisions")
    active.broker.close()
    await standby.event("serving")
    events = [event for event, _ in standby.events]
    assert events.count("standing by") == 2
    assert "taking over" in [facts.get("what") for _, facts in standby.events]
    await standby.end()
    await active.end()
