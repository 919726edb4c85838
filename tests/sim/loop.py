"""The event loop of a simulated process: stock asyncio, with a selector that parks its thread in the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from sim.scheduler import SimThread
    from sim.world import Process

DEFAULT_WORKERS = 8


class _Selector:
    """What the loop waits with: until a time, or until it is woken."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.world.scheduler
        self._thread: SimThread | None = None
        self._woken = False

    def select(self, timeout: float | None) -> None:
        scheduler = self._scheduler
        if self._woken or timeout == 0:
            self._woken = False
            scheduler.preempt()
            return
        self._thread = scheduler.current
        seconds = None if timeout is None else self._process.clock.world_seconds(timeout)
        scheduler.park(seconds)
        self._thread = None
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._thread is not None:
            self._scheduler.wake(self._thread)

    def close(self) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """An event loop of a simulated process; `run_in_executor` and `asyncio.to_thread` run in simulated threads."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._clock_resolution = 1e-9
        self._selector = _Selector(process)
        self._workers: Any = None
        self._signals: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        process.loops.append(self)
        self.set_exception_handler(_report)

    def time(self) -> float:
        return self._process.clock.monotonic()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """As in the base class, without its debugging."""
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        if context is None and self._process.world.scheduler.current is None:
            context = self._process.context  # called by the world, which has no environment
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self._check_closed()
        if executor is None:
            if self._workers is None:
                self._workers = self._process.environment.threads.executor(DEFAULT_WORKERS, "asyncio")
            executor = self._workers
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self._signals[sig] = callback, args

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def signal(self, number: int) -> None:
        """Deliver a signal; without a handler it does nothing."""
        if number in self._signals:
            callback, args = self._signals[number]
            self.call_soon_threadsafe(callback, *args)

    def abandon(self) -> None:
        """Close the loop of a process that is gone, whose threads have ended."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        self._ready.clear()
        self._scheduled.clear()
        self._thread_id = None
        self._asyncgens.clear()
        if not self.is_closed():
            self.close()

    def _run_once(self) -> None:
        """One iteration, as in the base class without its debugging and its limits of what a real selector takes."""
        self._stall()
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if ready or self._stopping:
            self._selector.select(0)
        else:
            self._selector.select(max(0.0, scheduled[0]._when - self.time()) if scheduled else None)
        if scheduled:
            end = self.time() + self._clock_resolution
            while scheduled and scheduled[0]._when < end:
                handle = heapq.heappop(scheduled)
                handle._scheduled = False
                ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _stall(self) -> None:
        """Sometimes lose time, if the process has too little of it."""
        process = self._process
        if process.stalls and process.stalling.random() < process.stalls:
            process.world.scheduler.park(process.stalling.uniform(0.0, 0.5))

    def _write_to_self(self) -> None:
        self._selector.wake()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception that nothing handled is a finding, except in a process that is gone."""
    assert isinstance(loop, SimLoop)
    loop._process.loop_failed(context)


@contextlib.contextmanager
def simulated_loops(find: Callable[[], Process | None]) -> Iterator[None]:
    """Let `asyncio.new_event_loop` make simulated loops in simulated threads: for the process whose thread asks."""
    stock = asyncio.new_event_loop

    def new_event_loop() -> asyncio.AbstractEventLoop:
        process = find()
        return stock() if process is None else SimLoop(process)

    # Not a policy of asyncio, because those are deprecated since Python 3.14.
    with (
        mock.patch.object(asyncio, "new_event_loop", new_event_loop),
        mock.patch.object(asyncio.events, "new_event_loop", new_event_loop),
    ):
        yield


def run_main(process: Process, main: Callable[[], Any]) -> None:
    """Run the coroutine function of a process as `asyncio.run` does."""
    loop = SimLoop(process)
    try:
        loop.run_until_complete(main())
    finally:
        if not process.dead:
            _end(loop)


def _end(loop: SimLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
