"""The port of threads in a simulated world: locks, conditions, events, queues, timers and executors that park.

`standard_library` makes futures of `concurrent.futures` park as well while a world runs.
"""

from __future__ import annotations

import concurrent.futures._base as futures_base
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from sim.scheduler import Scheduler, SimThread

if TYPE_CHECKING:
    from sim.world import Process

T = TypeVar("T")


class _Held(ABC):
    """What a `with` block holds."""

    @abstractmethod
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    @abstractmethod
    def release(self) -> None: ...

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SimLock(_Held):
    """A lock. Whoever runs first gets it, as on a real machine: waiting gives no right to it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._locked = False
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.preempt()
        if not self._locked:
            self._locked = True
            return True
        return blocking and self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        scheduler = self._scheduler
        until = None if timeout < 0 else scheduler.now + timeout
        while self._locked:
            thread = _current(scheduler)
            self._waiting.append(thread)
            if not scheduler.park(None if until is None else until - scheduler.now):
                self._waiting.remove(thread)
                return False
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._locked


def _current(scheduler: Scheduler) -> SimThread:
    if scheduler.current is None:
        raise RuntimeError("the code of the world itself must not wait")
    return scheduler.current


class SimReentrantLock(_Held):
    """A lock that its thread may acquire again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = SimLock(scheduler)
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._scheduler.current or self._scheduler
        if self._owner is not me:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner is not (self._scheduler.current or self._scheduler):
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def release_all(self) -> int:
        """Release it however often it was acquired; return how often."""
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def acquire_again(self, count: int) -> None:
        """Acquire it as often as `release_all` returned."""
        self._lock.acquire()
        self._owner, self._count = self._scheduler.current or self._scheduler, count


class SimCondition(SimReentrantLock):
    """A condition with a reentrant lock of its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._waiters: deque[SimThread] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        thread = _current(self._scheduler)
        self._waiters.append(thread)
        count = self.release_all()
        woken = self._scheduler.park(timeout)
        if not woken:
            with contextlib.suppress(ValueError):
                self._waiters.remove(thread)
        self.acquire_again(count)
        return woken

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        while n > 0 and self._waiters:
            self._scheduler.wake(self._waiters.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimEvent:
    """An event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiters: deque[SimThread] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        while self._waiters:
            self._scheduler.wake(self._waiters.popleft())

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            thread = _current(self._scheduler)
            self._waiters.append(thread)
            if not self._scheduler.park(timeout):
                with contextlib.suppress(ValueError):
                    self._waiters.remove(thread)
        return self._set


class SimQueue:
    """A queue without a limit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiters: deque[SimThread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiters:
            self._scheduler.wake(self._waiters.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        scheduler.preempt()
        until = None if timeout is None else scheduler.now + timeout
        while not self._items:
            thread = scheduler.current
            if not block or thread is None:
                raise queue.Empty
            self._waiters.append(thread)
            if not scheduler.park(None if until is None else until - scheduler.now):
                with contextlib.suppress(ValueError):
                    self._waiters.remove(thread)
                if not self._items:
                    raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)


class PortThread:
    """A thread as the port gives it: it runs in a copy of the context of its starter."""

    def __init__(self, process: Process, work: Callable[[], object], name: str) -> None:
        self._process = process
        self._work = work
        self._name = name
        self._thread: SimThread | None = None
        self._ended = SimEvent(process.world.scheduler)

    def start(self) -> None:
        scheduler = self._process.world.scheduler
        self._thread = SimThread(self._process, self._work, self._name)
        self._thread.on_end.append(self._ended.set)
        scheduler.start(self._thread)
        scheduler.preempt()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_current(self) -> bool:
        return self._process.world.scheduler.current is self._thread


class PortTimer:
    """A timer as the port gives it."""

    def __init__(self, process: Process, seconds: float, call: Callable[[], object]) -> None:
        self._cancelled = SimEvent(process.world.scheduler)
        self._seconds = seconds
        self._call = call
        self._thread = PortThread(process, self._run, "timer")

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def _run(self) -> None:
        if not self._cancelled.wait(self._seconds):
            self._call()


class SimExecutor(Executor):
    """Workers that start when there is work, each in the context in which the executor was made."""

    def __init__(self, process: Process, workers: int, name: str) -> None:
        import contextvars

        self._process = process
        self._workers = workers
        self._name = name
        self._context = contextvars.copy_context()
        self._work: SimQueue = SimQueue(process.world.scheduler)
        self._threads: list[PortThread] = []
        self._idle = 0
        self._shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._work.put((future, fn, args, kwargs))
        if self._idle > 0:
            self._idle -= 1
        elif len(self._threads) < self._workers:
            thread = PortThread(self._process, self._serve, f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            self._context.copy().run(thread.start)
        return future

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, fn, args, kwargs = item
            del item
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except Exception as error:
                    future.set_exception(error)
                except BaseException as error:
                    if self._process.dead:
                        raise
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, fn, args, kwargs
            self._idle += 1
        self._work.put(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True
        while cancel_futures and self._work._items:
            item = self._work._items.popleft()
            if item is not None:
                item[0].cancel()
        self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()


class SimThreads:
    """The threads of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._scheduler = process.world.scheduler

    def thread(self, work: Callable[[], object], *, name: str | None = None, daemon: bool = False) -> PortThread:
        return PortThread(self._process, work, name or "thread")

    def timer(self, seconds: float, call: Callable[[], object]) -> PortTimer:
        return PortTimer(self._process, seconds, call)

    def at_exit(self, call: Callable[[], object]) -> None:
        self._process.at_exit.append(call)

    def executor(self, workers: int, name: str) -> SimExecutor:
        return SimExecutor(self._process, workers, name)

    def lock(self) -> SimLock:
        return SimLock(self._scheduler)

    def reentrant_lock(self) -> SimReentrantLock:
        return SimReentrantLock(self._scheduler)

    def condition(self) -> SimCondition:
        return SimCondition(self._scheduler)

    def event(self) -> SimEvent:
        return SimEvent(self._scheduler)

    def queue(self) -> SimQueue:
        return SimQueue(self._scheduler)


class Signal(SimCondition):
    """A condition without a lock, for code that never parks between its check and its wait, such as futures."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def release_all(self) -> int:
        return 0

    def acquire_again(self, count: int) -> None:
        pass


class _Threading:
    """The names of `threading` that `concurrent.futures` uses."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Condition(self) -> Signal:  # noqa: N802  as in threading
        return Signal(self._scheduler)

    def Event(self) -> SimEvent:  # noqa: N802  as in threading
        return SimEvent(self._scheduler)

    def Lock(self) -> SimLock:  # noqa: N802  as in threading
        return SimLock(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


@contextlib.contextmanager
def standard_library(scheduler: Scheduler) -> Iterator[None]:
    """Make futures park greenlets, not the thread of the interpreter, for a block."""
    futures_base.threading = _Threading(scheduler)
    try:
        yield
    finally:
        futures_base.threading = threading
