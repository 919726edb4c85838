"""The portal of the sync client: other threads call an asyncio client on an event loop in a thread of its own

A signal handler may raise any exception between any two steps of a waiting thread. So the loop owns the work: the
thread only waits for it, asks the loop to cancel it if an exception comes, and adds notes on its outcome to the
exception. What both threads use are locks and queues written in C: a handler that raises in `threading.Event` or
`concurrent.futures.Future` can leave their lock taken, and the loop would wait for it forever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar

from broker_io.environment import ThreadQueue, current
from broker_io.waits import SIGNAL_SECONDS, next_of
from txnbuffer.client import lifecycle
from txnbuffer.client.client import Client
from txnbuffer.client.session.session import CLOSED
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
"""Seconds that an interrupted call waits until it has ended."""
LEFT_INTERVAL = 0.5
"""Seconds between two looks for blocks that were left."""
NESTED = 8
"""How many exceptions may arrive, one while the other is handled, before a call no longer waits for its outcome."""
UNENDED = "the interrupted call has not ended yet, and may still take effect"


class LoopCall(Generic[Result]):
    """A coroutine function to run on the loop, for whose end another thread waits.

    `error`: the one that it raised. `noted`: the exception of a signal handler that has notes about the outcome.
    """

    end_timeout = CANCEL_TIMEOUT
    """Seconds to wait for the end after an interruption."""

    def __init__(self, work: Work[Result], loop: asyncio.AbstractEventLoop) -> None:
        self.error: BaseException | None = None
        self.noted: BaseException | None = None
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._started = self._interrupted = self._cancelled = False
        self._ended = current().threads.event()
        self._result: Result
        self._notes: Sequence[str] = ()

    def result(self) -> Result:
        """Wait for the end; return the result or raise the error; InvalidRequest if the loop ends before the call."""
        while not self._ended.wait(SIGNAL_SECONDS):
            if self._loop.is_closed():
                raise InvalidRequest(CLOSED)
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # a cycle through the traceback would keep the frames of the caller
        return self._result

    def interrupt(self) -> None:
        """Give up the call, in any thread; more than once is the same as once."""
        with contextlib.suppress(InvalidRequest):  # the loop was closed meanwhile
            call_soon(self._loop, self._interrupt)

    def outcome(self) -> Sequence[str]:
        """Wait for the end of an interrupted call, and return notes that say what it may have done."""
        if not self._ended.wait(self.end_timeout):
            return [UNENDED]
        if self._cancelled:
            return self._notes
        if self.error is not None:
            return [f"the interrupted call raised {type(self.error).__name__}: {self.error}"]
        return self.completion()

    def completion(self) -> Sequence[str]:
        """The notes of an exception that came when the call had completed."""
        return ["the interrupted call had already completed"]

    # On the loop

    def start(self) -> None:
        self._started = True
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._finish)

    def give_up(self, task: asyncio.Task[None]) -> None:
        """End the task that runs the call."""
        task.cancel()

    def on_interrupt(self) -> None:
        """The call was interrupted; it may have ended, or never start."""

    def on_end(self) -> None:
        """The call has ended."""

    async def _run(self) -> None:
        try:
            self._result = await self._work()
        except asyncio.CancelledError as cancelled:
            self._notes = getattr(cancelled, "__notes__", ())
            raise
        except BaseException as error:
            self.error = error

    def _interrupt(self) -> None:
        if not self._started:  # `start` would have come before: it was never scheduled
            self._end_cancelled()
        elif self._task is not None and not self._interrupted:
            self.give_up(self._task)
        self._interrupted = True
        self.on_interrupt()

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._task = None  # the last reference runs code of asyncio, where the exception of a handler is lost
        if task.cancelled():
            self._end_cancelled()
        else:
            self._ended.set()
            self.on_end()

    def _end_cancelled(self) -> None:
        self._cancelled = True
        self.error = InvalidRequest("the client was closed during the call: connect again")
        self._ended.set()
        self.on_end()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function on a loop of another thread. Raises InvalidRequest if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():  # a signal handler raised it
            raise
        raise InvalidRequest(CLOSED) from None


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        threads = current().threads
        self.loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[Any] | None] = set()
        self._lock = threads.reentrant_lock()  # reentrant for signal handlers
        self._ending = self._stopped = False
        self._end: asyncio.Task[None] | None = None
        self._end_error: Exception | None = None
        self._ended = threads.event()
        self._thread = threads.thread(self._run, name="txnbuffer-client", daemon=True)
        self._thread.start()

    def call(self, work: Work[Result]) -> Result:
        """Run a coroutine function and return its result. Raises as `wait_for`."""
        return self.wait_for(LoopCall(work, self.loop))

    def wait_for(self, one: LoopCall[Result]) -> Result:
        """Run a call and return its result. An exception that a signal handler raises in the waiting thread cancels it.

        The exception gets the notes of the cancelled call, and a note if the call completed or may still complete.
        Raises InvalidRequest once the loop stops, and in the loop's own thread.
        """
        self.check_other()
        try:
            self.submit(one)
            return one.result()
        except BaseException as raised:
            if raised is one.error:
                raise
            try:
                try:
                    self._interrupted(one, raised)
                except BaseException as another:  # perhaps before its first step
                    if one.noted is not another:
                        self._interrupted(one, another)
                    raise
            except BaseException as another:
                if one.noted is not another:
                    another.add_note(UNENDED)
                raise
            raise
        finally:
            del one

    def _interrupted(self, one: LoopCall[Any], raised: BaseException, nested: int = NESTED) -> None:
        """A signal handler raised an exception during a call: give the call up, and add notes about its outcome.

        If the handler raises again meanwhile, that exception takes the place of the first, with the notes.
        """
        try:
            one.interrupt()
            for note in one.outcome():
                raised.add_note(note)
            one.noted = raised
        except BaseException as another:
            if nested:
                self._interrupted(one, another, nested - 1)
            raise

    def start(self, work: Work[Result]) -> Future[Result]:
        """Start a coroutine function and return its future; `cancel_started` cancels it. Raises as `submit`."""
        self.check_other()
        with self._lock:
            if self._ending:
                raise InvalidRequest(CLOSED)
            return asyncio.run_coroutine_threadsafe(self.kept(work), self.loop)

    def submit(self, one: LoopCall[Result]) -> None:
        """Run a call on the loop. Raises InvalidRequest once the loop stops."""
        with self._lock:
            if self._ending:
                one.error = InvalidRequest(CLOSED)
                raise one.error
            call_soon(self.loop, one.start)

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, without waiting for that. Raises InvalidRequest once the loop has stopped."""
        call_soon(self.loop, function)

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

        All of this is still done if an exception of a signal handler ends the wait; another call waits for it. Raises
        the error of `first`, once.
        """
        with contextlib.suppress(InvalidRequest):  # the loop has ended
            self.soon(partial(self._begin_end, first))
        while not self._ended.wait(SIGNAL_SECONDS):
            pass
        self._thread.join()  # it takes the thread for ended once an exception has interrupted it
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
            while not self._stopped:  # the loop stops when a task raises SystemExit, which its caller gets
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
        finally:
            self.loop.close()
            self._ended.set()

    def _begin_end(self, first: Work[None] | None) -> None:
        with self._lock:  # nothing can start after `_end_all` has listed the tasks
            self._ending = True
        if self._end is None:
            self._end = self.loop.create_task(self._end_all(first))

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
        self._stopped = True
        self.loop.stop()


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
        self.left: deque[Callable[[], bool]] = deque()
        """For each block that an exception left, what ends its transaction, on the loop: whatever is raised after
        `append`, which is written in C. It returns False while a call that ends it still runs."""
        loop.soon(self._finish_left)

    @classmethod
    def open(cls, opening: Work[Client], *, embedded: bool = False) -> Self:
        """Open a client. `embedded`: it needs executors of this process, and closes when the interpreter exits."""
        if not CLOSED_AT_EXIT.prepare() and embedded:
            raise InvalidRequest("the interpreter is exiting, and cannot open a log any more: open it earlier")
        loop, opened = LoopThread(), list[Client]()

        async def work() -> None:
            opened.append(await opening())

        async def undo() -> None:
            await loop.cancel_started()
            for client in opened:
                await client.close()

        try:
            loop.call(partial(loop.kept, work))
            portal = cls(opened[0], loop)
        except BaseException:
            loop.stop(undo)
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

        If an exception of a signal handler ends the wait, the client closes in the background; another call waits for
        that.
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
        waiting: ThreadQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = current().threads.queue()

        async def in_caller(function: Callable[[], Any]) -> Any:
            answer: asyncio.Future[tuple[Any, Exception | None]] = asyncio.get_running_loop().create_future()
            waiting.put((answer, function))
            result, error = await answer
            if error is not None:
                raise error
            return result

        return self.loop.wait_for(
            CallWithCallbacks(partial(self.loop.kept, partial(work, in_caller)), self.loop.loop, waiting)
        )

    def check(self) -> None:
        """Raises UsedAfterFork, and InvalidRequest after `close`."""
        lifecycle.check(self.forked_from)
        if self.closed:
            raise InvalidRequest(CLOSED)

    def _finish_left(self) -> None:
        """Finish the blocks that were left, now and later."""
        self.loop.loop.call_later(LEFT_INTERVAL, self._finish_left)
        for _ in range(len(self.left)):
            finish = self.left.popleft()
            if not finish():
                self.left.append(finish)


class CallWithCallbacks(LoopCall[Result]):
    """A call whose waiting thread gets functions to call from a queue, and None at the end."""

    end_timeout = STOP_TIMEOUT

    def __init__(self, work: Work[Result], loop: asyncio.AbstractEventLoop, waiting: ThreadQueue[Any]) -> None:
        super().__init__(work, loop)
        self._waiting = waiting

    def result(self) -> Result:
        while (asked := next_of(self._waiting)) is not None:
            answer, function = asked
            if not answer.done():
                call_soon(self._loop, partial(_answer, answer, _outcome(function)))
        return super().result()

    def on_end(self) -> None:
        self._waiting.put(None)


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
    """Return the result and the exception of a function; another exception ends the call itself."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _answer(answer: asyncio.Future[Any], outcome: tuple[Any, Exception | None]) -> None:
    if not answer.done():
        answer.set_result(outcome)
