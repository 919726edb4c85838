"""What is opened and closed on a loop: when an `async with` block ends, and when somebody is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Protocol, Self, TypeVar


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


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
