"""Requests of operators to the services of all shards"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from broker_io.environment import current
from broker_io.waits import Backoff
from snapshots.shards import shard_of
from txnbuffer.client.lifecycle import abandon
from txnbuffer.client.session.session import CLOSED
from txnbuffer.errors import (
    InvalidRequest,
    ServiceUnavailable,
)


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
