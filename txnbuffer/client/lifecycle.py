"""What is opened and closed on a loop: when an `async with` block ends, and when somebody is cancelled meanwhile.

Tells a client that it is in a child process: its connection and threads stayed in the parent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from txnbuffer.errors import UsedAfterFork


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)
Result = TypeVar("Result")


class ClosedOnExit:
    """A base of classes with `close`."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def opened(thread: Executor, opening: Callable[[], C]) -> C:
    """What `opening` opens in a thread. It closes that again, as soon as it is open, for who is cancelled meanwhile."""
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


async def to_the_end(work: Awaitable[Result], undo: Callable[[Result], Awaitable[object]] | None = None) -> Result:
    """What comes of something that must not be left halfway: a cancel is raised behind it, and behind its undoing."""
    doing = asyncio.ensure_future(work)
    if not await _cancelled_during(doing):
        return doing.result()
    if not doing.cancelled() and doing.exception() is None and undo is not None:
        await _cancelled_during(asyncio.ensure_future(undo(doing.result())))
    raise asyncio.CancelledError


async def _cancelled_during(doing: asyncio.Future[Any]) -> bool:
    """Wait until something is done; whether whoever waits was cancelled meanwhile."""
    cancelled = False
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def close_all(closings: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Close one thing after the other, each whatever comes of those before it."""
    async with AsyncExitStack() as stack:
        for close in reversed([*closings]):
            stack.push_async_callback(close)


ADVICE = "fork before you connect to a service, or start the process in another way (spawn)"


class _ForkGeneration:
    """`generation` is another one in each child."""

    generation = 0
    grpc: int | None = None
    """The generation that first used gRPC."""


def generation() -> int:
    """A number to remember, and to hand to `check`."""
    return _ForkGeneration.generation


def inherited(remembered: int) -> bool:
    """Whether this is a child of the process that took the number: its blocks then end by their own exceptions."""
    return remembered != _ForkGeneration.generation


def check(remembered: int) -> None:
    """Raises UsedAfterFork in a child of the process that took the number."""
    if inherited(remembered):
        raise UsedAfterFork(f"this client was made before the process forked: {ADVICE}")


def about_to_use_grpc() -> None:
    """Raises UsedAfterFork in a child of a process that used gRPC: no connection of the child would ever be ready."""
    if _ForkGeneration.grpc is None:
        _ForkGeneration.grpc = _ForkGeneration.generation
        # Its handlers of forks are for programs that go on with gRPC in the child, and crash there now and then.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    elif _ForkGeneration.grpc != _ForkGeneration.generation:
        raise UsedAfterFork(f"gRPC was used before this process was forked, and can't be used in it: {ADVICE}")


def _forked() -> None:
    _ForkGeneration.generation += 1


os.register_at_fork(after_in_child=_forked)
