"""Keeps a session connected: carries frames between its core and the service, and wakes who waits.

All that tasks ask for in one turn of the loop goes out in one frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from snapshots.shards import ONLY, Shard, shard_of
from txnbuffer.client import forking
from txnbuffer.client.core import SessionCore
from txnbuffer.client.link import Dial, Link
from txnbuffer.errors import CallerError, ClientBroken, Error, ServiceUnavailable
from txnbuffer.frames import ClientFrame

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to connect."""
TICK = 1.0
VISIBLE = 120.0
"""Seconds that the service itself waits until a commit is visible."""
GOODBYE = 5.0
"""Seconds that a closing client waits for the service to end the connection."""


class Session:
    """`patience`: seconds without a connection after which whoever waits is told so. `apart` as of its core.

    Where that is so records go to a cluster, which may be away while the service is there; then seconds without an
    answer or an acknowledgement count as well. `shard`: whose service it is with.
    """

    def __init__(self, dial: Dial, patience: float, *, apart: bool = False, shard: Shard = ONLY) -> None:
        self.core = SessionCore(apart=apart)
        self._apart = apart
        self._seen = 0
        self._still = 0.0
        self.forked_from = forking.generation()
        self._dial = dial
        self._shard = shard
        self.patience = patience
        self._news = asyncio.Event()
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._link: Link | None = None
        self._unreachable: Error | None = None
        self._reason: Error | None = None
        self._impatience: asyncio.TimerHandle | None = None
        self._closing = False
        self._lost_at = 0.0

    async def open(self) -> None:
        """Connect. Raises ServiceUnavailable, or why the service refuses this client."""
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        try:
            link = await self._dial()
        except ServiceUnavailable as away:
            link = None  # it is away, or being started: that is waited for
            self._reason = away
        self._start(link)
        if link is None:
            self._lost_at = began
            self._lose_patience_later(self._reason)
        try:
            await self._first.wait()
        except asyncio.CancelledError:
            await self.close()  # it would go on connecting for nobody
            raise
        if self._unreachable is not None:
            error = self._unreachable
            await self.close()
            raise error

    def begin(self) -> None:
        """Connect in the background; whoever asks for something waits for it, with the session's patience."""
        self._loop = asyncio.get_running_loop()
        self._start(None)

    def check(self) -> None:
        """Raises what makes any request vain: UsedAfterFork, Closed, or that no service can be reached."""
        forking.check(self.forked_from)
        if self._unreachable is not None:
            raise self._unreachable

    def away_for(self, seconds: float) -> bool:
        """Whether there has been no connection for so long."""
        return not self.core.welcomed and self._loop.time() > self._lost_at + seconds

    def poke(self) -> None:
        """There is something to send."""
        self._news.set()

    def future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    async def result(self, put: Callable[[asyncio.Future[Any]], None]) -> Any:
        """Ask for something and wait: `put` gets the waiter. Raises the error that is the answer."""
        self.check()
        future: asyncio.Future[Any] = self._loop.create_future()
        put(future)
        self._news.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.core.forget(future)
            raise

    async def close(self) -> None:
        """Send what waits, say goodbye, end."""
        self._closing = True
        if self._link is not None and self.core.welcomed:
            self._news.set()
            await asyncio.wait(self._tasks[:1], timeout=GOODBYE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._impatience is not None:
            self._impatience.cancel()
        self._give_up(self._unreachable or ServiceUnavailable("the client was closed"))

    # Staying connected

    def _start(self, link: Link | None) -> None:
        self._lost_at = self._loop.time()
        self._tasks = [self._loop.create_task(self._run(link)), self._loop.create_task(self._keep_time())]

    async def _run(self, link: Link | None) -> None:
        pause = FIRST_PAUSE
        while True:
            error: Error | None = None
            try:
                link = link or await self._dial()
                await self._talk(link)
            except Error as gone:
                error = gone
            finally:
                link, was_welcomed = None, self.core.welcomed
                self._lost_at = self._loop.time() if was_welcomed else self._lost_at
                self.core.lost()
                self._deliver()
            if self._closing:
                return
            if isinstance(error, CallerError):
                self._give_up(error)
                return
            pause = FIRST_PAUSE if was_welcomed else min(pause * 2, LONGEST_PAUSE)
            self._lose_patience_later(error)
            await asyncio.sleep(pause)

    async def _talk(self, link: Link) -> None:
        """Use a connection until it ends. Raises why it did."""
        self._link = link
        writer = self._loop.create_task(self._write(link))
        writer.add_done_callback(self._writer_ended)
        try:
            while (frame := await link.receive()) is not None:
                self.core.receive(frame)
                self._deliver()
                self._news.set()
                if self.core.broken is not None:
                    raise self.core.broken
                if frame.welcome is not None:
                    self._connected()
        finally:
            self._link = None
            writer.cancel()
            await asyncio.wait([writer])
            await link.close()

    async def _write(self, link: Link) -> None:
        await link.send(self.core.hello())
        while True:
            await self._news.wait()
            self._news.clear()
            # Whatever else happens in this turn of the loop goes into the same frame.
            await asyncio.sleep(0)
            while (frame := self.core.take_frame()) is not None:
                await link.send(frame)
            self._deliver()
            if self._closing:
                await link.send(ClientFrame(bye=True))
                await link.end()
                return

    def _writer_ended(self, writer: asyncio.Task[None]) -> None:
        """Nobody may wait for an answer to what can't be sent; what the connection's end means is told elsewhere."""
        if writer.cancelled() or (error := writer.exception()) is None or isinstance(error, Error):
            return
        self._give_up(ClientBroken(f"this client can't go on: {error!r}; open another one, and report this"))
        self._tasks[0].cancel()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.core.tick()
            if self._apart:
                self._watch_progress()
            self._news.set()

    def _watch_progress(self) -> None:
        core = self.core
        if core.progress != self._seen or not core.waited_for or not core.welcomed:
            self._seen, self._still = core.progress, 0.0
            return
        self._still += TICK
        if self._still >= self.patience:
            core.stop_waiting(ServiceUnavailable(self._standstill()), visible=self._still >= self.patience + VISIBLE)
            self._deliver()

    def _standstill(self) -> str:
        """Why nothing may have moved for so long as patience lasts."""
        foreign = next((topic for topic in self.core.unregistered if not self._shard.owns(topic)), None)
        if foreign is None:
            return (
                f"the cluster acknowledged nothing for {self.patience:g} s, nor did its service answer: are they well?"
            )
        return (
            f"topic {foreign!r} was not registered for {self.patience:g} s: the service of shard "
            f"{shard_of(foreign, self._shard.of)}, which owns it, does not answer, or the cluster acknowledges nothing"
        )

    def _connected(self) -> None:
        self._unreachable = None
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
        self._first.set()

    def _lose_patience_later(self, error: Error | None) -> None:
        self._reason = error
        if self._impatience is None and self._unreachable is None:
            # The first attempt took a while too: from its beginning on there was no connection.
            left = self._lost_at + self.patience - self._loop.time()
            self._impatience = self._loop.call_later(max(left, 0.0), self._lose_patience)

    def _lose_patience(self) -> None:
        of = "" if self._shard.of == 1 else f" of shard {self._shard.number}"
        text = f"no service{of} for {self.patience:g} s: {self._reason or 'it ended the connection'}"
        self._give_up(ServiceUnavailable(text))

    def _give_up(self, error: Error) -> None:
        self._impatience = None
        self._unreachable = error
        self.core.give_up(error)
        self._deliver()
        self._first.set()

    def _deliver(self) -> None:
        for future, result in self.core.take_results():
            if future is None or future.done():
                continue
            if isinstance(result, Error):
                future.set_exception(result)
            else:
                future.set_result(result)
