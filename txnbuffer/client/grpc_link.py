"""A connection to a service over gRPC: one stream of frames each way."""

from __future__ import annotations

from typing import Any

from broker_io.errors import MessageTooLarge
from txnbuffer.client import forking
from txnbuffer.errors import Error, ServiceUnavailable
from txnbuffer.frames import MAX_FRAME_BYTES, ClientFrame, OtherVersion, ServerFrame
from txnbuffer.rpc.log_identity import LogIdentity
from txnbuffer.rpc.names import LOG_KEY
from txnbuffer.wire import decode_server_frame, encode_client_frame

METHOD = "/txnbuffer.v1.Session/Talk"
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
        return cls(target, *await open_call(target, METHOD, root_certificates, timeout, log))

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
            return OtherVersion(f"{self._target} refuses this client: {details}")
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
    forking.about_to_use_grpc()
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
