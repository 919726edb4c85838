"""A TCP proxy on this machine that cuts, holds, drops, delays, corrupts and repeats what passes through it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Self

UP, DOWN = "up", "down"
"""From the client to the server, and back."""


class FaultProxy:
    """Forwards connections to a port of this machine; its faults hold for all connections.

    - `held`: directions in which nothing is read, as by a peer whose packets are lost without notice
    - `dropped`: directions in which what is read is forgotten
    - `delay`: seconds that each chunk waits; `rate`: bytes a second in each direction, 0 without limit
    - `change`: is given the direction and each chunk, and returns what is sent instead
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.held: set[str] = set()
        self.dropped: set[str] = set()
        self.delay = 0.0
        self.rate = 0
        self.change: Callable[[str, bytes], bytes] = lambda _, data: data
        self.passed = {UP: 0, DOWN: 0}
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),), daemon=True)
        self._stop = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self, *, refuse: bool = True) -> None:
        """Break all connections, and refuse new ones until `heal`."""
        self._refuses = refuse
        asyncio.run_coroutine_threadsafe(self._abort(), self._loop).result(60)

    def heal(self) -> None:
        self._refuses = False
        self.held.clear()
        self.dropped.clear()
        self.delay, self.rate = 0.0, 0

    async def _abort(self) -> None:
        for writer in [*self._writers]:
            writer.transport.abort()

    async def _main(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        other = None
        try:
            if self._refuses:
                return
            source, other = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(other)
            await asyncio.gather(self._forward(UP, reader, other), self._forward(DOWN, source, writer))
        except (OSError, asyncio.CancelledError):  # asyncio logs a connection that was cancelled at the end as an error
            pass
        finally:
            for each in (writer, other):
                if each is not None:
                    each.transport.abort()
                    self._writers.discard(each)

    async def _forward(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            while direction in self.held:
                await asyncio.sleep(0.01)
            data = await reader.read(64 * 1024)
            if not data:
                writer.transport.abort()
                return
            if self.delay:
                await asyncio.sleep(self.delay)
            while direction in self.held:
                await asyncio.sleep(0.01)
            if direction in self.dropped:
                continue
            if self.rate:
                await asyncio.sleep(len(data) / self.rate)
            writer.write(self.change(direction, data))
            self.passed[direction] += len(data)
            await writer.drain()
