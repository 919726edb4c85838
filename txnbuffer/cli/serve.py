"""`txnbuf serve`: the transaction service"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import click

from txnbuffer.cli.commands import AddressCommand
from txnbuffer.cli.logs import log_event
from txnbuffer.cli.options import LogAddress, with_config
from txnbuffer.config import Config
from txnbuffer.progress import OnProgress, Progress, reporting

T = TypeVar("T")
WORKERS = 6
"""Threads of a service for calls that block for a moment, such as opening a writer."""
SHUTDOWN_SECONDS = 30.0
"""Seconds after the drain time in which a service in cluster mode must have shut down."""
PAIR = "pair_"
"""What the names of options of a pair begin with."""
SHUTDOWN_TIMED_OUT = 3
"""The exit code of a service that did not."""


class ServeCommand(AddressCommand):
    """The command that logs the events of a service."""

    logs_events = True


@click.command("serve", cls=ServeCommand)
@click.argument("address", metavar="[ADDRESS]", required=False)
@click.option("--broker", metavar="ADDRESS", help="The same as ADDRESS.")
@click.option("--listen", metavar="HOST:PORT", help="Address for gRPC (127.0.0.1:7711); port 0 takes a free port.")
@click.option("--http", metavar="HOST:PORT", help='HTTP: health, metrics, admin (127.0.0.1:7712); "" for none.')
@click.option("--tls-cert", metavar="FILE", help="Certificate chain of the service (PEM).")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate (PEM).")
@click.option("--insecure", is_flag=True, help="Allow any address without TLS and authentication.")
@click.option("--shard", type=int, metavar="K", help="On a cluster: the shard to serve, 0 to N - 1.")
@click.option(
    "--shards",
    type=int,
    metavar="N",
    help="On a cluster: number of shards, fixed at the first start (1).",
)
@click.option("--standby", is_flag=True, help="On a cluster: wait as a standby until the active service is gone.")
@click.option("--fence", is_flag=True, help="On a cluster: take over from the active service.")
@click.option("--advertise", metavar="HOST:PORT", help="On a cluster: the address at which clients reach this service.")
@click.option("--admin-url", metavar="URL", help="REST (admin) URL of the cluster.")
@click.option("--token-file", metavar="FILE", help="File with the token for the cluster.")
@click.option("--tls-trust", metavar="FILE", help="CA certificates of the cluster (PEM).")
@click.option("--pair-lock", metavar="ADDRESS", help="On file:DIR: the lock of a pair, etcd://HOST:PORT,…/NAME.")
@click.option("--pair-listen", metavar="HOST:PORT", help="Of a pair: address for the other machine.")
@click.option("--backup-of", "pair_peer", metavar="HOST:PORT", help="Of a pair: --pair-listen of the other one.")
@click.option("--found", "pair_found", is_flag=True, help="Create a pair with this log, at its first start only.")
@click.option("--pair-cert", "pair_tls_cert", metavar="FILE", help="Of a pair: certificate of this machine (PEM).")
@click.option("--pair-key", "pair_tls_key", metavar="FILE", help="Of a pair: private key of the certificate (PEM).")
@click.option("--pair-ca", "pair_tls_ca", metavar="FILE", help="Of a pair: CA of both certificates (PEM).")
@click.option("--no-create", is_flag=True, help="Do not create topics on first use.")
@with_config
def serve_command(
    address: str | None,
    broker: str | None,
    config: Config,
    no_create: bool,
    **given: str | int | bool | None,
) -> int:
    """Serve transactions on the log at ADDRESS until SIGTERM.

    On file:DIR the service owns the log, and all records go through it. With --pair-lock the log is replicated to a
    second machine, which takes over if this one fails: see docs/replication.md. On pulsar://HOST:PORT/TENANT/NAMESPACE
    applications write records straight to the cluster, and the service coordinates their transactions. The section
    [pulsar] of the configuration says how to authenticate at the cluster.

    The first SIGTERM or SIGINT drains: the service accepts no new sessions, and open transactions get
    service.drain_seconds to end. A second one ends the process at once, without losing anything acknowledged.
    Events are logged to stderr, as text on a terminal, and one JSON object per line elsewhere; the event "serving" has
    the ports.
    """
    if (address is None) == (broker is None):
        raise click.UsageError("give the log to serve exactly once: as ADDRESS, or as --broker ADDRESS")
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None and value is not False}
    of_cluster = {name: changes.pop(name) for name in ("admin_url", "token_file", "tls_trust") if name in changes}
    of_pair = {name.removeprefix(PAIR): changes.pop(name) for name in [*changes] if name.startswith(PAIR)}
    if no_create:
        changes["create_topics"] = False
    service, pulsar = replace(config.service, **changes), replace(config.pulsar, **of_cluster)
    pair = replace(config.pair, **of_pair)
    return run(str(address or broker), replace(config, service=service, pulsar=pulsar, pair=pair))


def run(address: str, config: Config) -> int:
    """Serve; the exit code."""
    import asyncio
    import gc
    import socket

    from broker_io import canonical_address, check_address, is_cluster
    from txnbuffer.service.process import Shutdown, check, serve
    from txnbuffer.service.standby.replication import check_pair

    check_address(address)
    cluster_mode = is_cluster(address)
    check(config, cluster_mode=cluster_mode)
    check_pair(config.pair, embedded=address.startswith("file:"))
    gc.set_threshold(50_000, 20, 100)  # most objects are short-lived, and few are in cycles
    owner = f"{socket.gethostname()}:{address}"
    logging.getLogger("txnbuffer.waits").disabled = True  # the service logs waits itself
    if cluster_mode and (used := canonical_address(address)) != address.rstrip("/"):
        log_event("namespace", given=address, used=used)
    shutdown = Shutdown(config.service.drain_seconds + SHUTDOWN_SECONDS, _exit) if cluster_mode else None
    serving = serve(
        LogAddress(address, config).open_to_serve,
        config,
        owner,
        log_event,
        cluster_mode=cluster_mode,
        shutdown=shutdown,
    )
    try:
        with reporting(_progress_log()):
            error = asyncio.run(with_workers(serving))
    finally:
        if shutdown is not None:
            shutdown.done()
    if error is not None:
        click.echo(f"txnbuf: {error}", err=True)
        return error.exit_code
    return 0


async def with_workers(work: Coroutine[Any, Any, T]) -> T:
    """Await something with WORKERS threads for what blocks; by default their number depends on the machine."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(WORKERS, "txnbuffer-worker"))
    return await work


def _exit() -> None:
    """End the process from any thread; as after a kill, the next owner completes the work."""
    import os

    text = "the cluster did not respond in time for a clean shutdown; the next service completes the work"
    log_event("left", error=text)
    os._exit(SHUTDOWN_TIMED_OUT)


PROGRESS_SECONDS = 2.0
"""Seconds of an operation before its progress is logged, and between two such events."""


def _progress_log(log: Callable[..., None] = log_event) -> OnProgress:
    """A callback that logs the progress of operations that take long."""
    logged: dict[str, float] = {}

    def show(progress: Progress) -> None:
        if progress.done == progress.total:
            logged.pop(progress.operation, None)
        elif progress.seconds - logged.get(progress.operation, 0.0) >= PROGRESS_SECONDS:
            logged[progress.operation] = progress.seconds
            log("progress", **dataclasses.asdict(progress))

    return show
