"""Durable cursors as their readers have them: what stands behind one is kept in the log until it moves on."""

from __future__ import annotations

import asyncio
import contextlib
import time

from txnbuffer.client.links import AdminClients
from txnbuffer.errors import Error, ForeignToken, SeqnoOutOfRange, StreamBranched, UnknownCursor
from txnbuffer.streams.token import ResumeToken

REST = 1.0
"""Seconds between two moves of a cursor that follows its reader: each is a question to the service."""
AGAIN = 60.0
"""Seconds after which it is told where it stood before: a service that crashed may have forgotten its last moves."""
LAST_MOVE = 5.0
"""Seconds for the last one."""

At = int | str | ResumeToken


class DurableCursors:
    """Cursors of topics, by name; made by `Client.cursors`."""

    def __init__(self, questions: AdminClients) -> None:
        self._questions = questions

    async def add(self, topic: str, cursor: str, at: At = "beginning") -> int:
        """Keep what stands behind a seqno or resume token, "beginning" or "now"; durable when this returns.

        The seqno at which it stands: one that is there stays where it is. Raises TooManyCursors, StreamTrimmed,
        ForeignToken and StreamBranched for a token of another topic or history, ServiceUnavailable.
        """
        return await self._place("AddCursor", topic, cursor, at)

    async def advance(self, topic: str, cursor: str, at: At) -> int:
        """Let go of what stands up to a seqno or resume token. The seqno at which it stands: it never moves back.

        Raises UnknownCursor if it was removed, or dropped for what it held, and as `add`.
        """
        return await self._place("AdvanceCursor", topic, cursor, at)

    async def remove(self, topic: str, cursor: str) -> None:
        """Keep nothing for it any more; durable when this returns. Raises UnknownCursor, ServiceUnavailable."""
        await self._questions.ask(topic, "RemoveCursor", {"topic": topic, "cursor": cursor})

    async def _place(self, method: str, topic: str, cursor: str, at: At) -> int:
        place = at if isinstance(at, int) else str(at)
        question = {"topic": topic, "cursor": cursor, "at": place}
        answer = await self._questions.ask(topic, method, question, self._questions.max_unavailable)
        return int(answer["seqno"])


class CursorLease:
    """The cursor of a reader, which follows it; one of that name is made if the topic has none."""

    def __init__(self, cursors: DurableCursors, topic: str, name: str) -> None:
        self._cursors = cursors
        self._topic = topic
        self._name = name
        self._made = False
        self._done: ResumeToken | None = None
        self._told: ResumeToken | None = None
        self._told_at = 0.0
        self._gone: UnknownCursor | None = None
        self._task: asyncio.Task[None] | None = None

    async def begin(self, at: ResumeToken | str) -> None:
        """Hold what a reader needs that begins there. Raises as `DurableCursors.add`."""
        try:
            await self._cursors.add(self._topic, self._name, at)
        except ForeignToken:
            return  # the stream tells whether its reader starts over here
        except (StreamBranched, SeqnoOutOfRange):
            await self._cursors.add(self._topic, self._name, "beginning")  # until its reader has gone back
        self._made = True
        if isinstance(at, ResumeToken):
            self.move(at)  # one that was there may stand before it

    def move(self, token: ResumeToken) -> None:
        """The reader has everything up to a token: soon the cursor stands there. Raises UnknownCursor once."""
        self._done = token
        if self._gone is not None:
            error, self._gone = self._gone, None
            raise error
        if self._task is None:
            self._task = asyncio.ensure_future(self._follow())

    async def moved(self) -> None:
        """The cursor stands where its reader does. Raises UnknownCursor, ServiceUnavailable."""
        token, now = self._done, time.monotonic()
        if token is not None and (token is not self._told or now - self._told_at >= AGAIN):
            with contextlib.suppress(StreamBranched, ForeignToken, SeqnoOutOfRange):  # as the stream is about to tell
                move = self._cursors.advance if self._made else self._cursors.add
                await move(self._topic, self._name, token)
                self._made = True
            self._told, self._told_at = token, now

    async def close(self) -> None:
        """Move it a last time, if the service answers: else more is kept than need be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(Error, TimeoutError):
            async with asyncio.timeout(LAST_MOVE):
                await self.moved()

    async def _follow(self) -> None:
        while True:
            try:
                await self.moved()
            except UnknownCursor as error:
                self._gone = error
                return
            except Error:
                pass  # the next move makes up for it
            await asyncio.sleep(REST)
