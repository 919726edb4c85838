"""The service process: open the log, listen, stand by, take over, serve until a signal or a failure, drain, stop.

A service of a pair is a standby again when its machine is no longer live, and one with `--standby` when it was fenced.
One of a pair makes the other one live before it stops.
The gRPC and HTTP ports listen from the start, before there is an engine. A shutdown timer ends a process that can't end
by itself because its threads wait for a cluster that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from broker_io.addresses import split_address
from broker_io.environment import current
from broker_io.errors import Error, Fenced, NotLive, PeerError
from broker_io.port import Broker
from broker_io.waits import long_waits, waiting
from snapshots.shards import Shard
from txnbuffer.access.authenticator import authenticates
from txnbuffer.access.limits import PrincipalLimits
from txnbuffer.config import Config, ServiceConfig, TransactionConfig
from txnbuffer.coordinator.messages import CoordinatorConfig
from txnbuffer.errors import InvalidConfiguration, LogDeleted
from txnbuffer.recovery.followed_topic import SnapshotPolicy
from txnbuffer.rpc.discovery import ServiceDiscovery
from txnbuffer.service.door.access import Access
from txnbuffer.service.door.connection import Limits
from txnbuffer.service.door.connection_limits import port_limits
from txnbuffer.service.door.http_guard import host_of
from txnbuffer.service.door.tls import ServerTls, WatchedTls
from txnbuffer.service.engine.engine import Engine, topics_class
from txnbuffer.service.loop import LoopErrors
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.grpc_server import GrpcServer, check_listening
from txnbuffer.service.servers.http_server import HttpServer
from txnbuffer.service.standby.replication import NOTHING_SERVED, POLL, SWITCH_DRAIN, Replication
from txnbuffer.service.standby.takeover import PAUSE, Standby, StandbyState, check_shard, take_if_free
from txnbuffer.service.standby.warm_topics import NO_LAG, WarmTopics
from txnbuffer.service.topics.scrub import Scrub
from txnbuffer.service.topics.topics import Topics

ALL_HOSTS = ("0.0.0.0", "::")  # noqa: S104 - to be recognised, not to listen at


class Listeners:
    """The gRPC and the HTTP server: both listen from `start` on and serve an engine from `serve` on."""

    def __init__(self, service: ServiceConfig, limits: Limits, replication: Replication, access: Access) -> None:
        self.engine: Engine | None = None
        descriptors = current().network.descriptors()
        of_grpc, of_http = port_limits(service.max_connections, service.max_address_connections, descriptors)
        methods = replication.methods()
        self.grpc = GrpcServer(
            limits, max_clients=service.max_clients, methods=methods, access=access, connections=of_grpc
        )
        self.http = HttpServer(replication.facts, self.grpc.admin, access, _names(service), of_http)
        self._service = service
        self._stopped = False

    async def start(self, tls: WatchedTls | None) -> None:
        """Start to listen. Raises EnvironmentFault if a port is not available."""
        await self.grpc.start(self._service.listen, None if tls is None else tls.tls)
        if self._service.http:
            await self.http.start(self._service.http)

    def waits_for(self, what: str) -> None:
        """Set what the service waits for; answers before `serve` quote it."""
        self.grpc.admin.waits_for = what

    async def serve(self, engine: Engine) -> None:
        """Start to serve an engine."""
        self.engine = self.http.engine = engine
        await self.grpc.serve(engine, ServiceAdmin(engine))

    async def unserve(self) -> None:
        """Serve no engine any more, until another `serve`; its connections end with it."""
        self.engine = self.http.engine = None
        await self.grpc.unserve()

    async def stop(self) -> None:
        """Send the last frames, then end; a second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self.engine is not None:
            self.engine.streams.close()
            for connection in self.engine.connections:
                connection.close()
        await self.grpc.stop()
        await self.http.stop()


def advertised(service: ServiceConfig, port: int) -> str:
    """HOST:PORT for clients: the configured one, or the listening address with this host's name for all interfaces."""
    host, wanted = split_address(service.advertise or service.listen)
    if not service.advertise and host in ALL_HOSTS:
        host = current().network.host_name()
    return f"{f'[{host}]' if ':' in host else host}:{port if wanted == '0' or not service.advertise else wanted}"


def _names(service: ServiceConfig) -> set[str]:
    """Names of this service in requests over HTTP."""
    return {host_of(address) for address in (service.listen, service.http, advertised(service, 0))}


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

    def shorten(self, seconds: float) -> None:
        """Restart the timer with fewer seconds: nothing that the process waits for can arrive."""
        self._timer.cancel()
        self._timer = self._threads.timer(seconds, self._force_exit)
        self._begun = False
        self.begin()

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
INSECURE = "--insecure is given: who reaches these addresses may be able to read and write everything"
NO_ANSWER = "no answer yet"
WATCH = 1.0
"""Seconds after which a standby asks again who serves."""
DELETED_LOG_DRAIN = 2.0
"""Seconds within which a service ends whose log was deleted: pending writes must not reach a new log of its name."""


def check(config: Config, *, cluster_mode: bool = False) -> None:
    """Raises InvalidConfiguration for an invalid configuration, EnvironmentFault for files that can't be used."""
    service = config.service
    if service.standby and not cluster_mode:
        raise InvalidConfiguration("--standby requires a cluster: any other log can be opened by one process only")
    if service.fence and not cluster_mode:
        raise InvalidConfiguration("--fence requires a cluster: stop the process that has this log open")
    if service.fence and service.standby:
        raise InvalidConfiguration("--standby and --fence exclude each other: give one of them")
    if service.require_plug_in and not cluster_mode:
        raise InvalidConfiguration("service.require_plug_in requires a cluster: only its brokers have a plug-in")
    mode = topics_class(cluster_mode=cluster_mode)
    check_shard(_shard(service), mode.max_shards)
    if service.advertise:
        check_listening(service.advertise, tls=True, authenticated=True, insecure=True)
    if bool(service.tls_cert) != bool(service.tls_key):
        raise InvalidConfiguration("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    if (tls := server_tls(config)) is not None:
        tls.files.check()
    elif config.access.client_ca:
        raise InvalidConfiguration("client certificates need TLS: give --tls-cert and --tls-key")
    protection = {"tls": tls is not None, "authenticated": authenticates(config.access)}
    check_listening(service.listen, **protection, insecure=service.insecure)
    if service.http:
        check_listening(service.http, **protection, insecure=service.insecure)
    coordinator_config(config.transactions, mode, service.shards)


def server_tls(config: Config) -> ServerTls | None:
    """The files of the service's TLS, if it is configured."""
    service = config.service
    return ServerTls(service.tls_cert, service.tls_key, config.access.client_ca) if service.tls_cert else None


def _shard(service: ServiceConfig) -> Shard:
    """The shard to serve. With several it must be configured, or the owner of another one might be fenced."""
    return Shard(0 if service.shard == -1 and service.shards == 1 else service.shard, service.shards)


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


def limits(config: Config) -> Limits:
    service, given = config.service, config.limits
    return Limits(
        client_bytes=service.client_bytes,
        total_bytes=service.total_bytes,
        max_message_bytes=config.log.max_message_bytes,
        create_topics=service.create_topics,
        require_plug_in=service.require_plug_in,
        principal=PrincipalLimits(*(getattr(given, name) for name in PrincipalLimits._fields)),
        overload=given.overload_ms / 1000,
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
    return await _Service(config, owner, log, shutdown, cluster_mode=cluster_mode).run(open_broker)


class _Service:
    """A service in this process, from its first line in the log to its last."""

    def __init__(self, config: Config, owner: str, log: Log, shutdown: Shutdown | None, *, cluster_mode: bool) -> None:
        self._config = config
        self._service = config.service
        self._shard = _shard(config.service)
        self._owner = owner
        self._log = log
        self._shutdown = shutdown
        self._cluster_mode = cluster_mode
        self._signals = Signals(shutdown)
        self._replication = Replication(
            config.pair.lease_seconds, configured=bool(config.pair.lock), standby=config.service.standby
        )
        files = server_tls(config)
        tls = None if files is None else WatchedTls(files)
        self._access = Access(config.access, log, insecure=config.service.insecure, tls=tls)
        self._listeners = Listeners(config.service, limits(config), self._replication, self._access)
        self._access.on_change(self._listeners.grpc.recheck)
        self._started = current().clock.monotonic()
        self._engine: Engine | None = None
        self._scrub: Scrub | None = None
        self._gave_up = False

    async def run(self, open_broker: Callable[[], Broker]) -> Error | None:
        """Open the log, serve, and close it."""
        log = self._log
        asyncio.get_running_loop().set_exception_handler(LoopErrors(log).handle)
        if self._service.insecure:
            log("insecure", listen=self._service.listen, http=self._service.http, text=INSECURE)
        watching = asyncio.ensure_future(self._access.watch())
        if not self._replication.stands_by:
            log("recovering")
        reporting = asyncio.ensure_future(
            _report_problems(lambda: {wait.what: wait.reason or NO_ANSWER for wait in long_waits()}, log)
        )
        broker: Broker | None = None
        try:
            await self._listeners.start(self._access.tls)
            broker = await self._open(open_broker)
            return None if broker is None else await self._serve(broker)
        finally:
            self._begin_shutdown()
            await self._listeners.stop()
            if broker is not None:
                await asyncio.to_thread(broker.close)
            watching.cancel()
            reporting.cancel()
            log("stopped")

    async def _serve(self, broker: Broker) -> Error | None:
        """Serve until the end. One of a pair serves while its machine is live, and is a standby in between."""
        replication = self._replication
        replication.attach(broker)
        self._scrub = self._listeners.http.scrub = Scrub(broker, self._config.log.scrub_bytes)
        works: list[Coroutine[Any, Any, None]] = [
            _report_pair(replication, self._log),
            _report_repairs(self._scrub, self._log),
            _report_problems(lambda: {"the pair": replication.problem, "the backup": replication.refusal}, self._log),
            replication.watch(),
            self._give_up_without_backup(broker),
        ]
        tasks = [*map(asyncio.ensure_future, works)]
        try:
            return await self._serve_while_live(broker)
        finally:
            for task in tasks:
                task.cancel()

    async def _give_up_without_backup(self, broker: Broker) -> None:
        """After a signal, end what waits for a backup that has been missing for too long: nothing else would."""
        await self._signals.first.wait()
        while (error := self._replication.refusal) is None:
            await asyncio.sleep(POLL)
        self._gave_up = True
        self._log("problem", what="stopping", error=f"{error}; what waits for it may or may not be in the log")
        if self._engine is not None:
            self._engine.fail(error)
        await asyncio.to_thread(broker.close)

    async def _serve_while_live(self, broker: Broker) -> Error | None:
        replication, stop = self._replication, self._signals.first
        while True:
            engine = await self._become_owner(broker)
            error = None if engine is None else await self._run_engine(engine)
            if error is None and (refusal := await replication.hand_over()) is not None:
                self._log("problem", what="handing over", error=str(refusal))
            again = self._gave_up or engine is None or await replication.continues(error, engine.term)
            if engine is None or stop.is_set() or not again:
                return replication.failure or (None if again else error)

    async def _open(self, open_broker: Callable[[], Broker]) -> Broker | None:
        """Open the broker; None after a signal. A standby retries temporary errors without a limit."""
        stop = self._signals.first
        with waiting("the log to be opened") as wait:
            while not stop.is_set():
                opening = in_thread(open_broker)
                await _wait_for_either(stop, opening)
                if not opening.done():
                    return None
                try:
                    return opening.result()
                except Error as error:
                    if not self._replication.stands_by or not error.retryable:
                        raise
                    wait.failed(error)
        return None

    async def _become_owner(self, broker: Broker) -> Engine | None:
        """Take over the log, as a standby once it is free; None after a signal."""
        standby = self._replication.stands_by
        while True:
            standby_state: StandbyState | None = None
            term = 0
            try:
                if standby:
                    standby_state = await self._stand_by(broker)
                    self._started = current().clock.monotonic()
                    if standby_state is None:
                        return None
                    term = self._replication.term
                elif self._cluster_mode and not self._service.fence:
                    standby_state = await asyncio.to_thread(take_if_free, broker, self._shard)
                return await self._take_over(broker, standby_state)
            except Error as error:
                if self._gave_up:
                    return None
                # A cluster without storage gives the log to each process that opens it, again and again.
                passing = isinstance(error, PeerError) and (error.retryable or isinstance(error, Fenced))
                if not standby or not (passing or await self._replication.continues(error, term)):
                    raise
                self._log("problem", what="taking over", error=str(error))
                await asyncio.sleep(PAUSE)

    async def _stand_by(self, broker: Broker) -> StandbyState | None:
        listeners, log = self._listeners, self._log
        listeners.waits_for(self._replication.standby_reason(""))
        log("standing by", port=listeners.grpc.port, http=listeners.http.port)
        standby_state = None
        while standby_state is None and not self._signals.first.is_set():
            standby_state = await self._wait_as_standby(broker)
        if standby_state is not None:
            listeners.waits_for("the predecessor's transactions are being taken over")
            log("recovering")
        return standby_state

    async def _wait_as_standby(self, broker: Broker) -> StandbyState | None:
        """Wait for the log; None after a signal, and when the log was replaced, so that what was read is outdated."""
        standby = Standby(broker, self._shard, self._service.standby_bytes)
        listeners, log, end = self._listeners, self._log, asyncio.Event()
        watching = [
            asyncio.ensure_future(_report_problems(lambda: {"standby": standby.problem}, log)),
            asyncio.ensure_future(_report_lag(standby.topics, log)),
            asyncio.ensure_future(self._watch_standby(broker, end)),
        ]
        if self._scrub is not None:
            watching.append(asyncio.ensure_future(self._scrub.run()))
        listeners.http.lag = lambda: standby.topics.lag
        listeners.http.follows = lambda: standby.follows or bool(self._replication.facts().get("linked"))
        try:
            return await standby.wait(end)
        finally:
            listeners.http.lag, listeners.http.follows = lambda: NO_LAG, lambda: False
            for task in watching:
                task.cancel()

    async def _watch_standby(self, broker: Broker, end: asyncio.Event) -> None:
        """Say who serves, if anyone does; set `end` after a signal, and when a copy has replaced the log."""
        stop, replication = self._signals.first, self._replication
        discovery, own = ServiceDiscovery(broker, ""), advertised(self._service, self._listeners.grpc.port)
        first = replication.facts().get("store")
        while not stop.is_set() and replication.facts().get("store") == first:
            if replication.lacks_backup:
                self._listeners.waits_for(NOTHING_SERVED)
            elif not replication.alone:
                address = own
                with contextlib.suppress(Error):
                    address = await asyncio.to_thread(discovery.newest_address)
                self._listeners.waits_for(replication.standby_reason("" if address == own else address))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WATCH)
        end.set()

    async def _take_over(self, broker: Broker, standby_state: StandbyState | None) -> Engine:
        config, snapshots = self._config, self._config.snapshots
        mode = topics_class(cluster_mode=self._cluster_mode)
        return await Engine.start(
            broker,
            owner=self._owner,
            address=advertised(self._service, self._listeners.grpc.port),
            shard=self._shard,
            cluster_mode=self._cluster_mode,
            standby_state=standby_state,
            config=coordinator_config(config.transactions, mode, self._service.shards),
            limits=limits(config),
            policy=SnapshotPolicy(snapshots.changes, snapshots.interval_ms, snapshots.recovery_target),
            retention=config.retention,
            compaction=config.compaction,
            streams=config.streams,
            scrub=self._scrub,
        )

    async def _run_engine(self, engine: Engine) -> Error | None:
        listeners, log = self._listeners, self._log
        self._engine = engine
        error: Error | None = None
        replication = self._replication
        try:
            self._report_recovery(engine)
            await listeners.serve(engine)
            log(
                "serving",
                address=f"txnbuf://{advertised(self._service, listeners.grpc.port)}",
                port=listeners.grpc.port,
                http=listeners.http.port,
            )
            engine.run(_watch_problems(engine, log))
            engine.run(_refuse_without_backup(engine, replication))
            await self._until_end(engine)
            if engine.ended.done():
                error = engine.ended.result()
                log("failed", error=str(error), kind=type(error).__name__)
                if self._shutdown is not None and isinstance(error, LogDeleted):
                    self._shutdown.shorten(DELETED_LOG_DRAIN)
                return error
            seconds = self._service.drain_seconds
            if replication.can_switch:  # what stays open moves to the other machine
                seconds = min(seconds, SWITCH_DRAIN)
            log("draining", seconds=seconds, open=sum(1 for _ in engine.coordinator.transactions()))
            await listeners.grpc.drain()
            await engine.drain(seconds)
            return None
        finally:
            continues = not self._signals.first.is_set() and replication.may_continue(error)
            if not continues:
                self._begin_shutdown()
            await (listeners.stop() if replication.alone and not continues else listeners.unserve())
            try:
                await engine.stop()
            except Error as failed:  # of a pair: its next owner completes what is left, and the broker says what failed
                if replication.alone:
                    raise
                log("problem", what="stopping", error=str(failed))
            self._engine = None

    async def _until_end(self, engine: Engine) -> None:
        """Wait for a signal, the end of the engine, or a switch; an engine ends when its machine is no longer live."""
        replication, ends = self._replication, [engine.ended]
        stop, switch = self._signals.first, replication.switch_requested
        waits: list[Coroutine[Any, Any, Any]] = [stop.wait(), switch.wait(), replication.lost(engine.term)]
        ends += map(asyncio.ensure_future, waits)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends[1:]:
            task.cancel()
        if stop.is_set():
            await replication.wait_for_backup(engine.ended.done)
        if replication.term != engine.term:
            engine.fail(NotLive("this machine is no longer live: connect to the other one of the pair"))

    def _report_recovery(self, engine: Engine) -> None:
        log, topics = self._log, engine.topics.by_name
        seconds = round(current().clock.monotonic() - self._started, 3)
        manager, epoch = engine.topics.manager, engine.coordinator.epoch
        log("took over", epoch=epoch, topics=len(topics), warm=manager.warm, cold=manager.discarded, seconds=seconds)
        for note in engine.notes:
            log("note", text=note)
        for topic in topics.values():
            if topic.stopped:
                log("topic stopped", topic=topic.name, error=str(topic.problem))

    def _begin_shutdown(self) -> None:
        if self._shutdown is not None:
            self._shutdown.begin()


async def _wait_for_either(event: asyncio.Event, future: asyncio.Future[Any]) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting, future], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class Signals:
    """The first SIGTERM or SIGINT sets `first` and starts the shutdown timer; a second one ends the process at once."""

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
        if self._shutdown is not None:
            self._shutdown.begin()


async def _watch_problems(engine: Engine, log: Log) -> None:
    """Log problems that end nothing, each once."""

    def found() -> dict[str, Error | None]:
        problems = {f"topic {name}": topic.obstacle for name, topic in engine.topics.by_name.items()}
        problems |= engine.effects.remote_problems()
        problems |= {f"topic {name}": error for name, error in engine.verification.damages.items()}
        problems |= {f"policies of {name}": danger for name, danger in engine.policy_checks.dangers.items()}
        problems |= {f"compaction of {name}": error for name, error in engine.compaction.failures().items()}
        problems |= {"the plug-in of brokers": engine.plug_ins.problem}
        problems |= {"scrub": engine.verification.scrub.problem}
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


async def _refuse_without_backup(engine: Engine, replication: Replication) -> None:
    """Refuse sessions while nothing can be written, as long as there is a pair."""
    while not replication.alone:
        engine.refuse(replication.refusal)
        await asyncio.sleep(POLL)


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


async def _report_pair(replication: Replication, log: Log) -> None:
    """Log the role of this machine and the state of its pair when they change, forever."""
    reported: dict[str, Any] = {}
    while not replication.alone:
        facts = replication.facts()
        state = {name: facts[name] for name in ("role", "store", "partial", "linked")}
        state["in_sync"] = len(facts["in_sync"])
        if state != reported:
            log("pair", **state)
            reported = state
        await asyncio.sleep(WATCH)


async def _report_repairs(scrub: Scrub, log: Log) -> None:
    """Log each damaged file that was repaired, forever."""
    reported = 0
    while scrub.broker is not None:
        repaired = scrub.broker.repaired
        for path in repaired[reported:]:
            log("repaired", file=path)
        reported = len(repaired)
        await asyncio.sleep(WATCH)


async def _report_lag(topics: WarmTopics, log: Log) -> None:
    """Log when all topics are warm, and how many are not, whenever that changes, forever."""
    reported = (0, 0)
    while True:
        await asyncio.sleep(1.0)
        lag = topics.lag
        settled = lag.warm + lag.no_room == lag.topics
        if settled and reported != (lag.topics, lag.no_room):
            reported = (lag.topics, lag.no_room)
            log("warm", topics=lag.warm, no_room=lag.no_room, bytes=lag.bytes)
