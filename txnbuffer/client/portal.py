"""The portal of the sync client: other threads call the methods of an asyncio client on the loop of its thread"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, Self, TypeAlias, TypeVar

from broker_io.environment import ThreadQueue, current
from txnbuffer.client import lifecycle
from txnbuffer.client.client import Client
from txnbuffer.client.loop_thread import CLOSED, STOP_TIMEOUT, LoopThread, Work, result_of
from txnbuffer.errors import InvalidRequest

P = ParamSpec("P")
Result = TypeVar("Result")
InCaller: TypeAlias = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function in the thread that waits for the call, and returns its result."""


class Portal:
    """Runs the methods of an asyncio client on the event loop of a background thread; all other threads may call it."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
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
