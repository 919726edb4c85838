"""Opens clients from addresses, with the connections to their services; `client.session` reconnects them

`connect` accepts the address of an embedded log (`memory:`, `file:DIR`), of a service (`txnbuf://HOST:PORT`) or of a
Pulsar cluster. On a cluster the client writes records to Pulsar itself, and all other requests go to the service of the
shard. Sessions, change streams and requests of operators have connections of their own, each kind to an engine on the
same event loop or over gRPC.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from broker_io import PulsarOptions, check_address, is_cluster, open_broker
from broker_io.addresses import is_target, shown_address
from broker_io.environment import current
from broker_io.errors import InvalidAddress, ReadOnly
from broker_io.port import Broker, PartitionedBroker
from broker_io.rpc.channel import SERVICE_SCHEME, Channel, Endpoint, LogIdentity, MessageStream, service_targets
from broker_io.rpc.credentials import ClientCredentials
from broker_io.rpc.log_pb2 import LogLimits, TopicRequest
from snapshots.shard_count import shards_of
from snapshots.shards import Shard
from txnbuffer.checks import check_flag, check_max_unavailable
from txnbuffer.client import lifecycle
from txnbuffer.client.admin_clients import AdminClients, AdminConnector, AdminLink
from txnbuffer.client.client import Client
from txnbuffer.client.database_transaction import DatabaseLinks
from txnbuffer.client.lifecycle import opened, run_to_completion
from txnbuffer.client.path.routing import Routes
from txnbuffer.client.path.send_columns import BATCHINGS, Batching
from txnbuffer.client.path.writers import DirectPath, OrdinarySends, Writers
from txnbuffer.client.serializers import Deserializers, Schema, Serializers
from txnbuffer.client.session.embedded import EmbeddedLog, EngineAdminLink, EngineLink, EngineStreamLink
from txnbuffer.client.session.session import ClientSession, Connector, Link, LinkUser, ShardSessions
from txnbuffer.client.streams.streams import ShardStreams, StreamConnector, StreamLink
from txnbuffer.coordinator.decisions import TOPIC as DECISIONS
from txnbuffer.errors import Error, InvalidRequest, ServiceUnavailable
from txnbuffer.progress import OnProgress, reporting
from txnbuffer.rpc.admin_encoding import ADMIN_PATH, decode_admin_answer, encode_admin_request
from txnbuffer.rpc.discovery import ServiceDiscovery, log_identity_of
from txnbuffer.rpc.frames import ClientFrame, ServerFrame
from txnbuffer.rpc.service_access import ServiceAccess, broker_options_of
from txnbuffer.rpc.session_encoding import SESSION
from txnbuffer.rpc.streams_encoding import STREAMS

if TYPE_CHECKING:
    from txnbuffer.client.sync.sync_client import SyncClient
    from txnbuffer.service.engine.engine import Engine


TIMEOUT = 30.0
"""Seconds to wait for the answer to an admin request."""


class ServiceLink:
    """A session connection over gRPC."""

    def __init__(self, stream: MessageStream[ClientFrame, ServerFrame]) -> None:
        self._stream = stream
        self._user: LinkUser
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, user: LinkUser) -> None:
        self._user = user
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def wake(self) -> None:
        self._woken.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.remove_done_callback(self._ended)
        await lifecycle.cancel(*self._tasks)
        await self._stream.close()

    async def _read(self) -> None:
        while (frame := await self._stream.receive()) is not None:
            self._user.receive(frame)

    async def _write(self) -> None:
        while True:
            while (frame := self._user.take_frame()) is not None:
                await self._send(frame)
                if frame.bye:
                    await self._stream.end()
                    return
            await self._woken.wait()
            self._woken.clear()
            await asyncio.sleep(0)  # other requests of this iteration of the event loop go into the same frame

    async def _send(self, frame: ClientFrame) -> None:
        """Send a frame. If it cannot be encoded, fail only the requests that cannot, and send the others."""
        try:
            await self._stream.send(frame)
        except Error:
            raise
        except Exception:
            for field, row, part in frame.split():
                try:
                    await self._stream.send(part)
                except Error:
                    raise
                except Exception as error:
                    self._user.reject(field, row, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report the end of the connection; the reader reports that it is lost."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if task is self._tasks[0] or not (error is None or isinstance(error, Error)):
            self._user.ended(error)


class GrpcAdminLink:
    """Admin requests over gRPC."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def ask(self, method: str, arguments: dict[str, Any]) -> Any:
        request = encode_admin_request(arguments)
        return await self._channel.ask(f"{ADMIN_PATH}/{method}", request, decode_admin_answer, TIMEOUT)

    async def close(self) -> None:
        await self._channel.close()


LOG_HELLO = "/txnbuffer.v1.Log/Hello"
"""A request that only a live member of a pair answers."""


async def open_session(address: Endpoint, timeout: float, log: LogIdentity) -> Link:
    """Connect a session within `timeout` seconds. Raises ServiceUnavailable, VersionMismatch, UsedAfterFork."""
    return ServiceLink(await MessageStream.open(SESSION, address, timeout, log))


async def open_streams(address: Endpoint, timeout: float, log: LogIdentity) -> StreamLink:
    """Connect change streams. Raises as `open_session`."""
    return await MessageStream.open(STREAMS, address, timeout, log)


async def open_admin(address: Endpoint, timeout: float, log: LogIdentity) -> AdminLink:
    """Connect for admin requests. Raises as `open_session`."""
    return GrpcAdminLink(await Channel.open(address, timeout, log))


async def open_live_admin(address: Endpoint, timeout: float, log: LogIdentity) -> AdminLink:
    """Connect for admin requests to a member of a pair. Raises as `open_session`, also if it is not live."""
    channel = await Channel.open(address, timeout, log)
    try:
        await channel.ask(LOG_HELLO, TopicRequest(), LogLimits.FromString, timeout)
    except BaseException:
        await channel.close()
        raise
    return GrpcAdminLink(channel)


L = TypeVar("L", bound=lifecycle.Connection)
AddressConnector: TypeAlias = Callable[[str], Awaitable[L]]
"""Opens a connection to HOST:PORT. Raises ServiceUnavailable."""


NEXT_ADDRESS = 0.5
"""Seconds without any answer after which the next address is tried, or one that refused is tried again."""


class LiveService:
    """The live one of some services. All connections of a client share it, and so begin with the one that accepted.

    A standby refuses at once, and a machine that is away does not answer. So the addresses are tried side by side, and
    those that refuse are tried again while another one may still answer.
    """

    def __init__(self, addresses: Sequence[Endpoint]) -> None:
        self._addresses = [*addresses]

    async def connect(self, opening: Callable[[Endpoint], Awaitable[L]]) -> L:
        """Connect to the first service that accepts.

        Raises ServiceUnavailable with the errors of all addresses if none does; the error if none can be retried.
        """
        if len(self._addresses) == 1:
            return await opening(self._addresses[0])
        untried = [*self._addresses]
        attempts: dict[asyncio.Future[L], Endpoint] = {}
        failed: dict[Endpoint, Error] = {}
        try:
            while True:
                if untried:
                    address = untried.pop(0)
                    attempts[asyncio.ensure_future(opening(address))] = address
                done, _ = await asyncio.wait(attempts, timeout=NEXT_ADDRESS, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if (error := one.exception()) is None:
                        self._prefer(attempts.pop(one))
                        return one.result()
                    if not isinstance(error, Error):
                        raise error
                    failed[attempts.pop(one)] = error
                if not (untried or attempts):
                    raise _joined([failed[address] for address in self._addresses])
                if not (untried or done):
                    untried = [address for address in failed if address not in attempts.values()]
        finally:
            for one in attempts:
                await lifecycle.abandon(one)

    def _prefer(self, address: Endpoint) -> None:
        self._addresses.sort(key=lambda one: one != address)


def _joined(errors: Sequence[Error]) -> Error:
    """One error for those of all addresses."""
    if all(not error.retryable for error in errors):
        return errors[0]
    return ServiceUnavailable("; ".join(map(str, errors)))


class ServiceConnectors(NamedTuple):
    """How to connect to the service of one shard, for each kind of connection."""

    session: Connector
    streams: StreamConnector
    admin: AdminConnector

    @classmethod
    def to_embedded(cls, log: EmbeddedLog) -> ServiceConnectors:
        """Return the connectors to the engine of a log in this process, which ends with its clients."""

        def connector(kind: Callable[[Engine], L]) -> Callable[[], Awaitable[L]]:
            async def connect() -> L:
                try:
                    return kind(await log.engine())
                except Error as error:
                    if error.retryable:
                        raise ServiceUnavailable(f"the log can't be written yet: {error}") from error
                    raise

            return connect

        session = partial(EngineLink, local=True)
        return cls(connector(session), connector(EngineStreamLink), connector(EngineAdminLink))

    @classmethod
    def to_addresses(cls, addresses: Sequence[Endpoint], timeout: float, log: LogIdentity) -> ServiceConnectors:
        """Return the connectors to a service at a fixed address; to the live one of a pair if there are several."""
        live = LiveService(addresses)

        def connector(kind: Callable[[Endpoint, float, LogIdentity], Awaitable[L]]) -> Callable[[], Awaitable[L]]:
            return partial(live.connect, lambda address: kind(address, timeout, log))

        admin = open_admin if len(addresses) == 1 else open_live_admin
        return cls(connector(open_session), connector(open_streams), connector(admin))


async def client_on(
    broker: Broker,
    connectors: Sequence[Connector],
    serializers: Serializers,
    max_unavailable: float,
    resources: AsyncExitStack,
) -> Client:
    """Return a client that writes to `broker` directly, and reaches the service of each shard through its connector.

    Closing the client closes `resources`.
    """
    writers = Writers(broker, max_unavailable)
    resources.push_async_callback(writers.close, ServiceUnavailable("the client was closed"))

    def session_of(number: int) -> ClientSession:
        path = partial(DirectPath, writers, broker.max_message_bytes)
        session = ClientSession(connectors[number], max_unavailable, path=path, shard=Shard(number, len(connectors)))
        session.begin()
        return session

    home = current().randomness.below(len(connectors))  # spreads clients over the shards
    session = session_of(home)
    client = Client(session, lambda: broker, serializers, OrdinarySends(writers, broker))
    client.serializers.use(broker)
    client.sessions = ShardSessions(session, home, len(connectors), session_of)
    if isinstance(broker, PartitionedBroker):
        client.routes = Routes(broker)
    return client


OWNER_CHECK_INTERVAL = 0.5
"""Seconds between checks for a new owner while the known one does not answer."""


async def connect_to_owner(discovery: ServiceDiscovery, connector: AddressConnector[L]) -> L:
    """Connect to the owner of the namespace; while it does not answer, check for a new owner and connect to that."""
    try:
        return await _connect_newest(discovery, connector)
    except Error:
        raise
    except Exception as error:  # anything else would end the session's reconnect loop
        raise ServiceUnavailable(f"cannot look up the address of the service: {error!r}") from error


async def _connect_newest(discovery: ServiceDiscovery, connector: AddressConnector[L]) -> L:
    annotated = await asyncio.to_thread(discovery.property_address)
    address = await asyncio.to_thread(discovery.newest_address) if annotated is None else annotated
    connecting = asyncio.ensure_future(connector(address))
    try:
        while True:
            await asyncio.wait([connecting], timeout=OWNER_CHECK_INTERVAL)
            if connecting.done() and connecting.exception() is None:
                return connecting.result()
            if (newer := await asyncio.to_thread(discovery.newest_address)) != address:
                await lifecycle.abandon(connecting)
                address = newer
                connecting = asyncio.ensure_future(connector(address))
            elif connecting.done():
                return connecting.result()
    except BaseException:
        await lifecycle.abandon(connecting)
        raise


MIN_ATTEMPT_SECONDS = 2.0
"""Minimum seconds for one attempt to reach a service, even if `max_unavailable` is shorter."""


ADMIN_VARIABLE = "TXNBUFFER_PULSAR_ADMIN_URL"
"""The variable of the setting `pulsar.admin_url`, which commands read too."""


class ClusterOptions(NamedTuple):
    """Arguments of `connect` that only a cluster accepts.

    `service` is HOST:PORT, or None to find it through the cluster; `broker` holds the options of `open_broker`.
    """

    service: str | None
    broker: Mapping[str, Any]

    @classmethod
    def of(
        cls, service: str | None, broker_options: PulsarOptions | None, schemas: Mapping[str, Schema] | None
    ) -> ClusterOptions:
        """Raises InvalidRequest."""
        if not isinstance(broker_options, (Mapping, NoneType)):
            raise InvalidRequest(f"broker_options must be a mapping, got {type(broker_options).__name__}")
        return cls(service, {**(broker_options or {}), **({"schemas": schemas} if schemas else {})})

    def at(self, address: str) -> ClusterOptions:
        """For a cluster, with the admin interface that the environment names, if none was given."""
        admin_url = os.environ.get(ADMIN_VARIABLE)
        if not admin_url or not isinstance(address, str) or not is_cluster(address):
            return self
        return self._replace(broker={"admin_url": admin_url, **self.broker})


NO_CLUSTER = ClusterOptions(None, {})
NOT_A_CLUSTER = "{!r} is not a cluster: give service, broker_options and schemas only for pulsar://…"
HOW_TO_OPEN = (
    "use `with connect(…) as client:`, or in asyncio code `async with connect(…) as client:`. Without a block, use "
    "`client = connect(…).open_sync()` or `client = await connect(…)`, and close the client"
)


@dataclass(repr=False)
class PendingConnection:
    """The result of `connect`: `async with` or `await` opens a Client, `with` opens a SyncClient.

    Any other use raises InvalidRequest, which says so.
    """

    address: str
    serializers: Serializers
    timeout: float
    max_unavailable: float
    access: ServiceAccess
    cluster: ClusterOptions
    batching: Batching = "messages"
    deserializers: Deserializers = field(default_factory=Deserializers)
    read_only: bool = False
    progress: OnProgress | None = None
    open_databases: Callable[[Client], DatabaseLinks] | None = None
    _client: Client | None = field(default=None, init=False)
    _sync_client: SyncClient | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidAddress and InvalidRequest."""
        check_address(self.address)
        if self.address.startswith(SERVICE_SCHEME):
            service_targets(self.address.rstrip("/"))
        self.timeout = check_max_unavailable(self.timeout, "timeout")
        self.max_unavailable = check_max_unavailable(self.max_unavailable, "max_unavailable")
        if self.batching not in BATCHINGS:
            raise InvalidRequest(f"batching must be 'messages' or 'records', got {self.batching!r}")
        check_flag(self.read_only, "read_only")
        if self.progress is not None and not callable(self.progress):
            raise InvalidRequest(f"progress must be a function, got {type(self.progress).__name__}")
        self.access.check()

    def __repr__(self) -> str:
        return f"<connect({self.address!r}), not opened: {HOW_TO_OPEN}>"

    if not TYPE_CHECKING:  # so that type checkers report methods that this class does not have

        def __getattr__(self, name: str) -> Any:
            """Raises InvalidRequest for the names of clients, AttributeError for all others."""
            from txnbuffer.client.sync.sync_client import SyncClient

            if not name.startswith("_") and (hasattr(Client, name) or hasattr(SyncClient, name)):
                raise InvalidRequest(f"connect({self.address!r}) is not open, so it has no {name!r} yet: {HOW_TO_OPEN}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def open(self) -> Client:
        """Open a Client. Raises InvalidAddress, ServiceUnavailable, and the errors of opening a log or a cluster.

        If the caller is cancelled while a log opens in this process, the log is closed before the exception is raised.
        """
        with reporting(self.progress):
            return await self._open()

    async def _open(self) -> Client:
        async with AsyncExitStack() as resources:
            connectors: list[ServiceConnectors] = []
            if self.read_only:
                client = await self._open_read_only(resources)
            elif is_cluster(self.address):
                client, connectors = await self._open_cluster(resources)
            elif self.cluster != NO_CLUSTER:
                raise InvalidRequest(NOT_A_CLUSTER.format(self.address))
            elif self.address.startswith(SERVICE_SCHEME):
                client, connectors = await self._open_remote(resources)
            else:
                client, connectors = await self._open_local(resources)
            client.address = self.address
            if not self.read_only:
                client.streams = ShardStreams([shard.streams for shard in connectors], self.max_unavailable)
                admins = [shard.admin for shard in connectors]
                client.admin = AdminClients(admins, self.max_unavailable, client.session.check_loop)
            client.batching = self.batching
            client.deserializers = self.deserializers
            if self.open_databases is not None:
                client.databases = self.open_databases(client)
            client.resources = resources.pop_all()
        return client

    def open_sync(self) -> SyncClient:
        """Open a SyncClient, which runs its calls on a background thread."""
        from txnbuffer.client.sync.sync_client import SyncClient

        embedded = not is_cluster(self.address) and not self.address.startswith(SERVICE_SCHEME)
        return SyncClient.open(self.open, embedded=embedded)

    async def _open_read_only(self, resources: AsyncExitStack) -> Client:
        """A client with a broker that is only read, and without a session."""
        if self.cluster.service is not None:
            raise InvalidRequest("a read-only client uses no service: omit service=")
        options: dict[str, Any] = {}
        if is_cluster(self.address):
            options = self._cluster_options
        elif self.cluster != NO_CLUSTER:
            raise InvalidRequest(NOT_A_CLUSTER.format(self.address))
        elif self.address.startswith(SERVICE_SCHEME):
            options = {"max_unavailable": self.max_unavailable, **broker_options_of(await self._credentials())}
        elif self.address.startswith("file:"):
            options = {"read_only": True}
        broker = await self._open_broker(resources, options)
        refusal = ReadOnly(
            f"this client of {self.address} is read-only, and can only read topics and list them: connect without "
            "read_only=True"
        )
        session = ClientSession.refusing(refusal)
        client = Client(session, lambda: broker, self.serializers)
        client.refusal = refusal
        return client

    async def _open_broker(self, resources: AsyncExitStack, options: Mapping[str, Any]) -> Broker:
        thread = current().threads.executor(1, "txnbuffer-opening")
        try:
            broker = await opened(thread, partial(open_broker, self.address, **options))
        finally:
            thread.shutdown(wait=False)
        resources.push_async_callback(asyncio.to_thread, broker.close)
        return broker

    @property
    def _cluster_options(self) -> dict[str, Any]:
        return {"close_timeout": 0.0, "max_unavailable": self.max_unavailable, **self.cluster.broker}

    async def _open_cluster(self, resources: AsyncExitStack) -> tuple[Client, list[ServiceConnectors]]:
        service = self.cluster.service
        if service is not None and not is_target(service):
            raise InvalidAddress(f"service must be HOST:PORT, got {shown_address(service)!r}")
        trusted = await self._credentials(self.cluster.broker)
        broker = await self._open_broker(resources, self._cluster_options)
        shards = await asyncio.to_thread(shards_of, broker)
        if service is not None and shards > 1:
            raise InvalidRequest(f"{self.address!r} has {shards} shards, each with its own service: omit service=")
        connectors = [self._of_shard(broker, Shard(number, shards), trusted) for number in range(shards)]
        sessions = [shard.session for shard in connectors]
        client = await client_on(broker, sessions, self.serializers, self.max_unavailable, resources)
        return client, connectors

    def _of_shard(self, broker: Broker, shard: Shard, trusted: ClientCredentials) -> ServiceConnectors:
        service, decisions = self.cluster.service, shard.topic(DECISIONS)
        log = log_identity_of(broker, self.address, decisions)
        if service is not None:
            return ServiceConnectors.to_addresses([Endpoint(service, trusted)], self._attempt, log)

        def connector(opening: Callable[[Endpoint, float, LogIdentity], Awaitable[L]]) -> Callable[[], Awaitable[L]]:
            def connect(target: str) -> Awaitable[L]:
                return opening(Endpoint(target, trusted), self._attempt, log)

            return partial(connect_to_owner, ServiceDiscovery(broker, self.address, decisions), connect)

        return ServiceConnectors(connector(open_session), connector(open_streams), connector(open_admin))

    @property
    def _attempt(self) -> float:
        """Seconds for one attempt to reach a service."""
        return min(self.timeout, max(self.max_unavailable, MIN_ATTEMPT_SECONDS))

    async def _credentials(self, cluster: Mapping[str, Any] | None = None) -> ClientCredentials:
        """Those for the service: the given ones, or the token for the cluster if it is encrypted."""
        if not self.access.has_files:
            return self.access.load(cluster)
        return await asyncio.to_thread(self.access.load, cluster)

    async def _open_remote(self, resources: AsyncExitStack) -> tuple[Client, list[ServiceConnectors]]:
        targets = service_targets(self.address.rstrip("/"))
        trusted, log = await self._credentials(), LogIdentity()
        brokers: list[Broker] = []

        def broker() -> Broker:
            if not brokers:
                options = {"max_unavailable": self.max_unavailable, "log_identity": log, **broker_options_of(trusted)}
                brokers.append(open_broker(f"{SERVICE_SCHEME}{','.join(targets)}", **options))
            return brokers[0]

        async def close_broker() -> None:
            for one in brokers:
                await asyncio.to_thread(one.close)

        addresses = Endpoint.each(targets, trusted)
        connectors = ServiceConnectors.to_addresses(addresses, self._attempt, log)
        client = await self._client_of(connectors.session, broker)
        resources.push_async_callback(close_broker)
        return client, [connectors]

    async def _open_local(self, resources: AsyncExitStack) -> tuple[Client, list[ServiceConnectors]]:
        opening = asyncio.to_thread(open_broker, self.address)
        broker = await run_to_completion(opening, lambda broker: asyncio.to_thread(broker.close))
        resources.push_async_callback(asyncio.to_thread, broker.close)
        log = await run_to_completion(EmbeddedLog.open(broker), EmbeddedLog.close)
        resources.push_async_callback(log.close)
        connectors = ServiceConnectors.to_embedded(log)
        session = ClientSession(connectors.session, self.max_unavailable)
        if log.started:
            await session.open()
        else:
            session.open_later(broker.max_message_bytes)
        client = Client(session, lambda: broker, self.serializers)
        client.ends_by = log.ends_by
        return client, [connectors]

    async def _client_of(self, connector: Connector, broker: Callable[[], Broker]) -> Client:
        session = ClientSession(connector, self.max_unavailable)
        await session.open()
        return Client(session, broker, self.serializers)

    def __await__(self) -> Generator[Any, None, Client]:
        return self.open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self.open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    def __enter__(self) -> SyncClient:
        self._sync_client = self.open_sync()
        return self._sync_client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sync_client is not None and (error is None or not self._sync_client.inherited):
            self._sync_client.close()
