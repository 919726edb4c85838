"""The gRPC server: sessions, change streams, the admin service, the log as a broker, and health checks.

- `txnbuffer.v1.Session`, method `Talk`: a stream of client frames, answered by a stream of server frames.
- `txnbuffer.v1.Streams`, method `Stream`: change streams, one stream of frames each way.
- `txnbuffer.v1.Admin`: one method per request of `txnbuffer.service.servers.admin`; answers are JSON values.
- `txnbuffer.v1.Log`: the log as the broker `txnbuf://HOST:PORT`. Every topic can be read. Only the engine may append
  to, trim and delete internal topics and topics that sessions have written to; any client may change other topics.

The protocol files and `docs/wire.md` define the messages. `broker_io.rpc.channel` checks the metadata of a call: its
version, and the log that it is meant for. The answers of sessions, change streams and the log name the served log. The
server listens before there is an engine, because the engine publishes its address; until `serve` it rejects all calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from broker_io import serve_broker
from broker_io.addresses import is_loopback, port_of, shown_address, split_address
from broker_io.errors import (
    EnvironmentFault,
    Error,
    LimitExceeded,
    NotAuthorized,
    ProtectedTopic,
    ServiceUnavailable,
    Unauthenticated,
)
from broker_io.rpc.channel import LOG_KEY, end_call, obstacle, rejection
from broker_io.rpc.credential_files import ClientCertificate
from broker_io.rpc.encoding import serialize
from snapshots.format import is_internal
from txnbuffer.errors import InvalidConfiguration, InvalidRequest
from txnbuffer.rpc.admin_encoding import ADMIN_SERVICE, decode_admin_request
from txnbuffer.rpc.admin_pb2 import AdminAnswer
from txnbuffer.rpc.frames import FRAME_BYTES, SEND_BYTES
from txnbuffer.rpc.session_encoding import (
    SESSION_METHOD,
    SESSION_SERVICE,
    client_frame_parts,
    encode_server_frame,
)
from txnbuffer.rpc.streams_encoding import (
    STREAMS_METHOD,
    STREAMS_SERVICE,
    decode_stream_client_frame,
    encode_stream_server_frame,
)
from txnbuffer.service.door.access import PERMISSIONS, Access, Permissions
from txnbuffer.service.door.connection import MIB, Limits, SessionConnection
from txnbuffer.service.door.connection_limits import NO_LIMITS, PortLimits, keep_within
from txnbuffer.service.door.health import Health
from txnbuffer.service.door.needs import check_log, may_list
from txnbuffer.service.door.tls import ServerTls
from txnbuffer.service.engine.engine import Engine
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.admin_calls import NO_METHODS, AdminCalls, Method
from txnbuffer.service.streams.streams import StreamConnection


def check_change(engine: Engine, topic: str, change: str) -> None:
    """Raises ProtectedTopic for a change of a topic that belongs to the engine, and why it takes no changes now.

    Raises NotAuthorized for what the caller may not do.
    """
    check_log(PERMISSIONS.get(), topic, change)
    if change in ("read", "append"):
        return
    if engine.requests.refusal is not None:
        raise engine.requests.refusal
    if is_internal(topic):
        raise ProtectedTopic(f"topic {topic!r} is internal: only the service may change it; read it instead")
    if change == "create":
        engine.quotas.of(PERMISSIONS.get()).create_topic(lambda: engine.topics.is_missing(topic))
        return
    if change == "own":
        raise ProtectedTopic(
            f"topic {topic!r} can't have an exclusive writer while a service owns the log: open a shared writer"
        )
    if topic in engine.topics.by_name:
        raise ProtectedTopic(
            f"topic {topic!r} belongs to the service because sessions write to it: write to it in a session"
        )


CERTIFICATE_SECONDS = 300
"""Seconds after which clients with certificates connect again, which verifies them again; streams end after twice."""
FIRST_FRAME = 10.0
"""Seconds in which a client sends its first frame: a connection without one belongs to no session."""
LAST_WORDS = 1.0
"""Seconds that a client has to read the last frames, and to close its side."""
CALLS_OF_CONNECTION = 320
"""Calls of one connection at a time: all readers and writers of the log, and what else a client has open."""
METADATA_BYTES = 16 * 1024
"""The metadata of one call, with its token."""
PING_STRIKES = 10
"""Pings in less than a second, without an answer of the service in between, after which a connection ends."""
PING_SECONDS = 10.0
"""Seconds without anything from a client after which the service pings it."""
HANDSHAKE_SECONDS = 10.0
"""Seconds in which a client completes the handshakes of TLS and HTTP/2."""
IDLE_SECONDS = 60.0
"""Seconds after which a connection without a call ends; a client opens another one for its next call."""

PREFIX = "/txnbuffer.v1."
"""What the paths of the methods begin with; others, such as health checks, need no handshake."""
HEALTH = ("", SESSION_SERVICE, ADMIN_SERVICE)


class GrpcServer:
    """Listens from `start` on, at `port`, and serves an engine from `serve` on.

    `admin` answers the requests of operators, `methods` without an engine too.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_clients: int,
        methods: Mapping[str, Method] = NO_METHODS,
        access: Access | None = None,
        connections: PortLimits = NO_LIMITS,
    ) -> None:
        self.port = 0
        self.admin = AdminCalls(methods)
        self._limits = limits
        self._max_clients = max_clients
        self._access = access
        self._engine: Engine | None = None
        self._connections = connections
        self._server: Any = None
        self._health = Health(HEALTH)
        self._log: Any = None
        self._within: asyncio.Task[None] | None = None

    async def start(self, address: str, tls: ServerTls | None = None) -> None:
        """Listen at HOST:PORT, with TLS if it is given. Raises EnvironmentFault."""
        import grpc

        options = _options(self._limits)
        if self._connections.most:
            options.append(("grpc.max_allowed_incoming_connections", self._connections.most))
        if tls is not None and tls.client_ca:
            options.append(("grpc.max_connection_age_ms", CERTIFICATE_SECONDS * 1000))
            options.append(("grpc.max_connection_age_grace_ms", CERTIFICATE_SECONDS * 1000))
        server = self._server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._handler(),))
        try:
            if tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, tls.files.server_credentials())
        except RuntimeError as error:
            raise EnvironmentFault(f"can't listen at {address}: {obstacle(address) or error}") from error
        await server.start()
        if self._connections.of_address:
            self._within = asyncio.ensure_future(keep_within(self.port, self._connections.of_address))

    async def serve(self, engine: Engine, admin: ServiceAdmin) -> None:
        """Start to serve an engine."""
        limits = engine.limits
        self._log = serve_broker(
            engine.broker,
            guard=partial(check_change, engine),
            gate=engine.check_answer,
            listed=lambda topic: may_list(PERMISSIONS.get(), topic),
            caller=lambda: PERMISSIONS.get().principal if PERMISSIONS.get().tag else "",
            refused=engine.quotas.count,
            max_message_bytes=limits.max_message_bytes,
            max_append_bytes=limits.max_message_bytes + limits.client_bytes,
            identity=engine.log,
        )
        self.admin.serve(engine, admin)
        self._engine = engine
        self._health.set(serving=True)

    def recheck(self) -> None:
        """End the connections of clients that have to authenticate again, and streams that are no longer allowed."""
        engine = self._engine
        connections: list[SessionConnection | StreamConnection] = []
        if engine is not None:
            connections += [*engine.connections, *engine.streams.connections]
        for connection in connections:
            try:
                connection.recheck()
            except Unauthenticated as error:
                # The client connects again, if it has a new token by then; otherwise that is refused.
                connection.close(ServiceUnavailable(f"{error}; then connect again"))
            except NotAuthorized as error:
                connection.close(error)

    async def drain(self) -> None:
        """Make health checks fail: no new clients are served."""
        self._health.set(serving=False)

    async def unserve(self) -> None:
        """Reject all calls again, until another `serve`; the connections of the engine end with it."""
        await self.drain()
        self._engine = None
        self.admin.unserve()
        log, self._log = self._log, None
        if log is not None:
            await log.close()

    async def stop(self) -> None:
        """Send the last frames, then end."""
        if self._within is not None:
            self._within.cancel()
        if self._log is not None:
            await self._log.close()
        if self._server is not None:
            await self._server.stop(2 * LAST_WORDS)

    def _handler(self) -> Any:
        """The handler of all calls but health checks; it rejects another version, and calls for another log."""
        import grpc

        outer, stream = self, grpc.stream_stream_rpc_method_handler
        not_yet: Any = stream(self._not_yet)
        methods: dict[str, Any] = {
            f"/{SESSION_SERVICE}/{SESSION_METHOD}": stream(self._talk),
            f"/{STREAMS_SERVICE}/{STREAMS_METHOD}": stream(self._stream),
        }
        for name in self.admin.names:
            methods[f"/{ADMIN_SERVICE}/{name}"] = grpc.unary_unary_rpc_method_handler(self._answering(name))

        class Handler(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                if not details.method.startswith(PREFIX):
                    return outer._health.handler(details.method)
                engine, metadata = outer._engine, dict(details.invocation_metadata)
                error = rejection(metadata, None if engine is None else engine.log)
                access, authorization = outer._access, metadata.get("authorization")
                if error is None and access is not None and access.refuses(authorization):
                    return outer._authenticated(not_yet)  # which does not read the message
                if error is not None:

                    async def refuse(_: Any, context: Any) -> None:
                        await end_call(context, error)

                    return stream(refuse)
                found = methods.get(details.method)
                if found is None and outer._log is not None:
                    found = outer._log.handler.service(details)
                elif found is None and details.method.startswith(f"{PREFIX}Log/"):
                    found = not_yet
                return None if found is None else outer._authenticated(found)

        return Handler()

    def _authenticated(self, handler: Any) -> Any:
        """A handler that first authenticates its caller, and sets PERMISSIONS."""
        import grpc

        access, streams = self._access, handler.stream_stream is not None
        if access is None or not access.enabled:
            return handler
        inner = handler.stream_stream or handler.unary_unary

        async def call(request: Any, context: Any) -> Any:
            authorization = dict(context.invocation_metadata()).get("authorization")
            try:
                caller = access.authenticate(authorization, ClientCertificate.of_call(context), context.peer())
            except NotAuthorized as error:
                await end_call(context, error)
                raise
            PERMISSIONS.set(Permissions(access, caller))
            return await inner(request, context)

        wrap = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return wrap(call)

    async def _not_yet(self, _: Any, context: Any) -> None:
        import grpc

        await context.abort(grpc.StatusCode.UNAVAILABLE, self.admin.not_served())

    async def _talk(self, _: Any, context: Any) -> None:
        engine = self._engine
        if engine is None:
            await self._not_yet(_, context)
            return
        await context.send_initial_metadata(((LOG_KEY, engine.log),))
        connection = engine.connect(context.peer(), PERMISSIONS.get())
        if len(engine.connections) > self._max_clients:
            text = f"{self._max_clients} clients are connected, the maximum of service.max_clients: connect again later"
            connection.close(engine.quotas.count(LimitExceeded(text, "service.max_clients")))
        reading = asyncio.ensure_future(_read(context, connection, client_frame_parts))
        try:
            await _write(context, connection, encode_server_frame, engine.check_answer)
            # A stream that ends while the client writes to it would fail there instead of ending.
            await asyncio.wait([reading], timeout=LAST_WORDS)
        finally:
            reading.cancel()
            connection.lost()

    async def _stream(self, _: Any, context: Any) -> None:
        engine = self._engine
        if engine is None:
            await self._not_yet(_, context)
            return
        await context.send_initial_metadata(((LOG_KEY, engine.log),))
        connection = engine.streams.connect(context.peer(), PERMISSIONS.get())
        reading = asyncio.ensure_future(
            _read(context, connection, lambda data: iter((decode_stream_client_frame(data),)))
        )
        writing = asyncio.ensure_future(_write(context, connection, encode_stream_server_frame, engine.check_answer))
        ended = asyncio.ensure_future(connection.ended.wait())
        try:
            await asyncio.wait([writing, ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([writing], timeout=LAST_WORDS)
            await asyncio.wait([reading], timeout=LAST_WORDS)  # as above
        finally:
            for task in (reading, writing, ended):
                task.cancel()
            connection.lost()
            await asyncio.gather(reading, writing, ended, return_exceptions=True)

    def _answering(self, name: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def answer(request: bytes, context: Any) -> bytes:
            try:
                found = await self.admin.answer(name, decode_admin_request(request), PERMISSIONS.get())
                return serialize(AdminAnswer(json=json.dumps(found)))
            except Error as error:
                await end_call(context, error)
                raise

        return answer


async def _read(
    context: Any, connection: SessionConnection | StreamConnection, parts: Callable[[bytes], Iterator[Any]]
) -> None:
    """Pass the frames of a client, in parts, to its connection until the client ends its side."""
    import grpc

    timeout: float | None = FIRST_FRAME
    while True:
        await connection.room()
        try:
            async with asyncio.timeout(timeout):
                data = await context.read()
        except TimeoutError:
            connection.close(InvalidRequest(f"the client sent nothing for {timeout:g} s: begin with a hello"))
            return
        timeout = None
        if data is grpc.aio.EOF:
            connection.lost()
            return
        try:
            for part in parts(data):
                await connection.room()
                connection.receive(part)
        except Error as error:
            connection.close(error)


async def _write(
    context: Any,
    connection: SessionConnection | StreamConnection,
    encode: Callable[[Any], bytes],
    gate: Callable[[], None],
) -> None:
    """Send the frames of a connection until it has ended; end the call if the gate raises an error."""
    while (frame := await connection.next()) is not None:
        data = encode(frame)
        try:
            gate()
        except Error as error:
            await end_call(context, error)
            return
        await context.write(data)


def _options(limits: Limits) -> list[tuple[str, int]]:
    # The largest frame of a client, and its contents other than records.
    longest = max(FRAME_BYTES, limits.client_bytes) + max(SEND_BYTES, limits.max_message_bytes) + MIB
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", longest),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # for all other pings; keepalive waits for their answers too
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", PING_STRIKES),
        ("grpc.max_concurrent_streams", CALLS_OF_CONNECTION),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
    ]


def check_listening(address: str, *, tls: bool, authenticated: bool, insecure: bool) -> None:
    """Raises InvalidConfiguration for an invalid address, and for one that other machines reach without protection."""
    host, port = split_address(address)
    if not host or port_of(port) is None:
        raise InvalidConfiguration(f"{shown_address(address)!r} is not an address to listen at: write HOST:PORT")
    if not insecure and not is_loopback(host) and not (tls and authenticated):
        missing = [] if tls else ["TLS (--tls-cert and --tls-key)"]
        missing += [] if authenticated else ["authentication (the settings of [access])"]
        raise InvalidConfiguration(
            f"listening at {address} without protection would let anyone read and write: configure "
            f"{' and '.join(missing)}, listen at 127.0.0.1, or give --insecure"
        )
