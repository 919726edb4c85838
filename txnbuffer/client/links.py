"""Connections to a service: for sessions, for admin requests and for change streams

Each kind has an interface and two implementations: to an engine on the same event loop, and over gRPC.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from broker_io.environment import current
from broker_io.rpc.channel import Channel, Endpoint, LogIdentity, MessageStream
from broker_io.waits import Backoff
from snapshots.shards import shard_of
from txnbuffer.client import lifecycle
from txnbuffer.errors import InvalidRequest, ServiceUnavailable
from txnbuffer.rpc.admin_encoding import ADMIN_PATH, encode_admin_request
from txnbuffer.rpc.admin_pb2 import AdminAnswer
from txnbuffer.rpc.frames import ClientFrame, ServerFrame
from txnbuffer.rpc.session_encoding import SESSION
from txnbuffer.rpc.streams_encoding import STREAMS
from txnbuffer.streams.messages import ClientMessage, ServerMessage

if TYPE_CHECKING:
    from txnbuffer.service.connection import SessionConnection
    from txnbuffer.service.engine import Engine


class Link(Protocol):
    """The interface of a session connection: frames in both directions."""

    async def send(self, frame: ClientFrame) -> None:
        """Send a frame. Raises ServiceUnavailable if the connection is lost."""

    async def receive(self) -> ServerFrame | None:
        """Return the next frame; None once the service has ended the connection. Raises ServiceUnavailable."""

    async def end(self) -> None:
        """Send no more frames; the service may still send some."""

    async def close(self) -> None:
        """Close the connection."""


Connector: TypeAlias = Callable[[], Awaitable[Link]]
"""Opens a connection. Raises ServiceUnavailable."""


class EngineLink:
    """A session connection to an engine on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._connection: SessionConnection = engine.connect()

    async def send(self, frame: ClientFrame) -> None:
        await self._connection.room()
        self._connection.receive(frame)

    async def receive(self) -> ServerFrame | None:
        return await self._connection.next()

    async def end(self) -> None:
        """Do nothing: the engine ends the connection after the last frame."""

    async def close(self) -> None:
        self._connection.lost()


TIMEOUT = 30.0
"""Seconds to wait for the answer to an admin request."""


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
    """

    def __init__(self, connectors: Sequence[AdminConnector], max_unavailable: float) -> None:
        self.max_unavailable = max_unavailable
        self._connectors = connectors
        self._links: dict[int, AdminLink] = {}
        self._lock = asyncio.Lock()
        self._backoff = Backoff()

    async def ask(self, owned: str, method: str, arguments: dict[str, Any], max_unavailable: float = 0.0) -> Any:
        """Return the answer of the shard that owns `owned`, a topic, a producer name or a group.

        Retries for `max_unavailable` seconds while the service is unavailable. Raises the error in the answer, and
        ServiceUnavailable.
        """
        if not self._connectors:
            raise InvalidRequest("this client has no connector for admin requests: create it with connect")
        monotonic = current().clock.monotonic
        give_up, failures = monotonic() + max_unavailable, 0
        number = shard_of(owned, len(self._connectors))
        while True:
            async with self._lock:  # a failed request must not close the link of another one
                try:
                    if number not in self._links:
                        self._links[number] = await self._connectors[number]()
                    return await self._links[number].ask(method, arguments)
                except ServiceUnavailable:
                    await self._hang_up(number)
                    failures += 1
                    pause = self._backoff.after(failures)
                    if monotonic() + pause > give_up:
                        raise
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close all connections."""
        for number in [*self._links]:
            await self._hang_up(number)

    async def _hang_up(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            await link.close()


class EngineAdminLink:
    """Admin requests to an engine on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        from txnbuffer.service.admin import ServiceAdmin

        self._methods = ServiceAdmin(engine).methods()

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        return await self._methods[method](arguments)

    async def close(self) -> None:
        pass


class GrpcAdminLink:
    """Admin requests over gRPC."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        request = encode_admin_request(arguments)
        return json.loads((await self._channel.ask(f"{ADMIN_PATH}/{method}", request, AdminAnswer, TIMEOUT)).json)

    async def close(self) -> None:
        await self._channel.close()


class StreamLink(Protocol):
    """The interface of a connection for change streams: messages in both directions."""

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        """Send messages. Raises ServiceUnavailable if the connection is lost."""

    async def receive(self) -> Sequence[ServerMessage] | None:
        """Return the next messages; None once the service has ended the connection. Raises ServiceUnavailable."""

    async def close(self) -> None:
        """Close the connection."""


StreamConnector: TypeAlias = Callable[[], Awaitable[StreamLink]]
"""Opens a connection. Raises ServiceUnavailable."""


class EngineStreamLink:
    """A connection for change streams to an engine on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.streams.connect()

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        self._connection.receive(messages)

    async def receive(self) -> Sequence[ServerMessage] | None:
        return await self._connection.next()

    async def close(self) -> None:
        self._connection.lost()


async def open_session(address: Endpoint, timeout: float, log: LogIdentity) -> Link:
    """Connect a session within `timeout` seconds. Raises ServiceUnavailable, VersionMismatch, UsedAfterFork."""
    lifecycle.check_grpc_fork()
    return await MessageStream.open(SESSION, address, timeout, log)


async def open_streams(address: Endpoint, timeout: float, log: LogIdentity) -> StreamLink:
    """Connect change streams. Raises as `open_session`."""
    lifecycle.check_grpc_fork()
    return await MessageStream.open(STREAMS, address, timeout, log)


async def open_admin(address: Endpoint, timeout: float, log: LogIdentity) -> AdminLink:
    """Connect for admin requests. Raises as `open_session`."""
    lifecycle.check_grpc_fork()
    return GrpcAdminLink(await Channel.open(address, timeout, log))
