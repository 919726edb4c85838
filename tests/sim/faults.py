"""The faults that a scenario injects at random times; each ends by itself, or when the scenario calms down.

The fault `kill service` is the method `_kill_service`, with a weight in the table of a kind of scenario.
"""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from sim.disks import ENDLESS
from sim.network import KEEPALIVE, SERVER_END
from sim.world import Host, Process

from broker_io.testing import Unsynced

if TYPE_CHECKING:
    from sim.scenario import Scenario

RESTART = 3.0
"""Seconds until a process that ended is started again, at most."""
TRIES = 20
"""How many kinds of faults are tried, at most, until one does something."""
LATER = ("crash at write", "failed disk", "full disk")
"""Faults that count as happened although they do nothing yet."""
RESTARTS = {"kill service": 3, "kill in recovery": 1, "stop service": 1, "power loss": 1}
"""Faults that end a service, with their weights."""


class Faults:
    """The faults of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._choose = scenario.world.random("faults")
        self._number: int | None = None
        self.calm = False
        """Whether all faults have ended."""
        self.happened = 0
        """How many faults did something."""

    def plan(self, numbers: Iterable[int], seconds: float, kinds: dict[str, int]) -> None:
        """Let faults happen at random times within these seconds; `kinds` have weights.

        The number of a fault decides its kind, its time and what it does.
        """
        for number in numbers:
            choose = self._world.random("fault", number)
            call = partial(self.one, choose, kinds, number)
            self._world.scheduler.after(choose.uniform(0.1, seconds), call)

    def one(self, choose: random.Random, kinds: dict[str, int], number: int | None = None) -> None:
        """Let a fault happen; try another one if it can do nothing now, for instance because no such process runs.

        Its event has its number, as in the part of a reduced seed; None: a reduced seed has no such fault.
        """
        self._choose, self._number = choose, number
        for _ in range(TRIES):
            if self.calm:
                return
            (kind,) = choose.choices([*kinds], [*kinds.values()])
            before = self._world.counts.total()
            self._happen(kind)
            if self._world.counts.total() > before or kind in LATER:
                self.happened += 1
                return

    def calm_down(self) -> None:
        """End all faults."""
        self.calm = True
        network = self._world.network
        network.loss = network.slow = 0.0
        network.heal()
        for host in self._world.hosts.values():
            host.disk.capacity = ENDLESS
            host.disk._plans.clear()
            host.sync_factor = 1.0
            host.crash_in = 0
            host.on_disk_failure = None
            for process in host.processes:
                process.disk.most_files = 1000
                process.stalls = 0.0
                process.resume()

    def _happen(self, kind: str) -> None:
        if not self.calm:
            fault: Callable[[], None] = getattr(self, f"_{kind.replace(' ', '_').replace('-', '_')}")
            fault()

    def _count(self, kind: str, text: str = "") -> None:
        self._world.count(kind)
        number = "" if self._number is None else f"{self._number} "
        self._world.log("fault", f"{number}{kind} {text}".rstrip())

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._world.scheduler.after(seconds, call)

    @property
    def _service_host(self) -> Host:
        return self._choose.choice(self._scenario.services).host

    # Processes

    def _kill_service(self) -> None:
        process = self._choose.choice(self._scenario.services).running
        if process is not None:
            self._count("kill service")
            process.kill()

    def _stop_service(self) -> None:
        process = self._choose.choice(self._scenario.services).running
        if process is not None:
            self._count("stop service")
            process.signal(signal.SIGTERM)

    def _pause_service(self) -> None:
        process = self._choose.choice(self._scenario.services).running
        if process is not None and not process.paused:
            self._count("pause service")
            process.pause()
            self._later(self._choose.choice((0.2, 3.0, 20.0, 40.0)), process.resume)

    def _stalling_service(self) -> None:
        """Let the event loop of a service stall at times, as on a host that is short of CPU, while clients reconnect.

        Its other threads continue, so all that arrives during a stall is handled in one iteration.
        """
        process = self._choose.choice(self._scenario.services).running
        if process is None:
            return
        self._count("stalling service")
        process.stalls = self._choose.choice((0.05, 0.3))
        choose = self._choose
        for _ in range(choose.choice((0, 3, 10))):
            self._later(choose.uniform(0.0, 4.0), lambda: self._forget_client(process, choose))

        def end() -> None:
            process.stalls = 0.0

        self._later(4.0, end)

    def _forget_client(self, process: Process, choose: random.Random) -> None:
        """Break a connection of a process; its client notices that at once, the process late."""
        connections = [one for one in self._world.network.connections if one.ends[SERVER_END] is process]
        if connections and not self.calm:
            choose.choice(connections).break_off(15.0, 0.0)

    def _kill_client(self) -> None:
        process = self._choose.choice(self._scenario.apps).process
        if process is not None and not process.dead:
            self._count("kill client")
            process.kill()

    def _pause_client(self) -> None:
        process = self._choose.choice(self._scenario.apps).process
        if process is not None and not process.dead and not process.paused:
            self._count("pause client")
            process.pause()
            self._later(self._choose.choice((0.2, 3.0, 20.0)), process.resume)

    def _kill_in_recovery(self) -> None:
        """Kill a service, and its successor some moments after its start."""
        service = self._choose.choice(self._scenario.services)
        if service.running is not None:
            self._count("kill in recovery")
            service.running.kill()
            successor = service.start()
            self._later(self._choose.uniform(0.0, 0.1), successor.kill)

    # Hosts

    def _power_loss(self) -> None:
        self._count("power loss")
        self._service_host.lose_power(self._choose.choice([*Unsynced]))

    def _client_power_loss(self) -> None:
        """End all processes of a host of clients at once; the services notice it late."""
        process = self._choose.choice(self._scenario.apps).process
        if process is not None:
            self._count("client power loss")
            process.host.lose_power(self._choose.choice([*Unsynced]))

    def _crash_at_write(self) -> None:
        host, unsynced = self._service_host, self._choose.choice((None, *Unsynced))
        host.crash_in = self._choose.randint(1, 30)
        number = self._number

        def crash() -> None:
            self._number = number
            self._count("crash at write", "kill" if unsynced is None else unsynced.value)
            if unsynced is not None:
                host.lose_power(unsynced)
            for process in host.processes:
                process.kill()

        host.on_crash = crash

    def _failed_disk(self) -> None:
        host, error = self._service_host, self._choose.choice((errno.EIO, errno.EIO, errno.ENOSPC))
        host.disk.fail_at(self._choose.randint(1, 20), error, written=self._choose.randint(0, 100))
        self._count_failure(host, "failed disk")

    def _count_failure(self, host: Host, kind: str) -> None:
        """Count a fault once a process has noticed that the disk of a host fails."""
        number = self._number

        def failed() -> None:
            self._number = number
            self._count(kind)

        host.on_disk_failure = failed

    def _slow_disk(self) -> None:
        host = self._service_host
        self._count("slow disk")
        host.sync_factor = self._choose.choice((10.0, 100.0))

        def end() -> None:
            host.sync_factor = 1.0

        self._later(self._choose.uniform(0.5, 6.0), end)

    def _full_disk(self) -> None:
        host = self._service_host
        used = sum(host.disk.files().values())
        host.disk.capacity = used + self._choose.choice((0, 1000, 4000))
        self._count_failure(host, "full disk")

        def free() -> None:
            host.disk.capacity = ENDLESS

        self._later(self._choose.uniform(0.5, 8.0), free)

    def _no_descriptors(self) -> None:
        process = self._choose.choice(self._scenario.services).running
        if process is not None:
            disk = process.disk
            self._count("no descriptors")
            disk.most_files = len(disk.files)

            def give_back() -> None:
                disk.most_files = 1000

            self._later(self._choose.uniform(0.1, 4.0), give_back)

    def _clock_jump(self) -> None:
        host = self._choose.choice((self._service_host, self._choose.choice([*self._world.hosts.values()])))
        seconds = self._choose.choice((-3600.0, -3600.0, -5.0, 5.0, 3600.0))
        self._count("clock jump", f"of {host.name} by {seconds:g} s")
        host.clock.offset += seconds

    def _clock_drift(self) -> None:
        host = self._choose.choice([*self._world.hosts.values()])
        self._count("clock drift")
        host.clock.drift(self._choose.choice((0.9, 1.0, 1.1)))

    # The network

    def _lossy_network(self) -> None:
        network = self._world.network
        self._count("lossy network")
        network.loss = self._choose.choice((0.002, 0.02, 0.1))

        def end() -> None:
            network.loss = 0.0

        self._later(self._choose.uniform(0.5, 5.0), end)

    def _slow_network(self) -> None:
        network = self._world.network
        self._count("slow network")
        network.slow = self._choose.choice((0.02, 0.3))

        def end() -> None:
            network.slow = 0.0

        self._later(self._choose.uniform(0.5, 5.0), end)

    def _broken_connection(self) -> None:
        """Break a connection so that one of its ends notices it at once, and the other one after 15 s."""
        connections = [*self._world.network.connections]
        if connections:
            self._count("broken connection")
            seconds = self._choose.choice(((0.0, 15.0), (15.0, 0.0)))
            self._choose.choice(connections).break_off(*seconds)

    def _partition(self) -> None:
        one, other = self._pair()
        self._count("partition", f"of {one} and {other}")
        self._world.network.partition(one, other)
        self._later(self._choose.choice((1.0, 8.0, 30.0)), self._world.network.heal)

    def _one_way_partition(self) -> None:
        """Hold back, or lose, what a host sends to another one; the other direction goes on.

        If it ends after KEEPALIVE seconds, one end of a connection may have noticed it, and the other one not.
        """
        one, other = self._pair() if self._choose.random() < 0.5 else self._pair()[::-1]
        self._count("one-way partition", f"from {one} to {other}")
        self._world.network.partition(one, other, both_ways=False)
        self._later(self._choose.choice((1.0, 8.0, KEEPALIVE, 30.0)), self._world.network.heal)

    def _pair(self) -> tuple[str, str]:
        """A host of a service, and another one."""
        host = self._service_host
        return host.name, self._choose.choice([name for name in self._world.hosts if name != host.name])


EMBEDDED = {
    "kill service": 4,
    "kill in recovery": 2,
    "stop service": 2,
    "pause service": 2,
    "stalling service": 2,
    "kill client": 3,
    "pause client": 1,
    "power loss": 3,
    "client power loss": 1,
    "crash at write": 4,
    "failed disk": 2,
    "slow disk": 2,
    "full disk": 2,
    "no descriptors": 1,
    "clock jump": 1,
    "clock drift": 1,
    "lossy network": 3,
    "broken connection": 1,
    "slow network": 1,
    "partition": 2,
    "one-way partition": 2,
}
"""The faults of an embedded log and their weights."""
