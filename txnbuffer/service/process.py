"""The service process: open the log, listen, stand by, take over, serve until a signal or a failure, drain, stop.

The gRPC and HTTP ports listen from the start, before there is an engine. A shutdown timer ends a process that can't end
by itself because its threads wait for a cluster that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from broker_io.environment import current
from broker_io.errors import Error, Fenced, PeerError
from broker_io.port import Broker
from broker_io.waits import long_waits, waiting
from snapshots.shards import Shard
from txnbuffer.config import Config, ServiceConfig, SnapshotConfig, TransactionConfig
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import InvalidConfiguration, LogDeleted
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.service.admin import ServiceAdmin
from txnbuffer.service.connection import Limits
from txnbuffer.service.engine import Engine, topics_class
from txnbuffer.service.grpc_server import GrpcServer, check_listening
from txnbuffer.service.http_server import HttpServer
from txnbuffer.service.takeover import PAUSE, Standby, StandbyState, check_shard, take_if_free
from txnbuffer.service.topics import Topics

ALL_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - to be recognised, not to listen at


class Listeners:
    """The gRPC and the HTTP server: both listen from `start` on and serve an engine from `serve` on."""

    def __init__(self, service: ServiceConfig, limits: Limits) -> None:
        self.engine: Engine | None = None
        self._service = service
        self._grpc = GrpcServer(limits, max_clients=service.max_clients)
        self._http = HttpServer()
        self._stopped = False

    @property
    def port(self) -> int:
        return self._grpc.port

    @property
    def http_port(self) -> int:
        return self._http.port

    async def start(self, certificate: bytes | None, key: bytes | None) -> None:
        """Start to listen. Raises EnvironmentFault if a port is not available."""
        await self._grpc.start(self._service.listen, certificate=certificate, key=key)
        if self._service.http:
            await self._http.start(self._service.http)

    def waits_for(self, what: str) -> None:
        """Set what the service waits for; answers before `serve` quote it."""
        self._grpc.waits_for = self._http.waits_for = what

    async def serve(self, engine: Engine) -> None:
        """Start to serve an engine."""
        self.engine = self._http.engine = engine
        await self._grpc.serve(engine, ServiceAdmin(engine))

    async def drain(self) -> None:
        """Make health checks fail: no new clients are served."""
        await self._grpc.drain()

    async def stop(self) -> None:
        """Send the last frames, then end; a second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self.engine is not None:
            self.engine.streams.close()
            for connection in self.engine.connections:
                connection.close()
        await self._grpc.stop()
        await self._http.stop()


def advertised(service: ServiceConfig, port: int) -> str:
    """HOST:PORT for clients: the configured one, or the listening address with this host's name for all interfaces."""
    host, _, wanted = (service.advertise or service.listen).rpartition(":")
    if not service.advertise and host.strip("[]") in ALL_HOSTS:
        host = current().network.host_name()
    return f"{host}:{port if wanted == '0' or not service.advertise else wanted}"


T = TypeVar("T")


class Shutdown:
    """Calls `force_exit`, in a thread, if a shutdown has not finished within `seconds`."""

    def __init__(self, seconds: float, force_exit: Callable[[], None]) -> None:
        self._force_exit = force_exit
        self._threads = current().threads
        self._timer = self._threads.timer(seconds, force_exit)
        self._begun = False

    def begin(self) -> None:
        """Start the timer; a second call does nothing."""
        if not self._begun:
            self._begun = True
            self._timer.start()

    def hurry(self, seconds: float) -> None:
        """Restart the timer with fewer seconds: nothing that the process waits for can arrive."""
        self._timer.cancel()
        self._timer = self._threads.timer(seconds, self._force_exit)
        self._begun = True
        self._timer.start()

    def done(self) -> None:
        """Stop the timer: the process has ended by itself."""
        self._timer.cancel()


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function that may block for long in a daemon thread, which does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    current().threads.thread(run, daemon=True).start()
    return asyncio.wrap_future(future)


Log = Callable[..., Any]
"""`log(event, **facts)` writes one line."""
NO_ANSWER = "no answer yet"
HURRY = 2.0
"""Seconds within which a service ends whose log was deleted: pending writes must not reach a new log of its name."""


def check(config: Config, *, cluster_mode: bool = False) -> None:
    """Raises InvalidConfiguration for an invalid configuration."""
    service = config.service
    if service.standby and not cluster_mode:
        raise InvalidConfiguration("--standby requires a cluster: any other log can be opened by one process only")
    if service.fence and not cluster_mode:
        raise InvalidConfiguration("--fence requires a cluster: stop the process that has this log open")
    if service.fence and service.standby:
        raise InvalidConfiguration("--standby and --fence exclude each other: give one of them")
    mode = topics_class(cluster_mode=cluster_mode)
    check_shard(_shard(service), mode.max_shards)
    if service.advertise:
        check_listening(service.advertise, tls=True, insecure=True)
    if bool(service.tls_cert) != bool(service.tls_key):
        raise InvalidConfiguration("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    if service.tls_cert:
        _check_pem(service.tls_cert, service.tls_key)
    check_listening(service.listen, tls=bool(service.tls_cert), insecure=service.insecure)
    if service.http:
        check_listening(service.http, tls=False, insecure=service.insecure)
    coordinator_config(config.transactions, mode, service.shards)


def _shard(service: ServiceConfig) -> Shard:
    """The shard to serve. With several it must be configured, or the owner of another one might be fenced."""
    return Shard(0 if service.shard == -1 and service.shards == 1 else service.shard, service.shards)


def _check_pem(certificate: str, key: str) -> None:
    """Raises InvalidConfiguration, naming the file, for an unusable certificate or key."""
    for path in (certificate, key):
        _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cafile=certificate)
    except ssl.SSLError as error:
        raise InvalidConfiguration(f"{certificate} is not a PEM certificate ({error.reason})") from None
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=b"")
    except ssl.SSLError as error:
        raise InvalidConfiguration(
            f"{key} is not an unencrypted PEM private key of certificate {certificate} ({error.reason})"
        ) from None


def coordinator_config(config: TransactionConfig, mode: type[Topics], shards: int = 1) -> CoordinatorConfig:
    """The coordinator's configuration: the default of the mode, with what is configured."""
    return replace(
        mode.config,
        verify_counts=mode.config.verify_counts or config.verify_counts,
        transaction_timeout=config.timeout,
        max_transaction_timeout=config.max_timeout,
        session_timeout=config.session_timeout,
        lease_timeout=max(config.max_timeout, CoordinatorConfig().lease_timeout),
        remember=config.remember,
        max_open_session=config.max_open_session,
        max_open=config.max_open,
        shards=shards,
    )


def snapshot_policy(config: SnapshotConfig) -> SnapshotPolicy:
    return SnapshotPolicy(config.changes, config.interval_ms, config.recovery_target)


def limits(config: Config) -> Limits:
    service = config.service
    return Limits(
        client_bytes=service.client_bytes,
        total_bytes=service.total_bytes,
        max_message_bytes=config.log.max_message_bytes,
        create_topics=service.create_topics,
    )


async def serve(
    open_broker: Callable[[], Broker],
    config: Config,
    owner: str,
    log: Log,
    *,
    cluster_mode: bool = False,
    shutdown: Shutdown | None = None,
) -> Error | None:
    """Serve until a signal (None) or a failure (its error). Raises the error that prevents the start.

    `shutdown` is started when the service begins to end.
    """
    check(config, cluster_mode=cluster_mode)
    certificate, key = _read(config.service.tls_cert), _read(config.service.tls_key)
    signals = Signals(shutdown)
    if not config.service.standby:
        log("recovering")
    monotonic = current().clock.monotonic
    started = monotonic()
    listeners = Listeners(config.service, limits(config))
    reporting = asyncio.ensure_future(
        _report_problems(lambda: {wait.what: wait.reason or NO_ANSWER for wait in long_waits()}, log)
    )
    broker: Broker | None = None
    try:
        await listeners.start(certificate, key)
        broker = await _open(open_broker, signals, for_ever=config.service.standby)
        if broker is None:
            return None
        engine: Engine | None = None
        while engine is None:
            standby_state: StandbyState | None = None
            try:
                if config.service.standby:
                    standby_state = await _stand_by(broker, _shard(config.service), listeners, signals, log)
                    started = monotonic()
                    if standby_state is None:
                        return None
                elif cluster_mode and not config.service.fence:
                    standby_state = await asyncio.to_thread(take_if_free, broker, _shard(config.service))
                engine = await _take_over(broker, listeners, config, owner, standby_state, cluster_mode=cluster_mode)
            except PeerError as error:
                # A cluster without storage gives the log to each process that opens it, again and again.
                if not config.service.standby or not (error.retryable or isinstance(error, Fenced)):
                    raise
                log("problem", what="taking over", error=str(error))
                await asyncio.sleep(PAUSE)
        return await _run_engine(engine, listeners, config, signals, log, started)
    finally:
        if shutdown is not None:
            shutdown.begin()
        await listeners.stop()
        if broker is not None:
            await asyncio.to_thread(broker.close)
        reporting.cancel()
        log("stopped")


async def _open(open_broker: Callable[[], Broker], signals: Signals, *, for_ever: bool) -> Broker | None:
    """Open the broker; None after a signal. `for_ever`: retry temporary errors without a limit."""
    with waiting("the log to be opened") as wait:
        while not signals.first.is_set():
            opening = in_thread(open_broker)
            await _wait_for_either(signals.first, opening)
            if not opening.done():
                return None
            try:
                return opening.result()
            except Error as error:
                if not for_ever or not error.retryable:
                    raise
                wait.failed(error)
    return None


async def _stand_by(
    broker: Broker, shard: Shard, listeners: Listeners, signals: Signals, log: Log
) -> StandbyState | None:
    listeners.waits_for("standing by: another service serves")
    log("standing by", port=listeners.port, http=listeners.http_port)
    standby = Standby(broker, shard)
    reporting = asyncio.ensure_future(_report_problems(lambda: {"standby": standby.problem}, log))
    try:
        standby_state = await standby.wait(signals.first)
    finally:
        reporting.cancel()
    if standby_state is not None:
        listeners.waits_for("the predecessor's transactions are being taken over")
        log("recovering")
    return standby_state


async def _take_over(
    broker: Broker,
    listeners: Listeners,
    config: Config,
    owner: str,
    standby_state: StandbyState | None,
    *,
    cluster_mode: bool,
) -> Engine:
    return await Engine.start(
        broker,
        owner=owner,
        address=advertised(config.service, listeners.port),
        shard=_shard(config.service),
        cluster_mode=cluster_mode,
        standby_state=standby_state,
        config=coordinator_config(config.transactions, topics_class(cluster_mode=cluster_mode), config.service.shards),
        limits=limits(config),
        policy=snapshot_policy(config.snapshots),
        retention=config.retention,
        streams=config.streams,
    )


async def _run_engine(
    engine: Engine, listeners: Listeners, config: Config, signals: Signals, log: Log, started: float
) -> Error | None:
    try:
        _report_recovery(engine, log, current().clock.monotonic() - started)
        await listeners.serve(engine)
        log(
            "serving",
            address=f"txnbuf://{advertised(config.service, listeners.port)}",
            port=listeners.port,
            http=listeners.http_port,
        )
        engine.run(_watch_problems(engine, log))
        await _wait_for_either(signals.first, engine.ended)
        if engine.ended.done():
            error = engine.ended.result()
            log("failed", error=str(error), kind=type(error).__name__)
            signals.ends(hurry=isinstance(error, LogDeleted))
            return error
        seconds = config.service.drain_seconds
        log("draining", seconds=seconds, open=sum(1 for _ in engine.coordinator.transactions()))
        await listeners.drain()
        await engine.drain(seconds)
        return None
    finally:
        await listeners.stop()
        await engine.stop()


async def _wait_for_either(event: asyncio.Event, future: asyncio.Future[Any]) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting, future], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class Signals:
    """The first SIGTERM or SIGINT sets `first`; a second one ends the process at once."""

    def __init__(self, shutdown: Shutdown | None) -> None:
        self.first = asyncio.Event()
        self._shutdown = shutdown
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
                loop.add_signal_handler(number, self._received, number)

    def _received(self, number: int) -> None:
        if self.first.is_set():
            os._exit(128 + number)
        self.first.set()
        self.ends()

    def ends(self, *, hurry: bool = False) -> None:
        """Start the shutdown timer; `hurry`: nothing that the process waits for will arrive."""
        if self._shutdown is not None and hurry:
            self._shutdown.hurry(HURRY)
        elif self._shutdown is not None:
            self._shutdown.begin()


def _report_recovery(engine: Engine, log: Log, seconds: float) -> None:
    log(
        "took over",
        epoch=engine.coordinator.epoch,
        topics=len(engine.topics.by_name),
        seconds=round(seconds, 3),
    )
    for note in engine.notes:
        log("note", text=note)
    for topic in engine.topics.by_name.values():
        if topic.stopped:
            log("topic stopped", topic=topic.name, error=str(topic.problem))


async def _watch_problems(engine: Engine, log: Log) -> None:
    """Log problems that end nothing, each once."""

    def found() -> dict[str, Error | None]:
        problems = {f"topic {name}": topic.obstacle for name, topic in engine.topics.by_name.items()}
        problems |= engine.effects.remote_problems()
        problems |= {f"topic {name}": error for name, error in engine.verification.damages.items()}
        problems |= {f"policies of {name}": danger for name, danger in engine.policy_checks.dangers.items()}
        return problems | {"snapshots": engine.snapshots.problem, "retention": engine.retention.problem}

    damaged = 0
    reporting = asyncio.ensure_future(_report_problems(found, log))
    try:
        while True:
            await asyncio.sleep(1.0)
            if engine.effects.damaged > damaged:
                damaged = engine.effects.damaged
                log(
                    "damage",
                    commits=damaged,
                    text="commits whose number of records differs from the declared one: run `txnbuf verify`",
                )
    finally:
        reporting.cancel()


async def _report_problems(find: Callable[[], Mapping[str, Error | str | None]], log: Log) -> None:
    """Log problems when they appear and when they change, forever."""
    reported: dict[str, str] = {}
    while True:
        await asyncio.sleep(1.0)
        found = {what: str(problem) for what, problem in find().items() if problem is not None}
        for what, text in found.items():
            if reported.get(what) != text:
                log("problem", what=what, error=text)
        reported = found


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return current().disk.read(path)
    except OSError as error:
        raise InvalidConfiguration(f"can't read {path}: {error.strerror}") from error
