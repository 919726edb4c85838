"""The portal of the sync client: other threads call an asyncio client on an event loop in a thread of its own

A call can be cancelled before and after its task has started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar

from broker_io.environment import ThreadQueue, current
from txnbuffer.client import lifecycle
from txnbuffer.client.client import Client
from txnbuffer.errors import InvalidRequest

P = ParamSpec("P")
Target = TypeVar("Target", covariant=True)
Result = TypeVar("Result")
Work: TypeAlias = Callable[[], Coroutine[Any, Any, Result]]
InCaller: TypeAlias = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function in the thread that waits for the call, and returns its result."""

STOP_TIMEOUT = 5.0
"""Seconds to wait for cancelled work."""
CLOSED = "the client was closed: connect again"


class LoopCall(Generic[Result]):
    """A coroutine function to run on the loop, which other threads can cancel, also before it has started."""

    def __init__(self, work: Work[Result], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def run(self) -> Result:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._work()

    def cancel(self) -> None:
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        threads = current().threads
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[Any] | None] = set()
        self._lock = threads.reentrant_lock()  # reentrant for signal handlers
        self._ending = False
        self._thread = threads.thread(self._loop.run_forever, name="txnbuffer-client", daemon=True)
        self._thread.start()

    def call(self, work: Work[Result]) -> Result:
        """Run a coroutine function and return its result. KeyboardInterrupt in the waiting thread cancels it.

        Raises InvalidRequest once the loop stops, and in the loop's own thread.
        """
        one = LoopCall(work, self._loop)
        try:
            return result_of(self.submit(one))
        except KeyboardInterrupt as interrupt:
            one.cancel()
            interrupt.add_note("a commit that was in progress may have happened: query its outcome")
            raise

    def start(self, work: Work[Result]) -> Future[Result]:
        """Start a coroutine function and return its future; `cancel_started` cancels it. Raises as `call`."""
        return self.submit(self.startable(work))

    def startable(self, work: Work[Result]) -> LoopCall[Result]:
        """Return a call for `submit` that `cancel_started` cancels as well."""
        return LoopCall(partial(self._kept, work), self._loop)

    def submit(self, one: LoopCall[Result]) -> Future[Result]:
        """Run a call on the loop; return its future. Raises as `call`."""
        self.check_other()
        with self._lock:
            if self._ending:
                raise InvalidRequest(CLOSED)
            return asyncio.run_coroutine_threadsafe(one.run(), self._loop)

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, without waiting for that. Raises InvalidRequest once the loop has stopped."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise InvalidRequest(CLOSED) from None

    async def cancel_started(self) -> None:
        """Cancel the unfinished coroutines of `start`, and wait until they have ended."""
        started = [task for task in self._started if task is not None]
        for task in started:
            task.cancel()
        if started:
            await asyncio.wait(started)

    def check_other(self) -> None:
        """Raises InvalidRequest in the loop's own thread, which would wait for itself forever."""
        if self._thread.is_current():
            raise InvalidRequest(
                "a serializer or log handler runs in the client's own thread and cannot wait for the client: call the "
                "client from another thread, or use another client"
            )

    def stop(self) -> None:
        """Cancel all unfinished coroutines, then stop the loop and its thread."""
        with self._lock:  # nothing can start after `_end` has listed the tasks
            self._ending = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _kept(self, work: Work[Result]) -> Result:
        task = asyncio.current_task()
        self._started.add(task)
        try:
            return await work()
        finally:
            self._started.discard(task)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=STOP_TIMEOUT)


def result_of(future: Future[Result]) -> Result:
    """Return the result of a future. Raises InvalidRequest if another thread closed the client during the call."""
    try:
        return future.result()
    except CancelledError:
        raise InvalidRequest("the client was closed during the call: connect again") from None


class SyncObject(Generic[Target]):
    """An object of the sync client; its methods wait for those of `_target`, an object of the asyncio client."""

    def __init__(self, portal: Portal, target: Target) -> None:
        self._portal = portal
        self._target = target


def blocking(
    method: Callable[Concatenate[Target, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[SyncObject[Target], P], Result]:
    """Return a method for SyncObject that waits for this method of its target, and has the same signature."""

    @wraps(method)
    def call(self: SyncObject[Target], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._portal.call(partial(method, self._target), *args, **kwargs)

    return call


class Portal(SyncObject[Client]):
    """Runs the methods of an asyncio client on the event loop of a background thread; all other threads may call it."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        super().__init__(self, client)
        self.client = client
        self.loop = loop
        self.forked_from = lifecycle.generation()
        self.closed = False

    @classmethod
    def open(cls, opening: Work[Client]) -> Self:
        loop = LoopThread()
        try:
            return cls(loop.call(opening), loop)
        except BaseException:
            loop.stop()
            raise

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that connected, in which nothing can be closed."""
        return lifecycle.inherited(self.forked_from)

    def close(self) -> None:
        """Close the client; open transactions abort. Raises UsedAfterFork."""
        lifecycle.check(self.forked_from)
        self.loop.check_other()
        if not self.closed:
            self.closed = True
            self.loop.call(self.loop.cancel_started)
            self.loop.call(self.client.close)
            self.loop.stop()

    def call(self, function: Callable[P, Coroutine[Any, Any, Result]], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run a coroutine function on the loop; return its result.

        Raises UsedAfterFork, and InvalidRequest after `close`.
        """
        self.check()
        return self.loop.call(partial(function, *args, **kwargs))

    def start(
        self, function: Callable[P, Coroutine[Any, Any, Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[Result]:
        """Start a coroutine function on the loop; return a future. `close` cancels it. Raises as `call`."""
        self.check()
        return self.loop.start(partial(function, *args, **kwargs))

    def call_with_callbacks(self, work: Callable[[InCaller], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine and return its result; `work` gets a function that runs calls in the waiting thread."""
        self.check()
        threads = current().threads
        waiting: ThreadQueue[tuple[Future[Any], Callable[[], Any]] | None] = threads.queue()
        ended = threads.event()

        async def in_caller(function: Callable[[], Any]) -> Any:
            done: Future[tuple[Any, Exception | None]] = Future()
            waiting.put((done, function))
            result, error = await asyncio.wrap_future(done)
            if error is not None:
                raise error
            return result

        async def whole() -> Result:
            try:
                return await work(in_caller)
            finally:
                ended.set()

        one = self.loop.startable(whole)
        future: Future[Result] | None = None
        try:
            future = self.loop.submit(one)
            future.add_done_callback(lambda _: waiting.put(None))
            while (asked := waiting.get()) is not None:
                done, function = asked
                if done.set_running_or_notify_cancel():
                    done.set_result(_outcome(function))
        except BaseException:
            one.cancel()
            if future is not None:
                ended.wait(STOP_TIMEOUT)
            raise
        return result_of(future)

    def check(self) -> None:
        """Raises UsedAfterFork, and InvalidRequest after `close`."""
        lifecycle.check(self.forked_from)
        if self.closed:
            raise InvalidRequest(CLOSED)


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result and the exception of a function; a future does not accept every exception."""
    try:
        return function(), None
    except Exception as error:
        return None, error
