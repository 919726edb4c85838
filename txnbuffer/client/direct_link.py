"""A session on a cluster: the client's writers append its records to Pulsar, the service gets all other requests

A `DirectLink` wraps the link to the service. It takes the sends out of outgoing frames and appends them. It reports to
the session's core what a service would report: which sends are settled or failed, and how many bytes may be
unacknowledged. One `SendRouter` serves all links of a session, one after the other: a send that was in flight when a
link was lost is not appended again when the session repeats it over the next link.
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
    """A send that was passed to the writers; `link` requested it last, as its send `number`."""

    __slots__ = ("done", "error", "link", "number", "send")

    def __init__(self, send: Send, link: DirectLink, number: int) -> None:
        self.send = send
        self.link = link
        self.number = number
        self.done = False
        self.error: Error | None = None


class SendRouter:
    """Passes the sends of a session to the writers, once each. `max_message_bytes` is the cluster's limit."""

    def __init__(self, writers: Writers, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self._writers = writers
        self._routed: dict[int, RoutedSend] = {}

    def over(self, link: Link) -> DirectLink:
        """Wrap a link of this session to its service."""
        return DirectLink(link, self)

    def route(self, link: DirectLink, number: int, send: Send) -> None:
        """Append a send, unless it was appended over an earlier link."""
        routed = self._routed.get(id(send))
        if routed is None:
            if link.resumes:
                # A session first repeats its unacknowledged sends; it has dropped those that it did not repeat by now.
                link.resumes = False
                self._routed = {key: known for key, known in self._routed.items() if known.link is link}
            routed = self._routed[id(send)] = RoutedSend(send, link, number)
            self._writers.append(send.topic, send.batch, partial(self._settled, routed))
            return
        routed.link, routed.number = link, number
        if routed.done:
            link.settled(routed)

    def forget(self, routed: RoutedSend) -> None:
        """Forget a send whose result the session has received."""
        if self._routed.get(id(routed.send)) is routed:
            del self._routed[id(routed.send)]

    def _settled(self, routed: RoutedSend, error: Error | None) -> None:
        routed.done, routed.error = True, error
        routed.link.settled(routed)


class DirectLink:
    """A link without sends. `resumes`: the session may still be repeating the sends of an earlier link."""

    def __init__(self, link: Link, router: SendRouter) -> None:
        self.resumes = True
        self._link = link
        self._router = router
        self._number = 0
        self._settled: list[RoutedSend] = []
        self._frames: deque[ServerFrame] = deque()
        self._ended = False
        self._gone: Exception | None = None
        self._ready = asyncio.Event()
        self._pump = asyncio.ensure_future(self._receive_all())

    async def send(self, frame: ClientFrame) -> None:
        if frame.sends:
            for send in frame.sends:
                self._number += 1
                self._router.route(self, self._number, send)
            frame = replace(frame, sends=())
            if frame == NOTHING:
                return
        await self._link.send(frame)

    async def receive(self) -> ServerFrame | None:
        while True:
            if self._settled:
                return self._send_results()
            if self._frames:
                return self._frames.popleft()
            if self._gone is not None:
                raise self._gone
            if self._ended:
                return None
            self._ready.clear()
            await self._ready.wait()

    async def end(self) -> None:
        await self._link.end()

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.wait([self._pump])
        await self._link.close()

    def settled(self, routed: RoutedSend) -> None:
        """Report a send that is durable or failed."""
        self._settled.append(routed)
        self._ready.set()

    def _send_results(self) -> ServerFrame:
        settled, self._settled = self._settled, []
        failures = []
        for routed in settled:
            self._router.forget(routed)
            if routed.error is not None:
                failures.append(Failure(routed.number, routed.error))
        return ServerFrame(settled=tuple([routed.number for routed in settled]), failures=tuple(failures))

    async def _receive_all(self) -> None:
        try:
            while (frame := await self._link.receive()) is not None:
                self._frames.append(self._with_client_limits(frame))
                self._ready.set()
        except Exception as error:  # `receive` raises it
            self._gone = error
        finally:
            self._ended = True
            self._ready.set()

    def _with_client_limits(self, frame: ServerFrame) -> ServerFrame:
        """Return the service's frame with the size limit and the credits of direct sends."""
        welcome = frame.welcome
        if welcome is None:
            return frame if frame.credits is None else replace(frame, credits=None)
        limit = min(welcome.max_message_bytes or self._router.max_message_bytes, self._router.max_message_bytes)
        return replace(frame, welcome=welcome._replace(max_message_bytes=limit), credits=CREDITS)
