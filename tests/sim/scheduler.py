"""Threads of a simulated world as greenlets, and the one scheduler that chooses which of them runs.

A thread runs until it parks: in a lock, a sleep, the select of an event loop. The scheduler, in the main greenlet,
then chooses one of the threads that can run, by the seeded random numbers of the world. It advances the virtual time
when none can. So one seed decides every interleaving, and the same seed makes the same run.

`simloop` and `simloom` offer something like this for asyncio alone. They need Python 3.12, which is newer than the
oldest Python of this project, and know no threads: the embedded log, readers and the sync client use threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from sim.world import Process

SWITCH_SECONDS = 1e-6
"""Virtual time that one run of a thread takes, so that a loop that waits for a deadline reaches it."""
LIVELOCK = 2_000_000
"""Runs of threads in one world, at most."""


class Killed(BaseException):
    """The simulated process of this thread was killed. It is no Exception, so that no handler catches it."""


class Livelock(Exception):
    """Threads keep running and nothing comes to an end."""


class SimThread:
    """One simulated thread. `wait` numbers its waits, so that an alarm of an earlier wait does not end a later one."""

    __slots__ = (
        "done", "dropped", "error", "greenlet", "hooks", "loop", "name", "on_end", "process", "timed_out",
        "wait", "waiting",
    )  # fmt: skip

    def __init__(self, process: Process, work: Callable[[], object], name: str) -> None:
        self.name = name
        self.process = process
        self.waiting = False
        self.wait = 0
        self.timed_out = False
        self.done = False
        self.dropped = 0
        self.error: BaseException | None = None
        self.loop: Any = None
        self.hooks: Any = (None, None)
        self.on_end: list[Callable[[], None]] = []
        self.greenlet = greenlet.greenlet(lambda: self._run(work), process.world.scheduler.hub)
        self.greenlet.gr_context = contextvars.copy_context()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            self.process.thread_failed(self, error)
        finally:
            self.done = True
            for call in self.on_end:
                call()

    def __repr__(self) -> str:
        return f"<{self.process.name}/{self.name}>"


class Scheduler:
    """Runs threads and alarms. `now` is the virtual time in seconds."""

    def __init__(self, choose: random.Random, *, preemption: float = 0.0) -> None:
        self.now = 0.0
        self.current: SimThread | None = None
        self.runs = 0
        self.stopped = False
        """Whether `run` returns at once, because something failed."""
        self.preemption = preemption
        self._random = choose.random
        self._ready: list[SimThread] = []
        self._alarms: list[tuple[float, int, SimThread | Callable[[], None], int]] = []
        self._alarm = 0
        self.hub = greenlet.getcurrent()

    # For threads

    def park(self, seconds: float | None = None) -> bool:
        """Wait until `wake`; return False if `seconds` passed before. The caller registers itself for a wake first."""
        thread = self.current
        if thread is None:
            raise RuntimeError("the code of the world itself must not wait")
        if thread.process.dead:
            self.stop_here()
        thread.wait += 1
        thread.waiting = True
        thread.timed_out = False
        if seconds is not None:
            self._push(self.now + max(seconds, 0.0), thread, thread.wait)
        self.hub.switch()
        if thread.process.dead:
            raise Killed
        return not thread.timed_out

    def give_way(self) -> None:
        """Let other threads run before this one continues."""
        thread = self.current
        if thread is None:
            return
        if thread.process.dead:
            self.stop_here()
        self._ready.append(thread)
        self.hub.switch()
        if thread.process.dead:
            raise Killed

    def preempt(self) -> None:
        """Sometimes let other threads run."""
        if self.preemption and self.current is not None and self._random() < self.preemption:
            self.give_way()

    def wake(self, thread: SimThread) -> None:
        """Let a parked thread run; does nothing if it is not parked."""
        if thread.waiting:
            thread.waiting = False
            self._ready.append(thread)

    def start(self, thread: SimThread) -> None:
        """Let a new thread run."""
        thread.process.threads[thread] = None
        thread.on_end.append(lambda: thread.process.threads.pop(thread, None))
        self._ready.append(thread)

    # For the world

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call a function in the main greenlet at a time; it must not park."""
        self._push(max(time, self.now), call, 0)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function in the main greenlet some seconds from now."""
        self.at(self.now + seconds, call)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False, *, every: int = 1) -> bool:
        """Run until `stop` or a time; return whether `stop` returned True.

        It is called after each `every` steps, and after the last one.
        """
        steps, random = 0, self._random
        alarms, ready = self._alarms, self._ready
        while not self.stopped:
            if not steps % every and stop():
                return True
            steps += 1
            if alarms and alarms[0][0] <= self.now:
                self._fire()
            elif ready:
                at = int(random() * len(ready)) if len(ready) > 1 else 0
                thread = ready[at]
                ready[at] = ready[-1]
                ready.pop()
                self._switch(thread)
            elif alarms and alarms[0][0] <= until:
                self.now = alarms[0][0]
            else:
                self.now = max(self.now, until)
                return stop()
        return False

    def drop(self, thread: SimThread) -> None:
        """End a thread of a dead process once the world is over: it leaves its blocks and reaches nothing any more."""
        thread.dropped = 1
        while not thread.done and thread.dropped < 100:
            self.current = thread
            try:
                if thread.greenlet:
                    thread.greenlet.throw(Killed)
                else:
                    thread.done = True
            except BaseException:
                thread.done = True
            finally:
                self.current = None

    def stop_here(self) -> None:
        """Stop the running thread, whose process is dead, for ever."""
        thread = self.current
        assert thread is not None
        if not thread.dropped:
            self.hub.switch()
        thread.dropped += 1
        if thread.dropped > 50:  # it catches Killed in a loop
            self.hub.switch()
        raise Killed

    def _push(self, time: float, what: SimThread | Callable[[], None], wait: int) -> None:
        self._alarm += 1
        heapq.heappush(self._alarms, (time, self._alarm, what, wait))

    def _fire(self) -> None:
        _, _, what, wait = heapq.heappop(self._alarms)
        if not isinstance(what, SimThread):
            what()
        elif what.waiting and what.wait == wait:
            what.timed_out = True
            self.wake(what)

    def _switch(self, thread: SimThread) -> None:
        process = thread.process
        if process.dead:
            return
        if process.paused:
            process.stopped.append(thread)
            return
        self.runs += 1
        self.now += SWITCH_SECONDS
        if self.runs > LIVELOCK:
            raise Livelock(f"{thread} and others ran {LIVELOCK} times, until {self.now:.3f} s")
        if thread.loop is not None:
            asyncio._set_running_loop(thread.loop)
            sys.set_asyncgen_hooks(*thread.hooks)
        self.current = thread
        try:
            thread.greenlet.switch()
        finally:
            self.current = None
            thread.loop = loop = asyncio._get_running_loop()
            if loop is not None:  # outside of threads none is running
                thread.hooks = sys.get_asyncgen_hooks()
                asyncio._set_running_loop(None)
                sys.set_asyncgen_hooks(None, None)

    def release(self, stopped: list[SimThread]) -> None:
        """Let the threads of a process that was paused run."""
        self._ready += stopped
        stopped.clear()
