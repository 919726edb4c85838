"""The life of a service process: open, take over, listen, wait for a signal or a failure, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_io.errors import Error
from broker_io.port import Broker
from snapshots.policy import SnapshotPolicy
from txnbuffer.config import Config, SnapshotConfig, TransactionConfig
from txnbuffer.coordinator.config import Config as CoordinatorConfig
from txnbuffer.errors import InvalidConfiguration
from txnbuffer.service.admin import Admin
from txnbuffer.service.engine import Engine
from txnbuffer.service.grpc_server import GrpcServer, check_listening
from txnbuffer.service.http_server import HttpServer
from txnbuffer.service.limits import Limits

Log = Callable[..., Any]
"""`log(event, **facts)` writes one line."""


def check(config: Config) -> None:
    """Raises InvalidConfiguration for what can't be served."""
    service = config.service
    if bool(service.tls_cert) != bool(service.tls_key):
        raise InvalidConfiguration("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    if service.tls_cert:
        _check_pem(service.tls_cert, service.tls_key)
    check_listening(service.listen, tls=bool(service.tls_cert), insecure=service.insecure)
    if service.http:
        check_listening(service.http, tls=False, insecure=service.insecure)
    coordinator_config(config.transactions)


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


def coordinator_config(config: TransactionConfig) -> CoordinatorConfig:
    return CoordinatorConfig(
        transaction_timeout=config.timeout,
        max_transaction_timeout=config.max_timeout,
        session_timeout=config.session_timeout,
        lease_timeout=max(config.max_timeout, CoordinatorConfig().lease_timeout),
        remember=config.remember,
        max_open_session=config.max_open_session,
        max_open=config.max_open,
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


async def serve(open_broker: Callable[[], Broker], config: Config, owner: str, log: Log) -> Error | None:
    """Serve until a signal ends it (None) or a failure does. Raises what stands in the way of starting."""
    check(config)
    certificate, key = _read(config.service.tls_cert), _read(config.service.tls_key)
    signals = Signals()
    started = time.monotonic()
    log("recovering")
    broker = await asyncio.to_thread(open_broker)
    try:
        engine = await Engine.start(
            broker,
            owner=owner,
            config=coordinator_config(config.transactions),
            limits=limits(config),
            policy=snapshot_policy(config.snapshots),
            retention=config.retention,
        )
        _tell_recovery(engine, log, time.monotonic() - started)
        try:
            return await _listen(engine, config, (certificate, key), signals, log)
        finally:
            await engine.stop()
    finally:
        await asyncio.to_thread(broker.close)
        log("stopped")


async def _listen(
    engine: Engine, config: Config, tls: tuple[bytes | None, bytes | None], signals: Signals, log: Log
) -> Error | None:
    service, (certificate, key) = config.service, tls
    grpc_server = GrpcServer(engine, Admin(engine), max_clients=service.max_clients)
    http_server = HttpServer(engine)
    try:
        await grpc_server.start(service.listen, certificate=certificate, key=key)
        if service.http:
            await http_server.start(service.http)
        host = service.listen.rpartition(":")[0]
        log("serving", address=f"txnbuf://{host}:{grpc_server.port}", port=grpc_server.port, http=http_server.port)
        engine.run(_watch_problems(engine, log))
        await _either(signals.first, engine.ended)
        if engine.ended.done():
            error = engine.ended.result()
            log("failed", error=str(error), kind=type(error).__name__)
            return error
        log("draining", seconds=service.drain_seconds, open=sum(1 for _ in engine.coordinator.transactions()))
        await grpc_server.drain()
        await engine.drain(service.drain_seconds)
        return None
    finally:
        for connection in engine.connections:
            connection.close()
        await grpc_server.stop()
        await http_server.stop()


async def _either(event: asyncio.Event, future: asyncio.Future[Any]) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting, future], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


class Signals:
    """SIGTERM or SIGINT sets `first`; another one ends the process at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # no main thread: whoever runs us there handles signals
                loop.add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        if self.first.is_set():
            os._exit(128 + number)
        self.first.set()


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
        if topic.problem is not None:
            log("topic stopped", topic=topic.name, error=str(topic.problem))


async def _watch_problems(engine: Engine, log: Log) -> None:
    """Tell of what goes wrong without ending anything, each once."""
    told: dict[str, str] = {}
    damaged = 0
    while True:
        await asyncio.sleep(1.0)
        found = {name: topic.why_not for name, topic in engine.topics.by_name.items() if topic.why_not is not None}
        problems: dict[str, object] = {f"topic {name}": problem for name, problem in found.items()}
        problems |= {"snapshots": engine.keeping.problem, "retention": engine.retention.problem}
        for what, problem in problems.items():
            text = "" if problem is None else str(problem)
            if text and told.get(what) != text:
                log("problem", what=what, error=text)
            told[what] = text
        if engine.carrying.counts.damaged > damaged:
            damaged = engine.carrying.counts.damaged
            log("damage", commits=damaged, text="commits with another number of records than they say: run verify")


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"can't read {path}: {error.strerror}") from error
