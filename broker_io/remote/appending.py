"""The service's side of one `Append` stream: appends in, outcomes out in their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Executor, Future
from typing import Any

from broker_io.batch import Batch
from broker_io.errors import Error, as_error
from broker_io.port import Writer
from broker_io.position import Positions
from broker_io.remote.budget import Budget
from broker_io.remote.messages import Outcome, decode_appends, encode_appended
from broker_io.remote.threads import run

STREAM_BYTES = 8 * 1024 * 1024
"""Appends under way of one stream; beyond it nothing more is read from the client."""
OUTCOMES = 10_000
"""Most outcomes of one answer."""


class Appending:
    """Belongs to the loop; appends themselves are made in threads, one message of the client at a time."""

    def __init__(self, writer: Writer, total: Budget) -> None:
        self._writer = writer
        self._budgets = (Budget(STREAM_BYTES), total)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[Future[Positions] | Error, int]] = deque()
        self._wake = asyncio.Event()
        self._told = False
        self._ended = False

    async def take(self, executor: Executor, data: bytes) -> None:
        """Append what a message of the client holds, once there is room for it.

        Raises MalformedMessage, and nothing of the message is appended.
        """
        size = len(data)
        await self._budgets[0].take(size)
        try:
            await self._budgets[1].take(size)
        except BaseException:
            self._budgets[0].give(size)
            raise
        await run(executor, self._append_all, data)

    def end(self) -> None:
        """The client has no more appends."""
        self._ended = True
        self._wake.set()

    async def answer(self, context: Any) -> None:
        """Send outcomes until all appends have theirs and there are no more to come; None: to nobody."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._told = False
            while outcomes := self._done():
                if context is not None:
                    await context.write(encode_appended(outcomes))
            if self._ended and not self._pending:
                return

    def _append_all(self, data: bytes) -> None:
        try:
            batches = decode_appends(data)
        except Exception as error:
            self._pending.append((as_error(error), len(data)))
            raise
        sizes = [0] * (len(batches) - 1) + [len(data)]  # given back with the last of them
        for batch, size in zip(batches, sizes, strict=True):
            self._pending.append((self._append(batch), size))
        self._wake_up(None)

    def _append(self, batch: Batch) -> Future[Positions] | Error:
        try:
            future = self._writer.append(batch)
        except Exception as error:
            return as_error(error)
        future.add_done_callback(self._wake_up)
        return future

    def _wake_up(self, _: object) -> None:
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is the stream
                self._loop.call_soon_threadsafe(self._wake.set)

    def _done(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._pending and len(outcomes) < OUTCOMES:
            future, size = self._pending[0]
            if isinstance(future, Future):
                if not future.done():
                    break
                error = future.exception()
                outcomes.append(future.result() if error is None else as_error(error))
            else:
                outcomes.append(future)
            self._pending.popleft()
            self._give(size)
        return outcomes

    def _give(self, size: int) -> None:
        for budget in self._budgets:
            budget.give(size)
