"""One client's connection as the engine sees it: what came in and is not settled, what goes out.

Everything that happened for a client within one turn of the loop goes out in one frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from txnbuffer.coordinator.messages import Result
from txnbuffer.errors import Error
from txnbuffer.model import TxnId
from txnbuffer.rpc.frames import ClientFrame, Failure, ServerFrame, Welcome
from txnbuffer.service.limits import Limits

Take = Callable[["SessionConnection", ClientFrame], None]


class SessionConnection:
    """Made by `Engine.connect`. Call `room`, then `receive` for each frame; `next` gives the frames to send."""

    def __init__(self, take: Take, gone: Callable[[SessionConnection], None], limits: Limits, peer: str) -> None:
        self.peer = peer
        self.session = ""
        self.welcomed = False
        self.closed = False
        self.shutdown = False
        self.unsettled = 0
        self.sends = 0
        self._take = take
        self._gone = gone
        self._limits = limits
        self._acknowledged = self._told = 0
        self._settled: set[int] = set()
        self._welcome: Welcome | None = None
        self._failures: list[Failure] = []
        self._answers: list[tuple[int, Result]] = []
        self._credits: int | None = None
        self._draining = False
        self._goodbye: Error | None = None
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    # For whoever carries the frames

    def receive(self, frame: ClientFrame) -> None:
        """A frame of the client; frames that come after the end are dropped."""
        if not self.closed:
            self._take(self, frame)

    async def room(self) -> None:
        """Wait until the client may send more: then its next frame may be read."""
        await self._room.wait()

    async def next(self) -> ServerFrame | None:
        """The next frame to send; None: there will be none, end the connection."""
        while (frame := self._frame()) is None:
            if self.closed:
                return None
            self._something.clear()
            await self._something.wait()
        return frame

    def lost(self) -> None:
        """The client went away."""
        if not self.closed:
            self.close()

    # For the engine

    def welcome(self, welcome: Welcome, allowed: int) -> None:
        self.welcomed = True
        self._welcome, self._credits = welcome, allowed
        self._something.set()

    def answer(self, answers: Sequence[tuple[int, Result]]) -> None:
        self._answers += answers
        self._something.set()

    def settle(self, send: int, size: int) -> None:
        """A send is durable, or failed and told."""
        self.unsettled -= size
        settled = self._settled
        settled.add(send)
        while self._acknowledged + 1 in settled:
            self._acknowledged += 1
            settled.discard(self._acknowledged)
        self._something.set()

    def fail(self, send: int, error: Error, txn: TxnId | None = None) -> None:
        """Tell what of a send was not appended; settle it all the same."""
        self._failures.append(Failure(send, error, txn))

    def allow(self, allowed: int) -> None:
        self._credits = allowed
        self._something.set()

    def drain(self) -> None:
        self._draining = True
        self._something.set()

    def open_or_shut(self, full: bool) -> None:
        """Take in more or not, as all clients together (`full`) and this one have much or little under way."""
        much = self.unsettled > self._limits.client_bytes or len(self._answers) > self._limits.answers
        if (full and self.unsettled) or much:
            self._room.clear()
        else:
            self._room.set()

    def close(self, error: Error | None = None) -> None:
        """End the connection once everything said is out; `error` tells the client why."""
        if not self.closed:
            self.closed = True
            self._goodbye = error
            self._room.set()
            self._something.set()
            self._gone(self)

    def _frame(self) -> ServerFrame | None:
        goodbye, self._goodbye = self._goodbye, None
        news = self._acknowledged > self._told or self._credits is not None or self._draining
        if not (news or self._answers or self._failures or self._welcome or goodbye):
            return None
        frame = ServerFrame(
            welcome=self._welcome,
            acknowledged=self._acknowledged,
            failures=tuple(self._failures),
            answers=tuple(self._answers),
            credits=self._credits,
            draining=self._draining,
            goodbye=goodbye,
        )
        self._told = self._acknowledged
        self._welcome, self._credits = None, None
        self._failures, self._answers = [], []
        self._draining = False
        return frame
