"""One connection to a service: frames go out, frames come in.

A connection to a service over gRPC: one stream of frames each way.

Connections by which services are asked what operators ask: a question by name, its answer as plain values.

One connection of change streams to a service: messages go out, messages come in.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from broker_io.errors import MessageTooLarge
from snapshots.shards import shard_of
from txnbuffer.client import lifecycle
from txnbuffer.errors import Error, InvalidRequest, ServiceUnavailable
from txnbuffer.rpc.client_frames import encode_client_frame
from txnbuffer.rpc.columns import decode_error
from txnbuffer.rpc.discovery import LogIdentity
from txnbuffer.rpc.frames import LOG_KEY, MAX_FRAME_BYTES, ClientFrame, ServerFrame, VersionMismatch
from txnbuffer.rpc.server_frames import decode_server_frame
from txnbuffer.rpc.stream_client_frames import encode_stream_client_frame
from txnbuffer.rpc.stream_server_frames import decode_stream_server_frame
from txnbuffer.streams.messages import ClientMessage, ServerMessage

if TYPE_CHECKING:
    from txnbuffer.service.connection import SessionConnection
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
        self._connection: SessionConnection = engine.connect()

    async def send(self, frame: ClientFrame) -> None:
        await self._connection.room()
        self._connection.receive(frame)

    async def receive(self) -> ServerFrame | None:
        return await self._connection.next()

    async def end(self) -> None:
        """The engine ends the connection after the last frame."""

    async def close(self) -> None:
        self._connection.lost()


SESSION_METHOD = "/txnbuffer.v1.Session/Talk"
TOO_LONG = "larger than max"
"""What gRPC says of a message that either side does not take."""

OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    # A service that hangs keeps its connections: leave it while its successor still waits for us.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A service comes back within seconds: ask for it often, and don't hang on a connection that died half made.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcLink:
    def __init__(self, target: str, channel: Any, call: Any) -> None:
        self._target = target
        self._channel = channel
        self._call = call

    @classmethod
    async def open(cls, target: str, root_certificates: bytes | None, timeout: float, log: LogIdentity) -> GrpcLink:
        """Connect to HOST:PORT within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
        return cls(target, *await open_call(target, SESSION_METHOD, root_certificates, timeout, log))

    async def send(self, frame: ClientFrame) -> None:
        import asyncio

        import grpc

        try:
            await self._call.write(encode_client_frame(frame))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._gone(error) from None

    async def receive(self) -> ServerFrame | None:
        import grpc

        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._gone(error) from None
        return None if data is grpc.aio.EOF else decode_server_frame(data)

    async def end(self) -> None:
        await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    def _gone(self, error: Any) -> Error:
        import grpc

        details = error.details() if hasattr(error, "details") else str(error)
        exhausted = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        if exhausted and TOO_LONG in details:
            # It would be sent again over every other connection, and refused there too.
            return MessageTooLarge(f"{self._target} takes no frame of that length ({details}): send less at once")
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return VersionMismatch(f"{self._target} refuses this client: {details}")
        return ServiceUnavailable(f"the connection to {self._target} broke ({details})")


async def open_call(
    target: str, method: str, root_certificates: bytes | None, timeout: float, log: LogIdentity
) -> tuple[Any, Any]:
    """A channel to HOST:PORT and a call of a method with streams over it, let in by the service of that log.

    Raises ServiceUnavailable after `timeout` seconds, or if the service turns us away; UsedAfterFork.
    """
    import asyncio

    metadata = await log.metadata()
    channel = await open_channel(target, root_certificates, timeout)
    try:
        call = channel.stream_stream(method)(metadata=metadata)
        async with asyncio.timeout(timeout):
            told = dict(await call.initial_metadata())
            if LOG_KEY not in told:  # it was ended before anything of it was looked at
                await call.code()
                raise ServiceUnavailable(f"the service at {target} turns this client away ({await call.details()})")
        log.check(target, told[LOG_KEY])
    except BaseException as error:
        await channel.close()
        if isinstance(error, TimeoutError):
            raise ServiceUnavailable(f"the service at {target} does not answer within {timeout:g} s") from None
        raise
    return channel, call


async def open_channel(target: str, root_certificates: bytes | None, timeout: float) -> Any:
    """A channel to HOST:PORT that is ready within `timeout` seconds. Raises ServiceUnavailable, UsedAfterFork."""
    lifecycle.about_to_use_grpc()
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
            text = f"no service answers at {target} within {timeout:g} s: is `txnbuf serve` running there?"
            raise ServiceUnavailable(text) from None
        raise
    return channel


SERVICE = "/txnbuffer.v1.Admin/"
ERROR_NAME, ERROR_FAULT = "txnbuffer-error", "txnbuffer-fault"
TIMEOUT = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a service that did not answer is asked again."""


class AdminLink(Protocol):
    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        """Raises what the service answers, and ServiceUnavailable if it does not."""

    async def close(self) -> None:
        """Let go."""


AdminDial: TypeAlias = Callable[[], Awaitable[AdminLink]]
"""Opens a connection. Raises ServiceUnavailable."""


class AdminClients:
    """Questions to the service of whichever shard they are for, by connections that are kept.

    `dials` reach the service of each shard; `max_unavailable`: seconds for which one may be away.
    """

    def __init__(self, dials: Sequence[AdminDial], max_unavailable: float) -> None:
        self.max_unavailable = max_unavailable
        self._dials = dials
        self._links: dict[int, AdminLink] = {}
        self._asking = asyncio.Lock()

    async def ask(self, owned: str, method: str, question: dict[str, Any], max_unavailable: float = 0.0) -> Any:
        """The answer of the shard that a topic, a name or a group is of, which is asked again for so many seconds.

        Raises what the service answers, ServiceUnavailable.
        """
        if not self._dials:
            raise InvalidRequest("this client was made without a way to ask its service this: use connect")
        give_up, pause = time.monotonic() + max_unavailable, FIRST_PAUSE
        number = shard_of(owned, len(self._dials))
        while True:
            async with self._asking:  # so that nobody closes the link under another's question
                try:
                    if number not in self._links:
                        self._links[number] = await self._dials[number]()
                    return await self._links[number].ask(method, question)
                except ServiceUnavailable:
                    await self._hang_up(number)
                    if time.monotonic() + pause > give_up:
                        raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def close(self) -> None:
        for number in [*self._links]:
            await self._hang_up(number)

    async def _hang_up(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            await link.close()


class EngineAdminLink:
    """To an engine on the same loop."""

    def __init__(self, engine: Engine) -> None:
        from txnbuffer.service.admin import ServiceAdmin

        self._methods = ServiceAdmin(engine).methods()

    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        return await self._methods[method](question)

    async def close(self) -> None:
        pass


class GrpcAdminLink:
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

    async def ask(self, method: str, question: dict[str, Any]) -> Any:
        import grpc

        call, metadata = self._channel.unary_unary(SERVICE + method), await self._log.metadata()
        try:
            return json.loads(await call(json.dumps(question).encode(), timeout=TIMEOUT, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise named(error, self._target) from None

    async def close(self) -> None:
        await self._channel.close()


def named(error: Any, target: str) -> Error:
    """The error that a service raised, as one of the same class; or that it did not answer."""
    known = dict(error.trailing_metadata() or ())
    if ERROR_NAME not in known:
        return ServiceUnavailable(f"no service answers at {target} ({error.details()}): start it, or say where it is")
    fields = {"name": known[ERROR_NAME], "fault": known.get(ERROR_FAULT, ""), "message": error.details(), "details": {}}
    return decode_error(fields)


STREAM_METHOD = "/txnbuffer.v1.Streams/Stream"


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
        return cls(target, *await open_call(target, STREAM_METHOD, root_certificates, timeout, log))

    async def send(self, messages: Sequence[ClientMessage]) -> None:
        import asyncio

        import grpc

        try:
            await self._call.write(encode_stream_client_frame(messages))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise self._gone(error) from None

    async def receive(self) -> Sequence[ServerMessage] | None:
        import grpc

        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._gone(error) from None
        return None if data is grpc.aio.EOF else decode_stream_server_frame(data)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    def _gone(self, error: Any) -> ServiceUnavailable:
        details = error.details() if hasattr(error, "details") else str(error)
        return ServiceUnavailable(f"the stream connection to {self._target} broke ({details})")
