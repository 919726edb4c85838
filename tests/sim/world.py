"""A simulated world: hosts with a clock and a disk each, processes on them, and one scheduler.

    with World(seed=1) as world:
        host = world.host("alpha")
        process = host.start("service", main)
        world.run(60.0)

`main` is a coroutine function that runs with simulated ports as its environment. `World.log` notes what happens, one
line per event; the same seed makes the same lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import hashlib
import io
import random
import sys
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from sim.disks import ProcessDisk
from sim.loop import SimLoop, run_main, simulated_loops
from sim.network import Network, ProcessNetwork
from sim.process_state import state_of_processes
from sim.scheduler import Scheduler, SimThread
from sim.threads import SimThreads, standard_library

from broker_io import environment
from broker_io.environment import Environment, use
from broker_io.testing import Crash, SimulatedDisk, Unsynced
from broker_io.testing.disk import SeededRandomness

T = TypeVar("T")

START = 1_700_000_000.0
"""The wall clock of a new host, in seconds since 1970."""
LINES = 4000
"""Events that a world keeps for the report of a failure."""


class Finding(AssertionError):
    """The simulator found something that must not happen."""


class SimClock:
    """The clock of a host: it may drift, and its wall clock may jump."""

    def __init__(self, scheduler: Scheduler, boot: float) -> None:
        self._scheduler = scheduler
        self._rate = 1.0
        self._at, self._monotonic = scheduler.now, boot
        self.offset = 0.0

    def now_ms(self) -> int:
        return int((START + self.offset + self.monotonic()) * 1000)

    def monotonic(self) -> float:
        return self._monotonic + (self._scheduler.now - self._at) * self._rate

    def boottime_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def sleep(self, seconds: float) -> None:
        if self._scheduler.current is None:
            raise RuntimeError("the code of the world itself must not sleep")
        self._scheduler.park(self.world_seconds(max(seconds, 0.0)))

    def world_seconds(self, seconds: float) -> float:
        """The virtual time in which this clock advances by so many seconds."""
        return seconds / self._rate

    def drift(self, rate: float) -> None:
        """Let the clock run at another rate from now on."""
        self._monotonic, self._at, self._rate = self.monotonic(), self._scheduler.now, rate


class Process:
    """One simulated process, from its start to its end."""

    def __init__(self, host: Host, name: str, number: int) -> None:
        self.host = host
        self.world = world = host.world
        self.name = f"{name}#{number}"
        self.dead = False
        self.paused = False
        self.resumed_at = 0.0
        """When a pause of it ended last."""
        self.ended = False
        self.signalled = False
        self.stalls = 0.0
        """The probability that an iteration of an event loop begins up to half a second late."""
        self.stalling = world.random("stalls", self.name)
        self.stopped: list[SimThread] = []
        self.threads: dict[SimThread, None] = {}
        self.loops: list[SimLoop] = []
        self.on_death: list[Callable[[], None]] = []
        self.at_exit: list[Callable[[], object]] = []
        self.state: dict[Any, Any] = {}
        """What modules keep for the process; see `process_state`."""
        self.clock = host.clock
        self.disk = ProcessDisk(self)
        self.environment = Environment(
            clock=host.clock,
            disk=self.disk,
            randomness=SeededRandomness(source=world.random("process", self.name)),
            threads=SimThreads(self),
            network=ProcessNetwork(host.name, world.network),
            process=str(number),
        )
        with use(self.environment):
            self.context = contextvars.copy_context()

    def check_alive(self) -> None:
        """Stop the code of a process that was killed."""
        if self.dead and self.world.scheduler.current is not None:
            self.world.scheduler.stop_here()

    def signal(self, number: int) -> None:
        """Send a signal; the event loops of the process handle it. A second one ends the process, as the service's."""
        self.world.log(self.name, f"signal {number}")
        if self.signalled:
            self.kill()
        self.signalled = True
        for loop in self.loops:
            loop.signal(number)

    def kill(self) -> None:
        """End the process at once: its locks end, its connections break."""
        if not self.dead:
            self.world.log(self.name, "killed")
            self._end()

    def pause(self) -> None:
        """Stop all threads until `resume`."""
        self.world.log(self.name, "paused")
        self.paused = True
        self.world.network.check_silence()

    def resume(self) -> None:
        """Let all threads continue."""
        if self.paused and not self.dead:
            self.world.log(self.name, "resumed")
            self.paused = False
            self.resumed_at = self.world.now
            self.world.scheduler.release(self.stopped)

    def finished(self) -> None:
        """The main coroutine has returned."""
        if not self.dead:
            self.world.log(self.name, "ended")
            self.ended = True
            self._end()

    def _end(self) -> None:
        self.dead = True
        self.disk.release()
        for call in self.on_death:
            call()
        self.world.buried(self)

    def stacks(self) -> str:
        """Where its threads and tasks wait, for the report of a failure."""
        parts = [
            f"thread {thread.name}:\n{''.join(traceback.format_stack(thread.greenlet.gr_frame))}"
            for thread in self.threads
            if thread.greenlet.gr_frame is not None
        ]
        for loop in self.loops:
            for task in asyncio.all_tasks(loop):
                text = io.StringIO()
                task.print_stack(file=text)
                parts.append(text.getvalue())
        return "\n".join(parts)

    def thread_failed(self, thread: SimThread, error: BaseException) -> None:
        """Handle what a thread raised and nothing handled."""
        if self.dead:
            return
        if isinstance(error, Crash):
            self.kill()
            return
        text = "".join(traceback.format_exception(error))
        self.world.fail(f"thread {thread.name} of {self.name} failed:\n{text}")

    def loop_failed(self, context: dict[str, Any]) -> None:
        """Handle what a callback or a task raised and nothing handled."""
        if self.dead or self.world.closed:
            return
        error = context.get("exception")
        text = "" if error is None else "".join(traceback.format_exception(error))
        self.world.fail(f"{self.name}: {context.get('message')}\n{text}")


class Host:
    """One simulated machine."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.clock = SimClock(world.scheduler, world.random("boot", name).uniform(0.0, 1000.0))
        self.clock.offset = -self.clock.monotonic()
        self.disk = SimulatedDisk()
        self.sync_factor = 1.0
        """How much longer than usual a sync takes."""
        self.processes: list[Process] = []
        self.losses = 0
        self.silent = False
        """Whether the host answers nothing, because it has no power."""
        self.crash_in = 0
        """The number of changes of the disk until `on_crash`; 0: none."""
        self.on_crash: Callable[[], None] = lambda: None
        self.on_disk_failure: Callable[[], None] | None = None
        """Called once when a process notices that the disk fails or is full."""

    def start(self, name: str, main: Callable[[], Any]) -> Process:
        """Start a process that runs a coroutine function."""
        process = self.spawn(name, lambda: run_main(process, main))
        return process

    def spawn(self, name: str, work: Callable[[], object]) -> Process:
        """Start a process that runs a function; a host without power gets it back."""
        self.silent = False
        self.world.processes += 1
        process = Process(self, name, self.world.processes)
        self.processes.append(process)
        self.world.log(process.name, "started")

        def main() -> None:
            work()
            while process.at_exit:
                process.at_exit.pop()()
            process.finished()

        with use(process.environment):
            self.world.scheduler.start(SimThread(process, main, "main"))
        return process

    def changes_disk(self) -> None:
        """A process is about to change the disk."""
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.on_crash()

    def disk_failed(self) -> None:
        """A process has noticed that the disk fails or is full."""
        failed, self.on_disk_failure = self.on_disk_failure, None
        if failed is not None:
            failed()

    def lose_power(self, unsynced: Unsynced) -> None:
        """Kill all processes; what was not synced may be lost."""
        self.world.log(self.name, f"lost power, unsynced changes {unsynced.value}")
        self.silent = True
        for process in self.processes:
            process.kill()
        self.losses += 1
        self.disk = self.disk.crash(unsynced, self.world.random("power", self.name, self.losses).randrange(1 << 30))


class _Outside:
    """A port of the real machine, which code under simulation must not use."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of the real machine was used: this code runs outside of a simulated process")


@contextlib.contextmanager
def _no_machine() -> Iterator[None]:
    """Let code without a simulated environment fail for a block."""
    nothing: Any = _Outside()
    outside = Environment(nothing, nothing, nothing, nothing, nothing, "outside")
    before, environment._machine = environment._machine, outside
    try:
        yield
    finally:
        environment._machine = before


@contextlib.contextmanager
def _unraisable_ignored() -> Iterator[None]:
    """Ignore what finalizers raise: coroutines that wait while they are left."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


class World:
    """Everything that one seed decides. Use it as a context manager."""

    def __init__(
        self,
        seed: int,
        *,
        preemption: float = 0.02,
        echo: Callable[[str], None] | None = None,
        clears_away: bool = True,
    ) -> None:
        """`clears_away`: end what still runs when the world is closed; False if its process ends then anyway."""
        self.seed = seed
        self.scheduler = Scheduler(self.random("scheduler"), preemption=preemption)
        self.network = Network(self)
        self.hosts: dict[str, Host] = {}
        self.processes = 0
        self.counts: Counter[str] = Counter()
        self.lines: deque[str] = deque(maxlen=LINES)
        self.failure: str | None = None
        self.closed = False
        self._echo = echo
        self._clears_away = clears_away
        self._digest = hashlib.sha256()
        self._buried: list[Process] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        gc.disable()  # finalizers would run at times that depend on the machine
        self._stack.callback(gc.enable)
        gc.freeze()  # what is there already is no garbage of this world
        self._stack.callback(gc.unfreeze)
        self._stack.enter_context(_no_machine())
        self._stack.enter_context(standard_library(self.scheduler))
        self._stack.enter_context(simulated_loops(self._current_process))
        self._stack.enter_context(state_of_processes(self._current_process))
        self._stack.enter_context(self.network.in_place_of_grpc())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True
        if self._clears_away:
            with _unraisable_ignored(), warnings.catch_warnings(action="ignore"):
                self._clear_away()
        self._stack.close()

    def enter(self, context: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context until the world is closed."""
        return self._stack.enter_context(context)

    def _clear_away(self) -> None:
        """Let all code that still waits leave its blocks; none of it reaches the world any more."""
        for host in self.hosts.values():
            for process in host.processes:
                if not process.dead:
                    process.dead = True
                    self._buried.append(process)
        for process in self._buried:
            for thread in [*process.threads]:
                self.scheduler.drop(thread)
        for process in self._buried:
            for loop in process.loops:
                loop.abandon()
        self._buried.clear()
        self.hosts.clear()
        gc.collect()

    def random(self, *names: object) -> random.Random:
        """A source of random numbers for one purpose, so that a change of one does not change the others."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, names))}")

    def host(self, name: str) -> Host:
        """The host of a name."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name)
        return self.hosts[name]

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.scheduler.now

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False, *, every: int = 1) -> bool:
        """Run until `stop`, for at most so many seconds; return whether `stop` returned True.

        It is called after each `every` steps, and after the last one. Raises Finding if something failed that nothing
        handled.
        """
        done = self.scheduler.run(self.now + seconds, stop, every=every)
        if self.failure is not None:
            raise Finding(self.failure)
        return done

    def fail(self, text: str) -> None:
        """Report a finding; the first one counts."""
        self.log("world", f"finding: {text}")
        self.failure = self.failure or text
        self.scheduler.stopped = True

    def log(self, who: str, what: str) -> None:
        """Note an event."""
        if self.closed:
            return
        line = f"{self.scheduler.now:12.6f} {who} {what}"
        self._digest.update(line.encode(errors="replace"))
        self.lines.append(line)
        if self._echo is not None:
            self._echo(line)

    def count(self, fault: str) -> None:
        """Count a fault that was injected."""
        self.counts[fault] += 1

    @property
    def digest(self) -> str:
        """A digest of all events so far, and of how often threads ran."""
        return f"{self._digest.hexdigest()[:16]}-{self.scheduler.runs}"

    def buried(self, process: Process) -> None:
        """A process has ended; its threads stay where they are until the world is closed."""
        self._buried.append(process)

    def _current_process(self) -> Process | None:
        thread = self.scheduler.current
        return None if thread is None else thread.process
