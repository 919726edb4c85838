"""The faults of a pair: those of an embedded log, on either machine, and of what is between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.faults import EMBEDDED, Faults
from sim.network import KEEPALIVE
from sim.pair_lock import LOCK_HOST

from broker_io.errors import Error
from broker_io.filelog.log.layout import load_manifest
from broker_io.testing import SimulatedDisk, Unsynced
from txnbuffer.cli.admin_client import ServiceAddress, call

if TYPE_CHECKING:
    from sim.pair import PairScenario
    from sim.service import Service

DRIFT = 0.008
"""How much faster or slower a clock runs; the assumption of a pair is 0.01."""
DIRECTORY = "/log"
FORCING = 100.0
"""Seconds after which an operator no longer tries to promote a machine."""
FORCED_ONLY = {"forced promotion": 1}


class PairFaults(Faults):
    """The faults of one pair."""

    _scenario: PairScenario
    forcing = False
    """Whether a promotion is being forced."""
    _forcing_until = 0.0

    def one(self, choose: random.Random, kinds: dict[str, int], number: int | None = None) -> None:
        """In a seed with forced promotions the first fault is one, as soon as there is a machine to promote."""
        first = number == 0 and self._scenario.forces and not self.calm
        super().one(choose, FORCED_ONLY if first else kinds, number)
        if first and not self.forcing:
            self._later(choose.uniform(0.01, 0.3), lambda: self.one(choose, kinds, number))

    def calm_down(self) -> None:
        self._stop_forcing()
        super().calm_down()
        self._scenario.lock.down = False

    def _clock_drift(self) -> None:
        host = self._choose.choice([*self._world.hosts.values()])
        self._count("clock drift")
        host.clock.drift(self._choose.choice((1.0 - DRIFT, 1.0, 1.0 + DRIFT)))

    # The lock

    def _lock_outage(self) -> None:
        lock = self._scenario.lock
        self._count("lock outage")
        lock.down = True

        def end() -> None:
            lock.down = False

        self._later(self._choose.choice((0.3, 3.0, 20.0)), end)

    def _lock_partition(self) -> None:
        """Cut a machine off from the lock, both ways or one way."""
        self._cut("lock partition", self._service_host.name, LOCK_HOST)

    # The link

    def _link_partition(self) -> None:
        """Cut the machines off from each other, both ways or one way."""
        one, other = self._choose.sample([service.host.name for service in self._scenario.services], 2)
        self._cut("link partition", one, other)

    def _isolation(self) -> None:
        """Cut a machine off from the other one and from the lock, but not from clients."""
        one, other = self._choose.sample([service.host.name for service in self._scenario.services], 2)
        self._world.network.partition(one, LOCK_HOST)
        self._cut("isolation", one, other)

    def _cut(self, kind: str, one: str, other: str) -> None:
        self._count(kind, f"of {one} and {other}")
        self._world.network.partition(one, other, both_ways=self._choose.random() < 0.6)
        self._later(self._choose.choice((0.5, 3.0, 8.0, KEEPALIVE, 30.0)), self._world.network.heal)

    def _broken_link(self) -> None:
        """Break the link; one of the machines may notice it late."""
        hosts = {service.host.name for service in self._scenario.services}
        links = [one for one in self._world.network.connections if {end.host.name for end in one.ends} == hosts]
        if links:
            self._count("broken link")
            self._choose.choice(links).break_off(*self._choose.choice(((0.0, 0.0), (0.0, 15.0), (15.0, 0.0))))

    # Machines

    def _switch(self) -> None:
        """An operator asks a machine to hand over; most times the live one."""
        service = self._choose.choice(self._scenario.services)
        if service.running is None:
            return
        self._count("switch", f"by {service.host.name}")
        self._ask("SwitchOver", service)

    def _ask(self, request: str, service: Service) -> None:
        """An operator asks a service for something."""

        def ask() -> None:
            try:
                call(ServiceAddress(service.address), request)
            except Error as error:
                self._world.log("operator", f"got {error!r:.200} for {request}")
            else:
                self._world.count(f"answered {request}")

        if not self.calm:
            self._world.host("delta").spawn("operator", ask)

    def _forced_promotion(self) -> None:
        """Let the live machine go on alone, end it, and let an operator promote the other one, as often as it takes.

        The other one may not have more than the beginning of the log, or nothing, and is not promoted then.
        """
        record, services = self._scenario.lock.record, self._scenario.services
        others = [one for one in services if self._store_of(one) not in (None, record.live)]
        if self.forcing or not self._scenario.forces or len(others) != 1 or others[0].running is None:
            return
        (service,) = others
        (live,) = (one for one in services if one is not service)
        self._count("forced promotion", f"of {service.host.name}")
        choose, alone = self._choose, self._choose.uniform(0.5, 6.0)
        self.forcing, self._forcing_until = True, self._world.now + FORCING
        self._hold_apart(live.host.name, service.host.name)

        def wait() -> None:
            """Wait until the primary needs its backup no more; then it commits what the other one does not get."""
            record, store = self._scenario.lock.record, self._store_of(service)
            if record.live == store:  # another fault has moved the live role
                self._stop_forcing()
            elif service.running is None or store in record.in_sync:
                self._while_forcing(0.3, wait)
            else:
                self._while_forcing(alone, end)

        def end() -> None:
            self._silence(live, choose)
            promote()

        def promote() -> None:
            if self._scenario.lock.record.live == self._store_of(service):
                self._while_forcing(choose.uniform(0.5, 8.0), self._stop_forcing)
                return
            if service.running is not None:
                self._ask("Promote", service)
            self._while_forcing(4.0, promote)

        wait()

    def _while_forcing(self, seconds: float, call: Callable[[], None]) -> None:
        def then() -> None:
            if self.forcing and self._world.now < self._forcing_until:
                call()
            elif self.forcing:
                self._stop_forcing()

        self._later(seconds, then)

    def _hold_apart(self, one: str, other: str) -> None:
        """Cut two hosts off from each other, also if another fault ends all partitions."""
        self._world.network.partition(one, other)
        self._while_forcing(0.5, lambda: self._hold_apart(one, other))

    def _silence(self, live: Service, choose: random.Random) -> None:
        """Crash the live machine for a while, let its process pause, or cut it off from the lock."""
        how = choose.choice(("crash", "crash", "pause", "lock"))
        self._world.log("fault", f"the primary is silenced: {how}")
        if how == "crash" or live.running is None:
            live.held = True
            live.host.lose_power(choose.choice([*Unsynced]))
        elif how == "pause":
            live.running.pause()
        else:
            self._hold_apart(live.host.name, LOCK_HOST)

    def _stop_forcing(self) -> None:
        self.forcing = False
        self._world.network.heal()
        for service in self._scenario.services:
            service.held = False
            if service.running is not None:
                service.running.resume()

    def _wiped_disk(self) -> None:
        """Replace the disk of a machine by an empty one, if the other machine has everything that is committed.

        That takes longer than its session lives.
        """
        service = self._choose.choice(self._scenario.services)
        store, others = self._store_of(service), [one for one in self._scenario.services if one is not service]
        if (
            self.forcing
            or store is None
            or not any(self._store_of(one) in self._scenario.lock.record.in_sync for one in others)
        ):
            return
        self._count("wiped disk", f"of {service.host.name}")
        for process in service.host.processes:
            process.kill()
        self._scenario.lock.end_sessions_of(store)
        service.host.disk = SimulatedDisk()

    @staticmethod
    def _store_of(service: Service) -> bytes | None:
        """The id of the store on a machine, if it has one."""
        disk = service.host.disk
        manifest = load_manifest(disk, DIRECTORY) if disk.exists(DIRECTORY) else None
        return None if manifest is None or not manifest.is_member else manifest.pair.store


PAIR = {
    **EMBEDDED,
    "kill service": 5,
    "power loss": 4,
    "pause service": 4,
    "lock outage": 2,
    "lock partition": 2,
    "link partition": 2,
    "isolation": 2,
    "broken link": 3,
    "switch": 4,
    "wiped disk": 2,
    "forced promotion": 8,
}
"""The faults of a pair and their weights; a promotion is forced only in seeds that may lose what was committed."""
