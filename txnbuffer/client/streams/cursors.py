"""Durable cursors: the service does not trim the records after one"""

from __future__ import annotations

import asyncio
import contextlib

from broker_io.environment import current
from txnbuffer.client.admin_clients import AdminClients
from txnbuffer.client.lifecycle import cancel
from txnbuffer.client.topic_names import check_topic
from txnbuffer.errors import (
    Error,
    ForeignToken,
    SeqnoOutOfRange,
    StreamBranched,
    UnknownCursor,
)
from txnbuffer.streams.failover import ResumeToken

MOVE_INTERVAL = 1.0
"""Seconds between two moves of a cursor that follows a stream; each move is a request to the service."""
RESEND_INTERVAL = 60.0
"""Seconds after which an unchanged position is sent again, because a crashed service may have lost the last moves."""
LAST_MOVE_TIMEOUT = 5.0
"""Maximum seconds for the last move when the stream closes."""


At = int | str | ResumeToken


class DurableCursors:
    """The durable cursors of topics, by name; see `Client.cursors`."""

    def __init__(self, admin: AdminClients) -> None:
        self._admin = admin

    async def add(self, topic: str, cursor: str, at: At = "beginning") -> int:
        """Create a cursor at a seqno, a resume token, "beginning" or "now"; return its seqno once it is durable.

        If the cursor exists, it does not move. Raises TooManyCursors, StreamTrimmed, SeqnoOutOfRange,
        ServiceUnavailable, ForeignToken for a token of another topic, and StreamBranched for one of another history.
        """
        return await self._place("AddCursor", topic, cursor, at)

    async def advance(self, topic: str, cursor: str, at: At) -> int:
        """Move a cursor forward to a seqno or resume token; return its seqno. The records before it may be trimmed.

        A cursor never moves back. Raises UnknownCursor if the cursor was removed, or was dropped because it retained
        more than `streams.cursor_bytes`, and the errors of `add`.
        """
        return await self._place("AdvanceCursor", topic, cursor, at)

    async def remove(self, topic: str, cursor: str) -> None:
        """Remove a cursor; durable when this returns. Raises UnknownCursor, ServiceUnavailable."""
        check_topic(topic)
        await self._admin.ask(topic, "RemoveCursor", {"topic": topic, "cursor": cursor})

    async def _place(self, method: str, topic: str, cursor: str, at: At) -> int:
        check_topic(topic)
        place = at if isinstance(at, int) else str(at)
        arguments = {"topic": topic, "cursor": cursor, "at": place}
        answer = await self._admin.ask(topic, method, arguments, self._admin.max_unavailable)
        return int(answer["seqno"])


class CursorLease:
    """The durable cursor of a stream. It is created if it does not exist, and moves with the acknowledged batches."""

    def __init__(self, cursors: DurableCursors, topic: str, name: str) -> None:
        self._cursors = cursors
        self._topic = topic
        self._name = name
        self._created = False
        self._done: ResumeToken | None = None
        self._reported: ResumeToken | None = None
        self._reported_at = 0.0
        self._monotonic = current().clock.monotonic
        self._gone: UnknownCursor | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, at: ResumeToken | str) -> None:
        """Create the cursor where the stream starts. Raises the errors of `DurableCursors.add`."""
        try:
            await self._cursors.add(self._topic, self._name, at)
        except ForeignToken:
            return  # the stream itself decides whether to start over
        except (StreamBranched, SeqnoOutOfRange):
            await self._cursors.add(self._topic, self._name, "beginning")  # until the stream has rolled back
        self._created = True
        if isinstance(at, ResumeToken):
            self.move(at)  # an existing cursor may be before it

    def move(self, token: ResumeToken) -> None:
        """Move the cursor to an acknowledged token in the background. Raises UnknownCursor once if it is gone."""
        self._done = token
        if self._gone is not None:
            error, self._gone = self._gone, None
            raise error
        if self._task is None:
            self._task = asyncio.ensure_future(self._follow())

    async def moved(self) -> None:
        """Move the cursor to the last acknowledged token now. Raises UnknownCursor, ServiceUnavailable."""
        token, now = self._done, self._monotonic()
        if token is not None and (token is not self._reported or now - self._reported_at >= RESEND_INTERVAL):
            with contextlib.suppress(StreamBranched, ForeignToken, SeqnoOutOfRange):  # the stream reports these
                move = self._cursors.advance if self._created else self._cursors.add
                await move(self._topic, self._name, token)
                self._created = True
            self._reported, self._reported_at = token, now

    async def close(self) -> None:
        """Move the cursor a last time. If the service does not answer, the cursor only retains more than necessary."""
        await cancel(self._task)
        with contextlib.suppress(Error, TimeoutError):
            async with asyncio.timeout(LAST_MOVE_TIMEOUT):
                await self.moved()

    async def _follow(self) -> None:
        while True:
            try:
                await self.moved()
            except UnknownCursor as error:
                self._gone = error
                return
            except Error:
                pass  # the next move retries
            await asyncio.sleep(MOVE_INTERVAL)
