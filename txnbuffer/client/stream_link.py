"""One connection of change streams to a service: messages go out, messages come in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from txnbuffer.client.grpc_link import open_call
from txnbuffer.errors import ServiceUnavailable
from txnbuffer.rpc.log_identity import LogIdentity
from txnbuffer.streams.messages import ClientMessage, ServerMessage
from txnbuffer.streams.wire import decode_server_frame, encode_client_frame

if TYPE_CHECKING:
    from txnbuffer.service.engine import Engine

METHOD = "/txnbuffer.v1.Streams/Stream"


class StreamLink(Protocol):
    async def send(self, messages: Sequence[ClientMessage]) -> None:
        """Raises ServiceUnavailable if the connection is gone."""

    async def receive(self) -> Sequence[ServerMessage] | None:
        """The next messages; None when the service has ended the connection. Raises ServiceUnavailable."""

    async def close(self) -> None:
        """Let go."""


StreamDial: TypeAlias = Callable[[], Awaitable[StreamLink]]
"""Opens a connection. Raises ServiceUnavailable."""


class EngineStreamLink:
    """A connection to an engine on the same loop."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.streams.connect()

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        self._connection.receive(messages)

    async def receive(self) -> Sequence[ServerMessage] | None:
        return await self._connection.next()

    async def close(self) -> None:
        self._connection.lost()


class GrpcStreamLink:
    """A connection over gRPC."""

    def __init__(self, target: str, channel: Any, call: Any) -> None:
        self._target = target
        self._channel = channel
        self._call = call

    @classmethod
    async def open(
        cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
    ) -> GrpcStreamLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, *await open_call(target, METHOD, root_certificates, timeout, log))

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        import asyncio

        import grpc

        try:
            await self._call.write(encode_client_frame(messages))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._gone(error) from None

    async def receive(self) -> Sequence[ServerMessage] | None:
        import grpc

        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._gone(error) from None
        return None if data is grpc.aio.EOF else decode_server_frame(data)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    def _gone(self, error: Any) -> ServiceUnavailable:
        details = error.details() if hasattr(error, "details") else str(error)
        return ServiceUnavailable(f"the stream connection to {self._target} broke ({details})")
