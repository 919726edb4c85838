"""Opening and closing: `async with`, cancellation, and forked processes

A forked child cannot use its parent's client: the connections and threads of the client are in the parent only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from broker_io.environment import AFTER_GRPC, grpc_inherited
from txnbuffer.errors import ClientBroken, InvalidRequest, UsedAfterFork


class Closeable(Protocol):
    def close(self) -> None: ...


class Connection(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)
L = TypeVar("L", bound=Connection)
Result = TypeVar("Result")


class ClosedOnExit:
    """Base of classes with an asynchronous `close`."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def opened(thread: Executor, opening: Callable[[], C]) -> C:
    """Call `opening` in a thread and return the result. If the caller is cancelled, the thread closes the result."""
    found: list[C] = []

    def work() -> C:
        found.append(opening())
        return found[0]

    def close() -> None:
        for one in found:
            one.close()

    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    except asyncio.CancelledError:
        thread.submit(close)
        raise


async def run_to_completion(
    work: Awaitable[Result], undo: Callable[[Result], Awaitable[object]] | None = None
) -> Result:
    """Return the result of `work`. If the caller is cancelled, complete `work`, then `undo` it, then raise."""
    doing = asyncio.ensure_future(work)
    if not await _cancelled_during(doing):
        return doing.result()
    if not doing.cancelled() and doing.exception() is None and undo is not None:
        await _cancelled_during(asyncio.ensure_future(undo(doing.result())))
    raise asyncio.CancelledError


async def _cancelled_during(doing: asyncio.Future[Any]) -> bool:
    """Wait until a future is done; return whether the waiting task was cancelled meanwhile."""
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def retrieve_error(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as seen: its caller may have been cancelled, and then nobody raises it."""
    if not future.cancelled():
        future.exception()


def ended_task(task: asyncio.Task[Any]) -> ClientBroken:
    """The error of requests once a task that works for them has ended before the client was closed."""
    if not task.cancelled():
        return ClientBroken(
            f"internal client error: {task.exception()!r}; operations in flight may or may not have completed. Open a "
            "new client, and report this"
        )
    return ClientBroken(
        "the tasks of the client were cancelled, as asyncio.run does at its end; operations in flight may or may not "
        "have completed. Use a client only until then, or open a new one"
    )


async def cancel(*tasks: asyncio.Future[Result] | None) -> list[Result | BaseException]:
    """Cancel tasks, and return once they have ended: their results or errors."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    return await asyncio.gather(*begun, return_exceptions=True)


async def abandon(connecting: asyncio.Future[L]) -> None:
    """Stop connecting; close what is connected already."""
    (link,) = await cancel(connecting)
    if not isinstance(link, BaseException):
        await link.close()


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raises InvalidRequest on another event loop than this one of a client."""
    if asyncio.get_running_loop() is not loop:
        raise InvalidRequest("this client belongs to another event loop: open one on each loop, or use a sync client")


class ForkGeneration:
    """Counts forks: `generation` of a child process is one above that of its parent."""

    generation = 0


def generation() -> int:
    """Return a number that identifies this process for `check`."""
    return ForkGeneration.generation


def inherited(remembered: int) -> bool:
    """Return whether this process was forked after `generation()` returned this number."""
    return remembered != ForkGeneration.generation


def check(remembered: int) -> None:
    """Raises UsedAfterFork if this process was forked after `generation()` returned this number."""
    if remembered != ForkGeneration.generation:
        advice = AFTER_GRPC if grpc_inherited() else "connect after forking"
        raise UsedAfterFork(f"this client belongs to the parent process: {advice}")


def _forked() -> None:
    ForkGeneration.generation += 1


os.register_at_fork(after_in_child=_forked)
