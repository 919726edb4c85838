"""A session on a cluster: the client's writers append its records, and the service gets everything else

A `DirectLink` wraps the link to the service. It removes the sends from outgoing frames, appends them, and reports to
the session's core what a service would report: which sends are settled or failed, and how much may be unacknowledged.
The `SendRouter` outlives the links: a send that is in flight when a link is lost is not appended again over the next
link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from functools import partial

from txnbuffer.client.links import Link
from txnbuffer.client.writers import Writers
from txnbuffer.errors import Error
from txnbuffer.rpc.frames import ClientFrame, Failure, Send, ServerFrame

CREDITS = 8 * 1024 * 1024
"""Limit of unacknowledged bytes of transactions."""

NOTHING = ClientFrame()


class RoutedSend:
    """A send in the writers; `link` and `number` are those under which it was sent last."""

    __slots__ = ("done", "error", "link", "number", "send")

    def __init__(self, send: Send, link: DirectLink, number: int) -> None:
        self.send = send
        self.link = link
        self.number = number
        self.done = False
        self.error: Error | None = None


class SendRouter:
    """Passes the sends of a session to the writers, over all its links. `max_message_bytes` is the cluster's limit."""

    def __init__(self, writers: Writers, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self._writers = writers
        self._carried: dict[int, RoutedSend] = {}

    def over(self, link: Link) -> DirectLink:
        """Wrap a link of this session to its service."""
        return DirectLink(link, self)

    def carry(self, link: DirectLink, number: int, send: Send) -> None:
        """Append a send, unless it was appended over an earlier link."""
        carried = self._carried.get(id(send))
        if carried is None:
            if link.resumes:
                # A session repeats its unacknowledged sends first; it dropped those that have not been repeated by now.
                link.resumes = False
                self._carried = {key: known for key, known in self._carried.items() if known.link is link}
            carried = self._carried[id(send)] = RoutedSend(send, link, number)
            self._writers.append(send.topic, send.batch, partial(self._settled, carried))
            return
        carried.link, carried.number = link, number
        if carried.done:
            link.settled(carried)

    def forget(self, carried: RoutedSend) -> None:
        """Forget a send whose result the session has."""
        if self._carried.get(id(carried.send)) is carried:
            del self._carried[id(carried.send)]

    def _settled(self, carried: RoutedSend, error: Error | None) -> None:
        carried.done, carried.error = True, error
        carried.link.settled(carried)


class DirectLink:
    """The wrapped link; `resumes` while only repeated sends have passed."""

    def __init__(self, link: Link, carrier: SendRouter) -> None:
        self.resumes = True
        self._link = link
        self._carrier = carrier
        self._number = 0
        self._settled: list[RoutedSend] = []
        self._frames: deque[ServerFrame] = deque()
        self._ended = False
        self._gone: Exception | None = None
        self._something = asyncio.Event()
        self._pump = asyncio.ensure_future(self._receive_all())

    async def send(self, frame: ClientFrame) -> None:
        if frame.sends:
            for send in frame.sends:
                self._number += 1
                self._carrier.carry(self, self._number, send)
            frame = replace(frame, sends=())
            if frame == NOTHING:
                return
        await self._link.send(frame)

    async def receive(self) -> ServerFrame | None:
        while True:
            if self._settled:
                return self._told_of_sends()
            if self._frames:
                return self._frames.popleft()
            if self._gone is not None:
                raise self._gone
            if self._ended:
                return None
            self._something.clear()
            await self._something.wait()

    async def end(self) -> None:
        await self._link.end()

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.wait([self._pump])
        await self._link.close()

    def settled(self, carried: RoutedSend) -> None:
        """Report a send that is durable or failed."""
        self._settled.append(carried)
        self._something.set()

    def _told_of_sends(self) -> ServerFrame:
        settled, self._settled = self._settled, []
        failures = []
        for carried in settled:
            self._carrier.forget(carried)
            if carried.error is not None:
                failures.append(Failure(carried.number, carried.error))
        return ServerFrame(settled=tuple([carried.number for carried in settled]), failures=tuple(failures))

    async def _receive_all(self) -> None:
        try:
            while (frame := await self._link.receive()) is not None:
                self._frames.append(self._ours(frame))
                self._something.set()
        except Exception as error:  # `receive` raises it
            self._gone = error
        finally:
            self._ended = True
            self._something.set()

    def _ours(self, frame: ServerFrame) -> ServerFrame:
        """Return the service's frame with the limits of direct sends."""
        welcome = frame.welcome
        if welcome is None:
            return frame if frame.credits is None else replace(frame, credits=None)
        limit = min(welcome.max_message_bytes or self._carrier.max_message_bytes, self._carrier.max_message_bytes)
        return replace(frame, welcome=welcome._replace(max_message_bytes=limit), credits=CREDITS)
