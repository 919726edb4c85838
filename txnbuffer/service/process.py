"""The life of a service process: open, listen, stand by, take over, wait for a signal or a failure, drain, stop.

What the outside sees of a service process: its gRPC and HTTP ports, before there is an engine and after.

The end of a process that can't end by itself, as its threads wait for a cluster that is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from broker_io.errors import Error, Fenced, PeerError
from broker_io.port import Broker
from broker_io.waits import long_waits, waiting
from snapshots.policy import SnapshotPolicy
from snapshots.shards import Shard
from txnbuffer.config import Config, ServiceConfig, SnapshotConfig, TransactionConfig
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import InvalidConfiguration, LogDeleted
from txnbuffer.service.admin import ServiceAdmin
from txnbuffer.service.engine import Engine
from txnbuffer.service.grpc_server import GrpcServer, check_listening
from txnbuffer.service.http_server import HttpServer
from txnbuffer.service.limits import Limits
from txnbuffer.service.standby import PAUSE, Standby, take_if_free
from txnbuffer.service.takeover import StandbyState, check_shard

ALL_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - to be recognised, not to listen at


class Listeners:
    """Listens from `start` on and serves from `serve` on. `port` and `http_port` are those it listens to."""

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
        """Raises EnvironmentFault if a port can't be listened to."""
        await self._grpc.start(self._service.listen, certificate=certificate, key=key)
        if self._service.http:
            await self._http.start(self._service.http)

    def waits_for(self, what: str) -> None:
        """What is told to those who come before an engine is served."""
        self._grpc.waits_for = self._http.waits_for = what

    async def serve(self, engine: Engine) -> None:
        """Let clients in."""
        self.engine = self._http.engine = engine
        await self._grpc.serve(engine, ServiceAdmin(engine))

    async def drain(self) -> None:
        """Tell health checks that nothing new is served."""
        await self._grpc.drain()

    async def stop(self) -> None:
        """Give the last frames their time, then end; nothing happens the second time."""
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
    """HOST:PORT that clients are to dial: what is configured, else where it listens, by this host's name if at all."""
    host, _, wanted = (service.advertise or service.listen).rpartition(":")
    if not service.advertise and host.strip("[]") in ALL_HOSTS:
        host = socket.gethostname()
    return f"{host}:{port if wanted == '0' or not service.advertise else wanted}"


T = TypeVar("T")


class Shutdown:
    """`leave` is called, in a thread, if the end has begun and is not there `seconds` later."""

    def __init__(self, seconds: float, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._timer = threading.Timer(seconds, leave)
        self._timer.daemon = True
        self._begun = False

    def begin(self) -> None:
        """The process is to end from now on; said again it changes nothing."""
        if not self._begun:
            self._begun = True
            self._timer.start()

    def hurry(self, seconds: float) -> None:
        """It is to end within so many seconds: nothing that it waits for can come."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._leave)
        self._timer.daemon = True
        self._begun = True
        self._timer.start()

    def done(self) -> None:
        """It has ended by itself."""
        self._timer.cancel()


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """What a function gives that may wait for long, in a thread that keeps no process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


Log = Callable[..., Any]
"""`log(event, **facts)` writes one line."""
NO_ANSWER = "there is no answer yet"
HURRY = 2.0
"""Seconds in which a service ends whose log was deleted: what it has under way would reach one that is made anew."""


def check(config: Config, *, shared: bool = False) -> None:
    """Raises InvalidConfiguration for what can't be served; `shared`: beside a cluster."""
    service = config.service
    if service.standby and not shared:
        raise InvalidConfiguration("one can stand by beside a cluster only: another log has one owner at a time")
    if service.fence and not shared:
        raise InvalidConfiguration("one can fence beside a cluster only: stop the process that has another log")
    if service.fence and service.standby:
        raise InvalidConfiguration("a standby fences nobody: say --standby or --fence")
    check_shard(_shard(service), shared=shared)
    if service.advertise:
        check_listening(service.advertise, tls=True, insecure=True)
    if bool(service.tls_cert) != bool(service.tls_key):
        raise InvalidConfiguration("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    if service.tls_cert:
        _check_pem(service.tls_cert, service.tls_key)
    check_listening(service.listen, tls=bool(service.tls_cert), insecure=service.insecure)
    if service.http:
        check_listening(service.http, tls=False, insecure=service.insecure)
    coordinator_config(config.transactions, shared=shared, shards=service.shards)


def _shard(service: ServiceConfig) -> Shard:
    """Which one to serve. With several it has to be said: its owner would be fenced by mistake."""
    return Shard(0 if service.shard == -1 and service.shards == 1 else service.shard, service.shards)


def _check_pem(certificate: str, key: str) -> None:
    """Raises InvalidConfiguration, naming the file, for a certificate and key that TLS can't work with."""
    for path in (certificate, key):
        _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cafile=certificate)
    except ssl.SSLError as error:
        raise InvalidConfiguration(f"{certificate} is no certificate in PEM ({error.reason})") from None
    try:
        # Without a password of ours OpenSSL would ask the terminal for one.
        context.load_cert_chain(certificate, key, password=b"")
    except ssl.SSLError as error:
        raise InvalidConfiguration(
            f"{key} is no private key, in PEM and without a password, of the certificate {certificate} ({error.reason})"
        ) from None


def coordinator_config(config: TransactionConfig, *, shared: bool = False, shards: int = 1) -> CoordinatorConfig:
    """Beside a cluster (`shared`) every decision stands in the fenced log, and clients are taken at their word."""
    return CoordinatorConfig(
        one_phase=not shared,
        verify_counts=not shared or config.verify_counts,
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
    shared: bool = False,
    shutdown: Shutdown | None = None,
) -> Error | None:
    """Serve until a signal ends it (None) or a failure does. Raises what stands in the way of starting.

    `shared`: the broker is a cluster, to which applications write themselves. `shutdown` is told when the end begins.
    """
    check(config, shared=shared)
    certificate, key = _read(config.service.tls_cert), _read(config.service.tls_key)
    signals = Signals(shutdown)
    if not config.service.standby:
        log("recovering")
    started = time.monotonic()
    front = Listeners(config.service, limits(config))
    telling = asyncio.ensure_future(_tell(lambda: {wait.what: wait.reason or NO_ANSWER for wait in long_waits()}, log))
    broker: Broker | None = None
    try:
        await front.start(certificate, key)
        broker = await _open(open_broker, signals, for_ever=config.service.standby)
        if broker is None:
            return None
        engine: Engine | None = None
        while engine is None:
            standby_state: StandbyState | None = None
            if config.service.standby:
                standby_state = await _stand_by(broker, _shard(config.service), front, signals, log)
                started = time.monotonic()
                if standby_state is None:
                    return None
            elif shared and not config.service.fence:
                standby_state = await asyncio.to_thread(take_if_free, broker, _shard(config.service))
            try:
                engine = await _take_over(broker, front, config, owner, standby_state, shared=shared)
            except PeerError as error:
                # A cluster that has lost its storage gives the log to whoever opens it next, again and again.
                if not config.service.standby or not (error.retryable or isinstance(error, Fenced)):
                    raise
                log("problem", what="taking over", error=str(error))
                await asyncio.sleep(PAUSE)
        return await _own(engine, front, config, signals, log, started)
    finally:
        if shutdown is not None:
            shutdown.begin()
        await front.stop()
        if broker is not None:
            await asyncio.to_thread(broker.close)
        telling.cancel()
        log("stopped")


async def _open(open_broker: Callable[[], Broker], signals: Signals, *, for_ever: bool) -> Broker | None:
    """The broker, None if a signal came first; `for_ever`: also where its cluster is away for longer than it waits."""
    with waiting("the log to be opened") as wait:
        while not signals.first.is_set():
            opening = in_thread(open_broker)
            await _either(signals.first, opening)
            if not opening.done():
                return None
            try:
                return opening.result()
            except Error as error:
                if not for_ever or not error.retryable:
                    raise
                wait.failed(error)
    return None


async def _stand_by(broker: Broker, shard: Shard, front: Listeners, signals: Signals, log: Log) -> StandbyState | None:
    front.waits_for("standing by: another service serves")
    log("standing by", port=front.port, http=front.http_port)
    standby = Standby(broker, shard)
    telling = asyncio.ensure_future(_tell(lambda: {"standby": standby.problem}, log))
    try:
        standby_state = await standby.wait(signals.first)
    finally:
        telling.cancel()
    if standby_state is not None:
        front.waits_for("the predecessor's transactions are being taken over")
        log("recovering")
    return standby_state


async def _take_over(
    broker: Broker, front: Listeners, config: Config, owner: str, standby_state: StandbyState | None, *, shared: bool
) -> Engine:
    return await Engine.start(
        broker,
        owner=owner,
        address=advertised(config.service, front.port),
        shard=_shard(config.service),
        shared=shared,
        standby_state=standby_state,
        config=coordinator_config(config.transactions, shared=shared, shards=config.service.shards),
        limits=limits(config),
        policy=snapshot_policy(config.snapshots),
        retention=config.retention,
        streams=config.streams,
    )


async def _own(
    engine: Engine, front: Listeners, config: Config, signals: Signals, log: Log, started: float
) -> Error | None:
    try:
        _tell_recovery(engine, log, time.monotonic() - started)
        await front.serve(engine)
        log(
            "serving",
            address=f"txnbuf://{advertised(config.service, front.port)}",
            port=front.port,
            http=front.http_port,
        )
        engine.run(_watch_problems(engine, log))
        await _either(signals.first, engine.ended)
        if engine.ended.done():
            error = engine.ended.result()
            log("failed", error=str(error), kind=type(error).__name__)
            signals.ends(hurry=isinstance(error, LogDeleted))
            return error
        seconds = config.service.drain_seconds
        log("draining", seconds=seconds, open=sum(1 for _ in engine.coordinator.transactions()))
        await front.drain()
        await engine.drain(seconds)
        return None
    finally:
        await front.stop()
        await engine.stop()


async def _either(event: asyncio.Event, future: asyncio.Future[Any]) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting, future], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class Signals:
    """SIGTERM or SIGINT sets `first`; another one ends the process at once."""

    def __init__(self, shutdown: Shutdown | None) -> None:
        self.first = asyncio.Event()
        self._shutdown = shutdown
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # no main thread: whoever runs us there handles signals
                loop.add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.first.is_set():
            os._exit(128 + number)
        self.first.set()
        self.ends()

    def ends(self, *, hurry: bool = False) -> None:
        """The process is about to end; `hurry`: whoever is waited for will not answer."""
        if self._shutdown is not None and hurry:
            self._shutdown.hurry(HURRY)
        elif self._shutdown is not None:
            self._shutdown.begin()


def _tell_recovery(engine: Engine, log: Log, seconds: float) -> None:
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
    """Tell of what goes wrong without ending anything, each once."""

    def found() -> dict[str, Error | None]:
        problems = {f"topic {name}": topic.obstacle for name, topic in engine.topics.by_name.items()}
        problems |= engine.effects.remote_problems()
        problems |= {f"topic {name}": error for name, error in engine.verification.damages.items()}
        problems |= {f"policies of {name}": danger for name, danger in engine.policy_checks.dangers.items()}
        return problems | {"snapshots": engine.snapshots.problem, "retention": engine.retention.problem}

    damaged = 0
    telling = asyncio.ensure_future(_tell(found, log))
    try:
        while True:
            await asyncio.sleep(1.0)
            if engine.effects.counts.damaged > damaged:
                damaged = engine.effects.counts.damaged
                log("damage", commits=damaged, text="commits with another number of records than they say: run verify")
    finally:
        telling.cancel()


async def _tell(find: Callable[[], Mapping[str, Error | str | None]], log: Log) -> None:
    """Tell of problems as they come and change, for ever."""
    told: dict[str, str] = {}
    while True:
        await asyncio.sleep(1.0)
        found = {what: str(problem) for what, problem in find().items() if problem is not None}
        for what, text in found.items():
            if told.get(what) != text:
                log("problem", what=what, error=text)
        told = found


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"can't read {path}: {error.strerror}") from error
