"""The simulated lock of a pair: it keeps the contract, and requests are late or lost as in a real network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pair_lock_contract import A, B, LockContract, Open, OpenLocks, begin, claim
from sim.pair_lock import ANSWER_SECONDS, LOCK_HOST, LockServer, SimPairLock
from sim.stage import Stage
from sim.world import World

from broker_io.environment import current
from broker_io.errors import LockUnavailable
from broker_io.filelog.pair.port import PairLock
from broker_io.filelog.replication.lock import NO_RECORD


class StagedLock:
    """A lock whose calls run in a simulated process."""

    def __init__(self, stage: Stage, server: LockServer) -> None:
        self._stage = stage
        self._lock = stage.call(lambda: SimPairLock(server, "alpha"))
        self.clocked = server.clocked

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._stage.call(lambda: getattr(self._lock, name)(*arguments))

    def __enter__(self) -> StagedLock:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SimLockContract(LockContract):
    clocked = True

    @pytest.fixture
    def open_lock(self) -> Iterator[Open]:
        with World(seed=5) as world:
            servers: dict[str, LockServer] = {}
            stage = Stage(world)

            def make(name: str) -> PairLock:
                if name not in servers:
                    servers[name] = LockServer(world, clocked=self.clocked)
                return StagedLock(stage, servers[name])  # type: ignore[return-value]  # it passes all calls on

            yield OpenLocks(make)

    def test_one_of_several_swaps_at_once_succeeds(self, open_lock: Open) -> None:
        lock = open_lock()
        sessions = {store: begin(lock, store) for store in (A, B)}
        view = lock.read()
        accepted = [lock.swap(claim(view, store, sessions[store]))[0] for store in (A, B)]
        assert accepted == [True, False]


class TestClocked(SimLockContract):
    pass


class TestWithoutClock(SimLockContract):
    clocked = False


def late_swap_happens(seed: int) -> bool:
    """Whether a swap that could not be delivered happens once it can."""
    with World(seed) as world:
        server, stage = LockServer(world, clocked=True), Stage(world)
        lock = StagedLock(stage, server)
        session = lock.renew(A, None, 100.0)
        swap = claim(lock.read(), A, session)
        world.network.partition("alpha", LOCK_HOST)
        with pytest.raises(LockUnavailable):
            lock.swap(swap)
        assert server.record == NO_RECORD
        world.network.heal()
        return world.run(10.0, lambda: server.record == swap.record)


def test_a_swap_without_an_answer_happens_late_or_never() -> None:
    assert {late_swap_happens(seed) for seed in range(8)} == {False, True}


def test_sessions_end_by_the_clock_of_the_lock() -> None:
    with World(seed=1) as world:
        server, stage = LockServer(world, clocked=True), Stage(world)
        lock = StagedLock(stage, server)
        session = lock.renew(A, None, 10.0)
        world.host(LOCK_HOST).clock.drift(1.5)
        stage.call(lambda: current().clock.sleep(6.5))
        assert lock.renew(A, session, 10.0) == session
        stage.call(lambda: current().clock.sleep(6.8))
        assert lock.renew(A, session, 10.0) is None


def test_a_lock_that_is_down_answers_nothing() -> None:
    with World(seed=1) as world:
        server, stage = LockServer(world, clocked=True), Stage(world)
        lock = StagedLock(stage, server)
        server.down = True
        began = world.now
        with pytest.raises(LockUnavailable):
            lock.read()
        assert ANSWER_SECONDS <= world.now - began < 2 * ANSWER_SECONDS
