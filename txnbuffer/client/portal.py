"""The portal of the sync client: other threads call an asyncio client on an event loop in a thread of its own

A call can be cancelled before and after its task has started. Closing ends in the loop's thread, so that it completes
even if KeyboardInterrupt ends the wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar

from broker_io.environment import ThreadQueue, current
from txnbuffer.client import lifecycle
from txnbuffer.client.client import Client
from txnbuffer.client.session import CLOSED
from txnbuffer.errors import InvalidRequest

P = ParamSpec("P")
Target = TypeVar("Target", covariant=True)
Result = TypeVar("Result")
Work: TypeAlias = Callable[[], Coroutine[Any, Any, Result]]
InCaller: TypeAlias = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function in the thread that waits for the call, and returns its result."""

STOP_TIMEOUT = 5.0
"""Seconds to wait for cancelled work."""
CANCEL_TIMEOUT = 2.0
"""Seconds that an interrupted call waits until it is cancelled."""


class LoopCall(Generic[Result]):
    """A coroutine function to run on the loop, which other threads can cancel, also before it has started.

    `notes`: those of the CancelledError that ended it.
    """

    def __init__(self, work: Work[Result], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self.notes: list[str] = []

    async def run(self) -> Result:
        self._task = asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        try:
            return await self._work()
        except asyncio.CancelledError as cancelled:
            self.notes = getattr(cancelled, "__notes__", [])
            raise

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
        self._end: asyncio.Task[None] | None = None
        self._end_error: Exception | None = None
        self._ended = threads.event()
        self._thread = threads.thread(self._run, name="txnbuffer-client", daemon=True)
        self._thread.start()

    def call(self, work: Work[Result]) -> Result:
        """Run a coroutine function and return its result. KeyboardInterrupt in the waiting thread cancels it.

        The exception gets the notes of the cancelled call, and a note if the call completed or may still complete.
        Raises InvalidRequest once the loop stops, and in the loop's own thread.
        """
        one = LoopCall(work, self._loop)
        future: Future[Result] | None = None
        try:
            future = self.submit(one)
            return result_of(future)
        except KeyboardInterrupt as interrupt:
            one.cancel()
            if future is not None:
                for note in _notes(one, future):
                    interrupt.add_note(note)
            raise

    def start(self, work: Work[Result]) -> Future[Result]:
        """Start a coroutine function and return its future; `cancel_started` cancels it. Raises as `call`."""
        return self.submit(self.startable(work))

    def startable(self, work: Work[Result]) -> LoopCall[Result]:
        """Return a call for `submit` that `cancel_started` cancels as well."""
        return LoopCall(partial(self.kept, work), self._loop)

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

    def stop(self, first: Work[None] | None = None) -> None:
        """Run `first`, cancel all other coroutines, and end the loop and its thread; wait for that.

        All of this is still done if KeyboardInterrupt ends the wait; another call waits for it. Raises the error of
        `first`, once.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin_end, first)
        self._ended.wait()  # `join` takes the thread for ended once KeyboardInterrupt has interrupted it
        self._thread.join()
        error, self._end_error = self._end_error, None
        if error is not None:
            raise error

    async def kept(self, work: Work[Result]) -> Result:
        task = asyncio.current_task()
        self._started.add(task)
        try:
            return await work()
        finally:
            self._started.discard(task)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            self._ended.set()

    def _begin_end(self, first: Work[None] | None) -> None:
        with self._lock:  # nothing can start after `_end_all` has listed the tasks
            self._ending = True
        if self._end is None:
            self._end = self._loop.create_task(self._end_all(first))

    async def _end_all(self, first: Work[None] | None) -> None:
        try:
            if first is not None:
                await first()
        except Exception as error:
            self._end_error = error
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=STOP_TIMEOUT)
        self._loop.stop()


def _notes(one: LoopCall[Any], future: Future[Any]) -> list[str]:
    """Return the notes for the KeyboardInterrupt that has cancelled a call, when the call has ended."""
    if not wait([future], CANCEL_TIMEOUT).done:
        return ["the interrupted call has not ended yet, and may still take effect"]
    if not future.cancelled() and future.exception() is None:
        return ["the interrupted call had already completed"]
    return one.notes


def result_of(future: Future[Result]) -> Result:
    """Return the result of a future. Raises InvalidRequest if another thread closed the client during the call."""
    try:
        return future.result()
    except CancelledError:
        raise InvalidRequest("the client was closed during the call: connect again") from None


SIGNAL_SECONDS = 1.0
"""A signal that comes just before a wait does not interrupt it; it is handled within this many seconds."""


def _next_of(waiting: ThreadQueue[Result]) -> Result:
    """Wait for the next item of a queue, so that Ctrl-C ends the wait at whatever time it comes."""
    while True:
        with contextlib.suppress(queue.Empty):
            return waiting.get(timeout=SIGNAL_SECONDS)


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
    def open(cls, opening: Work[Client], *, embedded: bool = False) -> Self:
        """Open a client. `embedded`: it needs executors of this process, and closes when the interpreter exits."""
        if not CLOSED_AT_EXIT.prepare() and embedded:
            raise InvalidRequest("the interpreter is exiting, and cannot open a log any more: open it earlier")
        loop = LoopThread()
        try:
            portal = cls(loop.call(partial(loop.kept, opening)), loop)
        except BaseException:
            loop.stop(loop.cancel_started)
            raise
        if embedded:
            CLOSED_AT_EXIT.portals.add(portal)
        return portal

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that connected, in which nothing can be closed."""
        return lifecycle.inherited(self.forked_from)

    def close(self) -> None:
        """Close the client; open transactions abort. Raises UsedAfterFork.

        If KeyboardInterrupt ends the wait, the client closes in the background; another call waits for that.
        """
        lifecycle.check(self.forked_from)
        self.loop.check_other()
        self.closed = True
        CLOSED_AT_EXIT.portals.add(self)  # if the wait is interrupted, the exit waits
        self.loop.stop(self._close)
        CLOSED_AT_EXIT.portals.discard(self)

    async def _close(self) -> None:
        await self.loop.cancel_started()
        await self.client.close()

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
            while (asked := _next_of(waiting)) is not None:
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


class _ClosedAtExit:
    """Closes clients when the interpreter begins to exit; afterwards executors accept no more work."""

    def __init__(self) -> None:
        self.portals: set[Portal] = set()
        self._prepared = False
        self._exiting = False

    def prepare(self) -> bool:
        """Close at exit what is in `portals` then; False if the interpreter is exiting already."""
        if not self._prepared:
            self._prepared = True
            try:
                current().threads.at_exit(self._close_all)
            except RuntimeError:
                self._exiting = True
        return not self._exiting

    def _close_all(self) -> None:
        self._exiting = True
        for portal in [*self.portals]:
            if not portal.inherited:
                with contextlib.suppress(Exception):
                    portal.close()


CLOSED_AT_EXIT = _ClosedAtExit()


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result and the exception of a function; a future does not accept every exception."""
    try:
        return function(), None
    except Exception as error:
        return None, error
