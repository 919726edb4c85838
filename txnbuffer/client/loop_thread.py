"""An event loop in a background thread, for code without asyncio"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from broker_io.environment import ThreadQueue, current
from txnbuffer.errors import InvalidRequest

Result = TypeVar("Result")

STOP_TIMEOUT = 5.0
"""Seconds to wait for cancelled work."""


class LoopThread:
    """An event loop in a thread of its own; other threads run coroutines on it."""

    def __init__(self) -> None:
        self._threads = current().threads
        self._loop = asyncio.new_event_loop()
        self._started: set[asyncio.Task[Any]] = set()
        self._lock = self._threads.lock()
        self._ending = False
        self._thread = self._threads.thread(self._loop.run_forever, name="txnbuffer-client", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine and return its future. Raises InvalidRequest once the loop stops."""

        async def kept() -> Result:
            task = asyncio.ensure_future(work)
            self._started.add(task)
            task.add_done_callback(self._started.discard)
            return await task

        try:
            return self._begin(kept())
        except InvalidRequest:
            work.close()
            raise

    def cancel_started(self) -> None:
        """Cancel the unfinished coroutines of `start`, and wait until they have ended."""

        async def cancelled() -> None:
            started = [*self._started]
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

        self.call(cancelled())

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. KeyboardInterrupt in the waiting thread cancels the coroutine.

        Raises InvalidRequest once the loop stops, and in the loop's own thread.
        """
        try:
            self.check_other()
        except InvalidRequest:
            work.close()
            raise
        future = self._begin(work)
        try:
            return _result(future)
        except KeyboardInterrupt as interrupt:
            future.cancel()
            interrupt.add_note("a commit that was in progress may have happened: query its outcome")
            raise

    def call_with_callbacks(self, work: Callable[[Callback], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine and return its result; `work` gets a function that runs calls in the waiting thread."""
        self.check_other()
        waiting: ThreadQueue[tuple[Future[Any], Callable[[], Any]] | None] = self._threads.queue()

        async def in_caller(function: Callable[[], Any]) -> Any:
            done: Future[tuple[Any, Exception | None]] = Future()
            waiting.put((done, function))
            result, error = await asyncio.wrap_future(done)
            if error is not None:
                raise error
            return result

        ended = self._threads.event()

        async def whole() -> Result:
            try:
                return await work(in_caller)
            finally:
                ended.set()

        future = self.start(whole())
        future.add_done_callback(lambda _: waiting.put(None))
        try:
            while (asked := waiting.get()) is not None:
                done, function = asked
                if not done.set_running_or_notify_cancel():
                    continue
                done.set_result(_outcome(function))
        except BaseException:
            future.cancel()
            ended.wait(STOP_TIMEOUT)
            raise
        return _result(future)

    def check_other(self) -> None:
        """Raises InvalidRequest in the loop's own thread, which would wait for itself forever."""
        if self._thread.is_current():
            raise InvalidRequest(
                "a serializer or log handler runs in the client's own thread and cannot wait for the client: call the "
                "client from another thread, or use another client"
            )

    def stop(self) -> None:
        """Cancel all unfinished coroutines, then stop the loop and its thread."""

        async def cancelled() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=STOP_TIMEOUT)

        with self._lock:  # nothing can start after `cancelled` has listed the tasks
            self._ending = True
            others_end = asyncio.run_coroutine_threadsafe(cancelled(), self._loop)
        others_end.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Submit a coroutine to the loop. Raises InvalidRequest once the loop stops."""
        with self._lock:
            if not self._ending:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise InvalidRequest("the client was closed: connect again")


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result and the exception of a function; a future does not accept every exception."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _result(future: Future[Result]) -> Result:
    """Return the result of a future. Raises InvalidRequest if another thread closed the client during the call."""
    try:
        return future.result()
    except CancelledError:
        raise InvalidRequest("the client was closed during the call: connect again") from None


Callback = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
