"""Two brokers with one log in memory, which behave as a pair: one of them is live, the other one only reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from broker_io.errors import AppendUnknown, Error, Fenced, NotInSync, NotLive, NotPromotable, StillHeld
from broker_io.memory import MemoryBroker
from broker_io.memory.broker import MemoryWriter


class Pair:
    """`live`: the number of the live member, or None; `in_sync`: whether the other one has everything; `damage`: why it
    may not become live although it has.

    `strict`: nothing can be written unless it has. `slow`: seconds without a primary after a switch or a promotion.
    """

    def __init__(self) -> None:
        self.log = MemoryBroker()
        self.in_sync = True
        self.strict = False
        self.damage = ""
        self.slow = 0.0
        self.live: int | None = None
        self.terms = 0
        self.members = [Member(self, 0), Member(self, 1)]

    @property
    def missing(self) -> str:
        return "" if self.in_sync else "the backup is not in sync: wait until it is, then switch"

    def move(self, to: int | None) -> None:
        """Make a member live, or none; what the former one has under way may be in the log or not."""
        with self.log.log.changed:
            former, self.live = self.live, to
            self.terms += to is not None and to != former
            if former is not None and former != to:
                self.members[former].step_down()
            self.log.log.changed.notify_all()
        for member in self.members:
            member.notify()

    def move_slowly(self, to: int) -> None:
        if not self.slow:
            self.move(to)
            return
        self.move(None)
        timer = threading.Timer(self.slow, self.move, [to])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.log.close()


class Member(MemoryBroker):
    """One of a pair. `store` changes when a copy replaces its log; `refusals` are the errors of its next switches."""

    def __init__(self, pair: Pair, number: int) -> None:
        super().__init__(log=pair.log.log)
        self.store = f"store{number}"
        self.switches = self.promotions = 0
        self.lapsed = False
        self.refusals: list[Error] = []
        self._pair = pair
        self._number = number
        self._failure: Error | None = None
        self._notify: list[Callable[[], None]] = []

    # As ReplicatedBroker

    @property
    def live(self) -> bool:
        return self._pair.live == self._number

    @property
    def term(self) -> int:
        return self._pair.terms if self.live else 0

    @property
    def failure(self) -> Error | None:
        return self._failure

    @property
    def lacks_backup(self) -> bool:
        return self.live and self._pair.strict and not self._pair.in_sync

    def check_answer(self) -> None:
        if not self.live or self.lapsed:
            raise NotLive("this member of the pair is not live: connect to the other one")

    def on_role(self, notify: Callable[[], None]) -> None:
        self._notify.append(notify)

    def status(self) -> Mapping[str, Any]:
        other = self._pair.members[1 - self._number].store
        return {
            "role": "live" if self.live else "backup",
            "epoch": 7,
            "store": self.store,
            "partial": False,
            "live": "" if self._pair.live is None else self._pair.members[self._pair.live].store,
            "in_sync": [self.store, other] if self._pair.in_sync else [self.store],
            "end": 12,
            "commit": 12,
            "applied": 11,
            "peer": None,
            "linked": self._pair.in_sync and self._pair.live is not None,
            "waits_for": "" if self.live else "nobody is live yet" if self._pair.live is None else "the other is live",
            "waits_for_backup": self.lacks_backup,
            "cannot_switch": "" if not self.live else self._pair.damage or self._pair.missing,
            "lag_records": 0 if self._pair.in_sync else 5,
            "lag_operations": 0 if self._pair.in_sync else 7,
            "lag_bytes": 0,
            "lag_seconds": 0.25,
            "window": 64,
            "window_used": 0,
            "lanes": 2,
            "lanes_busy": 0,
            "swaps": 1,
            "copies": 0,
            "lease_left": 9.5 if self.live else 0.0,
            "problem": "",
        }

    def switch(self) -> None:
        self.switches += 1
        if self.refusals:
            raise self.refusals.pop(0)
        if not self.live:
            raise NotLive("this member is not live")
        if why := self._pair.damage or self._pair.missing:
            raise NotInSync(why)
        self._pair.move_slowly(1 - self._number)

    def promote(self) -> None:
        self.promotions += 1
        if not self._pair.in_sync:
            raise NotPromotable("this store is partial")
        self._pair.move_slowly(self._number)

    # As a broker

    def writer(
        self, topic: str, *, exclusive: bool = False, wait: float | None = None, unbatched: bool = False
    ) -> MemoryWriter:
        log = self.log
        with log.changed:
            deadline = log.clock.monotonic() + (wait or 0.0)
            while not self.live or (wait is not None and self.lacks_backup):
                if self._failure is not None:
                    raise self._failure
                if wait is None:
                    raise NotLive("this member of the pair is not live: connect to the other one")
                if (missing := deadline - log.clock.monotonic()) <= 0:
                    raise StillHeld("the other member of the pair is live")
                log.wait(missing)
            return super().writer(topic, exclusive=exclusive)

    def create_topic(self, topic: str) -> None:
        with self.log.changed:
            if not self.live and topic not in self.log.topics:
                raise NotLive("this member of the pair is not live: connect to the other one")
            super().create_topic(topic)

    def close(self) -> None:
        """As a broker of a pair, whose appends may wait for a backup."""
        with self.log.changed:
            self._settle_held("the log was closed")
        super().close()

    # What happens to it

    def step_down(self) -> None:
        """Fence the writers; the fate of held appends is unknown. The caller holds the lock."""
        self._settle_held("this member lost its role")
        for writers in self.log.writers.values():
            for writer in [one for one in writers if one.connection is self._connection]:
                writer.fence(Fenced("this member of the pair is not live any more"))

    def _settle_held(self, why: str) -> None:
        for held in [*self.faults.held]:
            held.end(AppendUnknown(f"{why}: the record may be in the log"))

    def fail(self, error: Error) -> None:
        """Stop for good, as after a failed sync."""
        self._failure = error
        if self.live:
            self._pair.move(None)
        self.notify()

    def notify(self) -> None:
        for notify in self._notify:
            notify()
