"""The faults of a pair: those of an embedded log, on either machine, and of what is between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.faults import EMBEDDED, Faults
from sim.network import KEEPALIVE
from sim.pair_lock import LOCK_HOST

from broker_io.errors import Error
from broker_io.file.layout import load_manifest
from broker_io.testing import SimulatedDisk
from txnbuffer.cli.admin_client import ServiceAddress, call

if TYPE_CHECKING:
    from sim.pair import PairScenario
    from sim.service import Service

DRIFT = 0.008
"""How much faster or slower a clock runs; the assumption of a pair is 0.01."""
DIRECTORY = "/log"


class PairFaults(Faults):
    """The faults of one pair."""

    _scenario: PairScenario

    def calm_down(self) -> None:
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
        """Let the live machine go on alone for a while, stop it then, and let an operator promote the other one.

        Both have the beginning of the log, or it would be another one.
        """
        record, network = self._scenario.lock.record, self._world.network
        others = [one for one in self._scenario.services if self._store_of(one) not in (None, record.live)]
        service = self._choose.choice(others) if others else None
        begun = self._scenario.history.owners and len(record.in_sync) == len(self._scenario.services)
        if service is None or service.running is None or not (self._scenario.forces and begun):
            return
        self._count("forced promotion", f"of {service.host.name}")
        (live,) = (one for one in self._scenario.services if one is not service)
        network.partition(live.host.name, service.host.name)
        pauses, seconds = self._choose.random() < 0.5, self._choose.choice((20.0, 40.0))

        def stop() -> None:
            if pauses and live.running is not None:
                live.running.pause()
                self._later(seconds, live.running.resume)
            else:
                network.partition(live.host.name, LOCK_HOST)

        alone = self._choose.uniform(1.0, 8.0)
        self._later(alone, stop)
        self._later(alone + 30.0, network.heal)
        for later in (self._choose.uniform(0.0, 3.0), 5.0, 12.0, 20.0):
            self._later(alone + later, lambda: self._ask("Promote", service))

    def _wiped_disk(self) -> None:
        """Replace the disk of a machine by an empty one, if the other machine has everything that is committed.

        That takes longer than its session lives.
        """
        service = self._choose.choice(self._scenario.services)
        store, others = self._store_of(service), [one for one in self._scenario.services if one is not service]
        if store is None or not any(self._store_of(one) in self._scenario.lock.record.in_sync for one in others):
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
        return None if manifest is None or manifest.pair is None else manifest.pair.store


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
    "forced promotion": 15,
}
"""The faults of a pair and their weights; a promotion is forced only in seeds that may lose what was committed."""
