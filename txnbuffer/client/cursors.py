"""Requests of operators, and the durable cursors that they place: the service does not trim the records after one"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from broker_io.environment import current
from broker_io.waits import Backoff
from snapshots.shards import shard_of
from txnbuffer.client.lifecycle import abandon
from txnbuffer.client.session import CLOSED
from txnbuffer.client.topic_names import check_topic
from txnbuffer.errors import (
    Error,
    ForeignToken,
    InvalidRequest,
    SeqnoOutOfRange,
    ServiceUnavailable,
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


class AdminLink(Protocol):
    """The interface of a connection for admin requests: a method name and arguments, answered by JSON values."""

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        """Return the answer to a request. Raises the error in the answer; ServiceUnavailable if there is no answer."""

    async def close(self) -> None:
        """Close the connection."""


AdminConnector: TypeAlias = Callable[[], Awaitable[AdminLink]]
"""Opens a connection. Raises ServiceUnavailable."""


class AdminClients:
    """Sends admin requests to the service of the right shard, and keeps the connections open.

    `connectors`: one for the service of each shard. `max_unavailable`: seconds for which callers may let `ask` retry.
    `check_loop`: raises InvalidRequest on another event loop than that of the client.
    """

    def __init__(
        self,
        connectors: Sequence[AdminConnector],
        max_unavailable: float,
        check_loop: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_unavailable = max_unavailable
        self._connectors = connectors
        self._check_loop = check_loop
        self._links: dict[int, asyncio.Task[AdminLink]] = {}
        self._requests: Counter[asyncio.Task[AdminLink]] = Counter()
        """The number of requests that use each connection."""
        self._closed = False
        self._backoff = Backoff()

    async def ask(self, owned: str, method: str, arguments: dict[str, Any], max_unavailable: float = 0.0) -> Any:
        """Return the answer of the shard that owns `owned`, a topic, a producer name or a group.

        Retries for `max_unavailable` seconds while the service is unavailable. Raises the error in the answer, and
        ServiceUnavailable.
        """
        self._check_loop()
        if self._closed:
            raise InvalidRequest(CLOSED)
        if not self._connectors:
            raise InvalidRequest("this client has no connector for admin requests: create it with connect")
        monotonic = current().clock.monotonic
        give_up, failures = monotonic() + max_unavailable, 0
        number = shard_of(owned, len(self._connectors))
        while True:
            try:
                return await self._ask(number, method, arguments)
            except ServiceUnavailable:
                failures += 1
                pause = self._backoff.after(failures)
                if monotonic() + pause > give_up:
                    raise
            await asyncio.sleep(pause)

    async def _ask(self, number: int, method: str, arguments: dict[str, Any]) -> Any:
        """Ask on the connection that requests share; after a failure the next request opens another one."""
        if number not in self._links:
            self._links[number] = asyncio.get_running_loop().create_task(self._connect(number))
        link = self._links[number]
        self._requests[link] += 1
        try:
            return await (await asyncio.shield(link)).ask(method, arguments)
        except ServiceUnavailable:
            if self._links.get(number) is link:
                del self._links[number]
            raise
        finally:
            self._requests[link] -= 1
            if not self._requests[link]:
                del self._requests[link]
                if not link.done():
                    self._links.pop(number, None)
                if self._links.get(number) is not link:
                    await abandon(link)

    async def _connect(self, number: int) -> AdminLink:
        try:
            return await self._connectors[number]()
        except BaseException:
            self._links.pop(number, None)
            raise

    async def close(self) -> None:
        """Close all connections; later requests fail."""
        self._closed = True
        for number in [*self._links]:
            await abandon(self._links.pop(number))


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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
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
