"""The lock of a pair in a simulated world: a host of its own that keeps it, and the lock as the nodes use it

A request is one item each way. What a partition holds back, or a lossy network loses, is sent again a few times, so a
request may arrive long after its caller has stopped to wait, or never. The rules are those of the core: `accepts`, by
way of `LockState`, which the lock in a file uses too. With a clock the lock ends sessions itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.world import World

from broker_io.environment import current
from broker_io.errors import LockUnavailable
from broker_io.filelog.log.records import Store
from broker_io.filelog.pair.lock_state import LockState
from broker_io.filelog.replication.lock import LockRecord, LockView, Swap

LOCK_HOST = "lock"
ANSWER_SECONDS = 1.0
"""How long a node waits for an answer."""
RESENT_SECONDS = 0.7
LOST = 0.2
"""The probability that an item which could not be delivered is not sent again."""


class LockServer:
    """The lock outside. `on_swap` gets the record before and after each swap."""

    def __init__(self, world: World, *, clocked: bool) -> None:
        self.world = world
        self.clocked = clocked
        self.down = False
        """Whether it answers nothing."""
        self.on_swap: Callable[[LockRecord, LockRecord], None] = lambda _old, _new: None
        self._state = LockState()
        self._ends: dict[int, float] = {}
        self._clock = world.host(LOCK_HOST).clock
        self._random = world.random("lock")

    @property
    def record(self) -> LockRecord:
        return self._state.record

    def end_sessions_of(self, store: Store) -> None:
        """The sessions of a store end, for instance because it has been gone for long."""
        self._state.end(self._state.sessions.get(store))

    def view(self) -> LockView:
        self._expire()
        return self._state.view()

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        self._expire()
        before = self._state.record
        accepted = self._state.swap(swap)
        if accepted:
            self.world.log(LOCK_HOST, _text(swap.record))
            self.on_swap(before, swap.record)
        return accepted, self._state.view()

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        self._expire()
        lease = self._state.lease
        number = self._state.renew(store, session)
        if number is not None:
            self._ends[number] = self._clock.monotonic() + ttl
        if self.clocked and session is not None:
            self._state.lease = lease
        return number

    def end(self, session: int) -> None:
        self._state.end(session)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for session in [each for each in self._state.sessions.values() if self.clocked and self._ends[each] <= now]:
            self._state.end(session)

    # The network

    def carry(self, one: str, other: str, deliver: Callable[[], None]) -> None:
        """Deliver something that a host sends to another one: once, late, or never."""
        network, after = self.world.network, self.world.scheduler.after

        def arrive() -> None:
            if not self.down and network.carries(one, other) and self._random.random() >= network.loss:
                deliver()
            elif self._random.random() >= LOST:
                after(RESENT_SECONDS * (0.5 + self._random.random()), arrive)

        after(network.delay(), arrive)


def _text(record: LockRecord) -> str:
    stores = " ".join(store.hex()[:6] for store in record.in_sync)
    forced = "" if record.forced is None else f", forced at {record.forced.lsn}"
    return f"has epoch {record.epoch}, live {record.live.hex()[:6]}, in sync {stores}{forced}"


class SimPairLock:
    """A PairLock of one process."""

    def __init__(self, server: LockServer, host: str) -> None:
        self.clocked = server.clocked
        self._server = server
        self._host = host
        self._threads = current().threads

    def _ask(self, what: str, answer: Callable[[], Any]) -> Any:
        found: list[Any] = []
        answered = self._threads.event()

        def returned(result: Any) -> None:
            found.append(result)
            answered.set()

        def arrived() -> None:
            result = answer()
            server.carry(LOCK_HOST, self._host, lambda: returned(result))

        server = self._server
        server.carry(self._host, LOCK_HOST, arrived)
        if not answered.wait(ANSWER_SECONDS):
            server.world.count("lost answer of the lock")
            raise LockUnavailable(f"the lock has not answered a request to {what}")
        return found[0]

    def read(self) -> LockView:
        view: LockView = self._ask("read", self._server.view)
        return view

    def swap(self, swap: Swap) -> tuple[bool, LockView]:
        answer: tuple[bool, LockView] = self._ask("swap", lambda: self._server.swap(swap))
        return answer

    def renew(self, store: Store, session: int | None, ttl: float) -> int | None:
        number: int | None = self._ask("renew", lambda: self._server.renew(store, session, ttl))
        return number

    def end_session(self, session: int) -> None:
        self._ask("end a session", lambda: self._server.end(session))

    def close(self) -> None:
        pass
