"""Waiting on the loop for what runs in threads, also when the waiting task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


def _nothing() -> None: ...


async def run(executor: Executor, call: Callable[..., T], *arguments: Any, give_up: Callable[[], None] = _nothing) -> T:
    """The result of a call in a thread. A cancelled task still waits for its end: nothing is left running.

    `give_up` is called when the task is cancelled, to make that end come soon.
    """
    return await _outlast(executor.submit(call, *arguments), give_up)


async def open_in(executor: Executor, opening: Callable[[], T], close: Callable[[T], None]) -> T:
    """As `run`, for what has to be closed: if the task is cancelled, what was opened is closed."""
    future = executor.submit(opening)
    try:
        return await _outlast(future)
    except asyncio.CancelledError:
        if future.exception() is None:
            await run(executor, close, future.result())
        raise


async def _outlast(future: Future[T], give_up: Callable[[], None] = _nothing) -> T:
    wrapped = asyncio.wrap_future(future)
    cancelled = False
    while not wrapped.done():
        try:
            await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            cancelled = True
            give_up()
        except BaseException:  # noqa: S110 - it is the result, raised below
            pass
    if cancelled:
        wrapped.exception()
        raise asyncio.CancelledError
    return wrapped.result()
