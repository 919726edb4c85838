"""The channel between a client and a service: TLS, deadlines, the version handshake, log identity, and errors of calls.

Each call has as metadata the version of the protocol, and the identity of the log that the client expects, if it knows
it. The service ends a call of another version as FAILED_PRECONDITION and one for another log as UNAVAILABLE, without
any effect. It answers streams of sessions and changes, and calls of its log, with the identity of its log before
anything else, and the client checks that too: addresses are reused, so the service of another log may answer at one.
Everything that one client opens shares one `LogIdentity`, and so does everything of one broker.

A call that failed ends with the gRPC status of its error and the error itself in trailing metadata. The one policy of
retries is `broker_io.waits.RetryPolicy`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from broker_io.addresses import is_loopback, is_target, shown_address, split_address
from broker_io.environment import current, use_grpc
from broker_io.errors import (
    Error,
    InvalidAddress,
    MessageTooLarge,
    PeerError,
    ServiceUnavailable,
    UntrustedService,
    VersionMismatch,
)
from broker_io.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from broker_io.rpc.encoding import StreamMethod, decode_error, encode_error, parse
from broker_io.rpc.log_pb2 import Error as ErrorMessage

VERSION = 3
"""The version of the protocol: client and service must have the same."""
VERSION_KEY = "txnbuffer-version"
LOG_KEY = "txnbuffer-log"
"""Metadata with the identity of a log, the incarnation of its decision log: in calls the identity that the client
expects, in answers that of the service."""
ERROR_KEY = "txnbuffer-error-bin"

SERVICE_SCHEME = "txnbuf://"

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
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
SOONER = {"grpc.keepalive_time_ms": 3_000, "grpc.keepalive_timeout_ms": 4_000, "grpc.http2.ping_timeout_ms": 4_000}
"""Other values for a member of a pair: it is left before the lease of a primary that hangs has ended."""
TOO_LONG = "larger than max"
"""Part of gRPC's error text for a message that exceeds the size limit of the client or the service."""
REMEDY = "give the address of this log's service, or connect again if the log was re-created"

UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
"""Parts of gRPC's error texts for a certificate that does not verify."""
CONNECT_HINTS = {
    "WRONG_VERSION_NUMBER": "what answers there does not use TLS: connect without a CA certificate",
    "Socket closed": "if the service uses TLS, give its CA certificate",
    "Failed to create security handshaker": "the CA certificate cannot be used",
    "timed out before receiving SETTINGS": "something accepts connections there but does not answer: it may hang",
}
"""What other parts of these texts mean in a failure to connect."""
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Metadata = tuple[tuple[str, str], ...]
VERSION_METADATA: Metadata = ((VERSION_KEY, str(VERSION)),)

M = TypeVar("M")
Out = TypeVar("Out")
In = TypeVar("In")


def service_targets(address: str) -> tuple[str, ...]:
    """Return the HOST:PORT of a service, or of each member of a pair, from its address. Raises InvalidAddress."""
    targets = tuple(dict.fromkeys(address.removeprefix(SERVICE_SCHEME).split(",")))
    if not (address.startswith(SERVICE_SCHEME) and all(map(is_target, targets))):
        raise InvalidAddress(
            f"{shown_address(address)!r} is not the address of a service: write txnbuf://HOST:PORT, or "
            "txnbuf://HOST:PORT,HOST:PORT for a pair"
        )
    return targets


def obstacle(address: str) -> str:
    """Why an address can't be bound, which gRPC does not report; empty if it can."""
    import errno

    host, port = split_address(address)
    try:
        current().network.check_free(host, int(port))
    except OSError as error:
        hint = "; check whether another process uses the port" if error.errno == errno.EADDRINUSE else ""
        return f"{error.strerror}{hint}"
    return ""


class Endpoint(NamedTuple):
    """HOST:PORT of a service, and the credentials for it. `paired`: another may be live."""

    target: str
    credentials: ClientCredentials = NO_CREDENTIALS
    paired: bool = False

    @classmethod
    def each(cls, targets: Sequence[str], credentials: ClientCredentials) -> list[Endpoint]:
        """The endpoints of one service, or of both members of a pair."""
        return [cls(target, credentials, len(targets) > 1) for target in targets]

    def channel(self, *, for_asyncio: bool = False) -> Any:
        """Return a channel of gRPC. Raises UsedAfterFork."""
        use_grpc()
        import grpc

        module: Any = grpc.aio if for_asyncio else grpc
        options = [*{**dict(OPTIONS), **SOONER}.items()] if self.paired else OPTIONS
        credentials = self.credentials.channel_credentials()
        if credentials is None:
            return module.insecure_channel(self.target, options)
        return module.secure_channel(self.target, credentials, options)

    def metadata(self) -> Metadata:
        """The metadata that says who the client is. Raises as `ClientCredentials.metadata`."""
        return self.credentials.metadata(self.target, local=is_loopback(self.target.rpartition(":")[0].strip("[]")))


class LogIdentity:
    """The identity of the log that a client uses.

    `read_identity` reads it, and blocks. Without this function the client accepts the log of the first service that it
    connects to.
    """

    def __init__(self, read_identity: Callable[[], str] | None = None) -> None:
        self.name: str | None = None
        self._read_identity = read_identity

    async def metadata(self) -> Metadata:
        """Return the metadata for a call to the service. Raises ServiceUnavailable if the log does not exist yet."""
        if self.name is None and self._read_identity is not None:
            self.name = await asyncio.to_thread(self._read_identity)
        return self.known_metadata()

    def known_metadata(self) -> Metadata:
        """Return the metadata for a call, without reading the identity."""
        return VERSION_METADATA if self.name is None else (*VERSION_METADATA, (LOG_KEY, self.name))

    def check(self, target: str, name: str) -> None:
        """Check the identity that the service at `target` sent. Raises ServiceUnavailable."""
        if self.name is None:
            self.name = name
        elif name != self.name:
            raise ServiceUnavailable(f"the service at {target} serves another log than this client's: {REMEDY}")


class Channel:
    """A connection of an asyncio program to a service."""

    def __init__(self, address: Endpoint, log: LogIdentity) -> None:
        self.target = address.target
        self._address = address
        self._log = log
        self._channel = address.channel(for_asyncio=True)

    @classmethod
    async def open(cls, address: Endpoint, timeout: float, log: LogIdentity) -> Channel:
        """Connect within `timeout` seconds. Raises ServiceUnavailable."""
        channel, reasons = cls(address, log), [""]
        try:
            async with asyncio.timeout(timeout):
                await channel._connect(reasons)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                text = f"no service answers at {address.target} within {timeout:g} s{reasons[-1]}: check that"
                raise ServiceUnavailable(f"{text} `txnbuf serve` is running there") from None
            raise
        return channel

    async def _connect(self, reasons: list[str]) -> None:
        """Wait for the connection, and append why each attempt failed. Raises UntrustedService."""
        import grpc

        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                try:  # gRPC tells why only to a call, which fails at once in this state
                    await self._channel.unary_unary(HEALTH_CHECK)(b"")
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE:
                        reasons.append(f" ({_connect_failure(self.target, error.details())})")
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def ask(self, path: str, request: Any, decode: Callable[[bytes], M], timeout: float) -> M:
        """Return the decoded answer to a request.

        Raises the error of the service; ServiceUnavailable without an answer; that of `decode`.
        """
        import grpc

        call, metadata = self._channel.unary_unary(path), await self._metadata()
        try:
            return decode(await call(request.SerializeToString(), timeout=timeout, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.target) from None

    async def close(self) -> None:
        await self._channel.close()

    async def _metadata(self) -> Metadata:
        log, address = await self._log.metadata(), self._address
        if not callable(address.credentials.token):
            return (*log, *address.metadata())
        return (*log, *await asyncio.to_thread(address.metadata))  # it may read a file, or ask somebody

    async def _call(self, path: str, timeout: float) -> Any:
        """Start a call with streams; its service serves the right log."""
        import grpc

        denials = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
        call = self._channel.stream_stream(path)(metadata=await self._metadata())
        try:
            async with asyncio.timeout(timeout):
                served = dict(await call.initial_metadata())
                if LOG_KEY not in served:  # the service rejected the call without reading it
                    status, details = await call.code(), await call.details()
                    trailer = dict(await call.trailing_metadata() or ()).get(ERROR_KEY)
                    if status in denials and trailer is not None:
                        raise decode_error(parse(ErrorMessage, trailer))
                    if status is grpc.StatusCode.FAILED_PRECONDITION:
                        raise VersionMismatch(f"{self.target} rejected this client: {details}")
                    raise ServiceUnavailable(f"the service at {self.target} rejected the connection ({details})")
        except TimeoutError:
            raise ServiceUnavailable(f"the service at {self.target} did not answer within {timeout:g} s") from None
        self._log.check(self.target, served[LOG_KEY])
        return call


@dataclass(eq=False)
class MessageStream(Generic[Out, In]):
    """A call of a method with streams, on a channel of its own."""

    _channel: Channel
    _call: Any
    _method: StreamMethod[Out, In]

    @classmethod
    async def open(
        cls, method: StreamMethod[Out, In], address: Endpoint, timeout: float, log: LogIdentity
    ) -> MessageStream[Out, In]:
        """Connect and call; each may take `timeout` seconds.

        Raises ServiceUnavailable, also if the service serves another log, and VersionMismatch.
        """
        channel = await Channel.open(address, timeout, log)
        try:
            return cls(channel, await channel._call(method.path, timeout), method)
        except BaseException:
            await channel.close()
            raise

    async def send(self, message: Out) -> None:
        """Send a message. Raises ServiceUnavailable if the connection is lost."""
        import grpc

        try:
            await self._call.write(self._method.encode(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise error_of(error, self._channel.target, connected=True) from None

    async def receive(self) -> In | None:
        """Return the next message; None after the last one. Raises ServiceUnavailable if the connection is lost."""
        import grpc

        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._channel.target, connected=True) from None
        return None if data is grpc.aio.EOF else self._method.decode(data)

    async def end(self) -> None:
        """Send no more messages; the service may still send some."""
        await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def _connect_failure(target: str, details: str | None) -> str:
    """Return the reason of a failure to connect, with a hint. Raises UntrustedService."""
    reason = (details or "").rpartition("last error: ")[2]
    if any(text in reason for text in UNTRUSTED):
        raise UntrustedService(
            f"the certificate of the service at {target} does not verify ({reason}): give the CA certificate of this "
            "service, and the host name in its certificate"
        )
    return "; ".join([reason, *[hint for text, hint in CONNECT_HINTS.items() if text in reason]])


def error_of(error: Any, target: str, *, connected: bool = False) -> Error:
    """Return the error of a failed call: the service's own, in its class; else what the status of gRPC means."""
    import grpc

    if not isinstance(error, grpc.RpcError):  # a call that has ended
        return ServiceUnavailable(f"the connection to {target} was lost ({error})")
    metadata: Any = error.trailing_metadata()  # pairs, of a class that asyncio's calls do not share
    trailer = dict(metadata or ()).get(ERROR_KEY)
    if trailer is not None:
        with suppress(ValueError):
            return decode_error(parse(ErrorMessage, trailer))
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LONG in (error.details() or ""):
        # Not retryable: the service would reject the message again.
        return MessageTooLarge(
            f"{target} rejected a frame over its size limit ({error.details()}): send fewer records at once"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return PeerError(f"the server at {target} is not a service of this release: give the address of `txnbuf serve`")
    if connected:
        return ServiceUnavailable(f"the connection to {target} was lost ({error.details()})")
    try:
        reason = _connect_failure(target, error.details())
    except UntrustedService as untrusted:
        return untrusted
    return ServiceUnavailable(f"no service answers at {target} ({reason}): is it running?")


def rejection(metadata: Mapping[str, str], served_log: str | None) -> Error | None:
    """Return why a service that serves `served_log`, if any yet, must not answer a call with this metadata."""
    version = metadata.get(VERSION_KEY, "")
    if version != str(VERSION):
        newer = version.isdigit() and (len(version), version) > (len(str(VERSION)), str(VERSION))
        return VersionMismatch(
            f"the client has version {version or '1 or 2'} of the protocol, the service version {VERSION}: "
            f"upgrade the {'service' if newer else 'client'}"
        )
    if metadata.get(LOG_KEY, served_log) != served_log and served_log is not None:
        return ServiceUnavailable(
            "this service serves another log than the requested one: connect to the service of that log"
        )
    return None


async def end_call(context: Any, error: Error) -> None:
    """End a call of this service with the status of an error, and the error in the trailing metadata."""
    import grpc

    message = encode_error(error)
    with suppress(asyncio.InvalidStateError):  # the call has ended
        await context.abort(
            grpc.StatusCode[error.grpc_status], message.message, ((ERROR_KEY, message.SerializeToString()),)
        )
