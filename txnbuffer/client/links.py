"""Connections to a service: for sessions, for admin requests and for change streams

Each kind has an interface and two implementations: to an engine on the same event loop, and over gRPC.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from broker_io.environment import current
from broker_io.errors import MessageTooLarge
from snapshots.shards import shard_of
from txnbuffer.client import lifecycle
from txnbuffer.errors import Error, InvalidRequest, ServiceUnavailable
from txnbuffer.rpc.client_frames import encode_client_frame
from txnbuffer.rpc.columns import decode_error
from txnbuffer.rpc.discovery import LogIdentity
from txnbuffer.rpc.frames import (
    ADMIN_SERVICE,
    ERROR_FAULT,
    ERROR_NAME,
    LOG_KEY,
    MAX_FRAME_BYTES,
    SESSION_METHOD,
    SESSION_SERVICE,
    STREAMS_METHOD,
    STREAMS_SERVICE,
    ClientFrame,
    ServerFrame,
    VersionMismatch,
)
from txnbuffer.rpc.server_frames import decode_server_frame
from txnbuffer.rpc.stream_frames import decode_stream_server_frame, encode_stream_client_frame
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


SESSION_PATH = f"/{SESSION_SERVICE}/{SESSION_METHOD}"
TOO_LONG = "larger than max"
"""Part of gRPC's error text for a message that exceeds the size limit of the client or the service."""

OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    # A service that hangs keeps its connections open. Detect that before the new owner ends the session.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A service restarts within seconds: retry often, and abandon attempts to connect that hang.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class _FrameStream:
    """A bidirectional gRPC stream of encoded frames, which owns its channel."""

    def __init__(self, target: str, channel: Any, call: Any) -> None:
        self._target = target
        self._channel = channel
        self._call = call

    async def _write(self, data: bytes) -> None:
        import asyncio

        import grpc

        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._gone(error) from None

    async def _read(self) -> bytes | None:
        """Return the next frame; None after the last one."""
        import grpc

        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._gone(error) from None
        return None if data is grpc.aio.EOF else data

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    def _gone(self, error: Any) -> Error:
        """Return the error to raise for an error of gRPC."""
        raise NotImplementedError


class GrpcLink(_FrameStream):
    """A session connection over gRPC: one bidirectional stream of frames."""

    @classmethod
    async def open(cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity) -> GrpcLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, *await open_call(target, SESSION_PATH, root_certificates, timeout, log))

    async def send(self, frame: ClientFrame) -> None:
        await self._write(encode_client_frame(frame))

    async def receive(self) -> ServerFrame | None:
        data = await self._read()
        return None if data is None else decode_server_frame(data)

    async def end(self) -> None:
        await self._call.done_writing()

    def _gone(self, error: Any) -> Error:
        import grpc

        details = error.details() if hasattr(error, "details") else str(error)
        exhausted = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        if exhausted and TOO_LONG in details:
            # Not retryable: a new connection would send the frame again, and the service would reject it again.
            return MessageTooLarge(
                f"{self._target} rejected a frame over its size limit ({details}): send fewer records at once"
            )
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return VersionMismatch(f"{self._target} rejected this client: {details}")
        return ServiceUnavailable(f"the connection to {self._target} was lost ({details})")


async def open_call(
    target: str, method: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
) -> tuple[Any, Any]:
    """Open a channel to HOST:PORT and start a bidirectional call of `method` on it; return both.

    Raises ServiceUnavailable after `timeout` seconds, or if the service rejects the call or serves another log than
    `log`; and UsedAfterFork.
    """
    import asyncio

    metadata = await log.metadata()
    channel = await open_channel(target, root_certificates, timeout)
    try:
        call = channel.stream_stream(method)(metadata=metadata)
        async with asyncio.timeout(timeout):
            served = dict(await call.initial_metadata())
            if LOG_KEY not in served:  # the service rejected the call without reading it
                await call.code()
                raise ServiceUnavailable(f"the service at {target} rejected the connection ({await call.details()})")
        log.check(target, served[LOG_KEY])
    except BaseException as error:
        await channel.close()
        if isinstance(error, TimeoutError):
            raise ServiceUnavailable(f"the service at {target} did not answer within {timeout:g} s") from None
        raise
    return channel, call


async def open_channel(target: str, root_certificates: bytes | None, timeout: float) -> Any:
    """Return a channel to HOST:PORT once it is ready.

    Raises ServiceUnavailable after `timeout` seconds, and UsedAfterFork.
    """
    lifecycle.check_grpc_fork()
    import asyncio

    import grpc

    if root_certificates is None:
        channel = grpc.aio.insecure_channel(target, OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(root_certificates)
        channel = grpc.aio.secure_channel(target, credentials, OPTIONS)
    try:
        async with asyncio.timeout(timeout):
            await channel.channel_ready()
    except BaseException as error:
        await channel.close()
        if isinstance(error, TimeoutError):
            text = f"no service answers at {target} within {timeout:g} s: check that `txnbuf serve` is running there"
            raise ServiceUnavailable(text) from None
        raise
    return channel


TIMEOUT = 30.0
"""Seconds to wait for the answer to an admin request."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a request that was not answered is sent again."""


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

    async def ask(self, owned: str, method: str, arguments: dict[str, Any], max_unavailable: float = 0.0) -> Any:
        """Return the answer of the shard that owns `owned`, a topic, a producer name or a group.

        Retries for `max_unavailable` seconds while the service is unavailable. Raises the error in the answer, and
        ServiceUnavailable.
        """
        if not self._connectors:
            raise InvalidRequest("this client has no connector for admin requests: create it with connect")
        monotonic = current().clock.monotonic
        give_up, pause = monotonic() + max_unavailable, FIRST_PAUSE
        number = shard_of(owned, len(self._connectors))
        while True:
            async with self._lock:  # a failed request must not close the link of another one
                try:
                    if number not in self._links:
                        self._links[number] = await self._connectors[number]()
                    return await self._links[number].ask(method, arguments)
                except ServiceUnavailable:
                    await self._hang_up(number)
                    if monotonic() + pause > give_up:
                        raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

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

    def __init__(self, target: str, channel: Any, log: LogIdentity) -> None:
        self._target = target
        self._channel = channel
        self._log = log

    @classmethod
    async def open(
        cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
    ) -> GrpcAdminLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, await open_channel(target, root_certificates, timeout), log)

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        import grpc

        call, metadata = self._channel.unary_unary(f"/{ADMIN_SERVICE}/{method}"), await self._log.metadata()
        try:
            return json.loads(await call(json.dumps(arguments).encode(), timeout=TIMEOUT, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._target) from None

    async def close(self) -> None:
        await self._channel.close()


def error_of(error: Any, target: str) -> Error:
    """Return the error of a failed call: the service's own, in its class; ServiceUnavailable if it did not answer."""
    known = dict(error.trailing_metadata() or ())
    if ERROR_NAME not in known:
        return ServiceUnavailable(
            f"no service answers at {target} ({error.details()}): start it, or correct the address"
        )
    fields = {"name": known[ERROR_NAME], "fault": known.get(ERROR_FAULT, ""), "message": error.details(), "details": {}}
    return decode_error(fields)


STREAMS_PATH = f"/{STREAMS_SERVICE}/{STREAMS_METHOD}"


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


class GrpcStreamLink(_FrameStream):
    """A connection for change streams over gRPC."""

    @classmethod
    async def open(
        cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
    ) -> GrpcStreamLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, *await open_call(target, STREAMS_PATH, root_certificates, timeout, log))

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        await self._write(encode_stream_client_frame(messages))

    async def receive(self) -> Sequence[ServerMessage] | None:
        data = await self._read()
        return None if data is None else decode_stream_server_frame(data)

    def _gone(self, error: Any) -> ServiceUnavailable:
        details = error.details() if hasattr(error, "details") else str(error)
        return ServiceUnavailable(f"the stream connection to {self._target} was lost ({details})")
