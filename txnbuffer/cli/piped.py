"""Standard output of a command that has to know what its reader has read"""

from __future__ import annotations

import array
import asyncio
import fcntl
import io
import itertools
import os
import select
import stat
import sys
import termios
from collections.abc import Sequence

READ_WAIT = 10.0
"""Seconds in which the reader of a pipe gets the lines of one transaction; after that those that it has commit."""
LAST_WAIT = 1.0
"""The same once the command has to end; after that the lines count as read, because the pipe keeps them."""
CLOSED_CHECK = 0.5
"""Seconds between checks whether the reader has closed the pipe."""
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05


class LinesOut:
    """Standard output, which is written without blocking.

    `closed`: the reader has closed it.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self.closed = False
        self._written = 0
        try:
            self._fd: int | None = sys.stdout.fileno()
        except io.UnsupportedOperation:  # it is no file: a test has replaced it
            self._fd = None
        self._is_pipe = self._fd is not None and stat.S_ISFIFO(os.fstat(self._fd).st_mode)

    async def write(self, lines: Sequence[bytes], stop: asyncio.Event) -> list[int]:
        """Write lines; return the number of bytes up to the end of each line that was written.

        All are, unless the reader closes the output, or does not read after `stop` is set.
        """
        ends = [*itertools.accumulate(map(len, lines), initial=self._written)][1:]
        left = memoryview(b"".join(lines))
        while left and await self._writable(stop):
            try:
                written = self._write(left[: select.PIPE_BUF])
            except BrokenPipeError:
                self._close(stop)
                break
            self._written += written
            left = left[written:]
        return [end for end in ends if end <= self._written]

    async def read(self, stop: asyncio.Event) -> int:
        """Wait for the reader; return how many bytes it has read, or will read from the pipe after the command ends."""
        clock = asyncio.get_running_loop().time
        began, pause = clock(), FIRST_PAUSE
        while (unread := self._unread()) and not self.closed:
            if clock() - began >= (LAST_WAIT if stop.is_set() else READ_WAIT):
                return self._written if stop.is_set() else self._written - unread
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if self._gone():
                self._close(stop)
        return self._written - unread

    async def watch(self, stop: asyncio.Event) -> None:
        """Set `stop` once the reader has closed the output."""
        while not self._gone():
            await asyncio.sleep(CLOSED_CHECK)
        self._close(stop)

    def _write(self, data: memoryview) -> int:
        if self._fd is not None:
            return os.write(self._fd, data)
        sys.stdout.write(bytes(data).decode(errors="surrogateescape"))
        return len(data)

    async def _writable(self, stop: asyncio.Event) -> bool:
        """Wait until a write does not block; False if the command has to end and the reader does not read."""
        if self._fd is None:
            return True
        waits, pause = select.poll(), FIRST_PAUSE
        waits.register(self._fd, select.POLLOUT)
        waited = 0.0
        while not waits.poll(0):
            if waited >= LAST_WAIT:
                return False
            await asyncio.sleep(pause)
            waited += pause if stop.is_set() else 0.0
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def _unread(self) -> int:
        """How many bytes are in the pipe."""
        if self._fd is None or not self._is_pipe:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _gone(self) -> bool:
        if self._fd is None or not self._is_pipe:
            return False
        waits = select.poll()
        waits.register(self._fd, 0)
        return any(events & select.POLLERR for _, events in waits.poll(0))

    def _close(self, stop: asyncio.Event) -> None:
        self.closed = True
        stop.set()
