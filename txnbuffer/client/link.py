"""One connection to a service: frames go out, frames come in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from txnbuffer.frames import ClientFrame, ServerFrame

if TYPE_CHECKING:
    from txnbuffer.service.connection import Connection
    from txnbuffer.service.engine import Engine


class Link(Protocol):
    async def send(self, frame: ClientFrame) -> None:
        """Raises ServiceUnavailable if the connection is gone."""

    async def receive(self) -> ServerFrame | None:
        """The next frame; None when the service has ended the connection. Raises ServiceUnavailable."""

    async def end(self) -> None:
        """No more frames will be sent; those of the service still come."""

    async def close(self) -> None:
        """Let go."""


Dial: TypeAlias = Callable[[], Awaitable[Link]]
"""Opens a connection. Raises ServiceUnavailable."""


class EngineLink:
    """A connection to an engine on the same loop."""

    def __init__(self, engine: Engine) -> None:
        self._connection: Connection = engine.connect()

    async def send(self, frame: ClientFrame) -> None:
        await self._connection.room()
        self._connection.receive(frame)

    async def receive(self) -> ServerFrame | None:
        return await self._connection.next()

    async def end(self) -> None:
        """The engine ends the connection after the last frame."""

    async def close(self) -> None:
        self._connection.lost()
