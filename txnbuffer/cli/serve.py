"""`txnbuf serve`: the service."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from txnbuffer.cli.opening import open_for_writing, with_config
from txnbuffer.config import Config

LEAVING = 30.0
"""Seconds beyond those for open transactions in which a service beside a cluster has to end."""
LEFT = 3
"""The exit code of one that did not."""


@click.command("serve")
@click.argument("address", metavar="[ADDRESS]", required=False)
@click.option("--broker", metavar="ADDRESS", help="The same as ADDRESS.")
@click.option("--listen", metavar="HOST:PORT", help="Where to serve gRPC (127.0.0.1:7711); port 0 takes a free one.")
@click.option("--http", metavar="HOST:PORT", help='Where to serve metrics and health (127.0.0.1:7712); "" for nowhere.')
@click.option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Listen on any address without TLS.")
@click.option("--shard", type=int, metavar="K", help="Beside a cluster: which shard to serve, 0 to N - 1.")
@click.option(
    "--shards", type=int, metavar="N", help="How many share the namespace, fixed when it is first served (1)."
)
@click.option("--standby", is_flag=True, help="Beside a cluster: serve once whoever serves is gone.")
@click.option("--fence", is_flag=True, help="Beside a cluster: take the log from whoever serves.")
@click.option("--advertise", metavar="HOST:PORT", help="Where clients of a cluster find this service.")
@click.option("--admin-url", metavar="URL", help="REST interface of the cluster.")
@click.option("--token-file", metavar="FILE", help="Token for the cluster.")
@click.option("--tls-trust", metavar="FILE", help="Certificates to trust of the cluster, PEM.")
@click.option("--no-create", is_flag=True, help="Don't make topics on first use.")
@with_config
def command(
    address: str | None,
    broker: str | None,
    config: Config,
    insecure: bool,
    no_create: bool,
    standby: bool,
    fence: bool,
    **given: str | int | None,
) -> int:
    """Serve transactions on the log at ADDRESS until SIGTERM.

    On file:DIR the service owns the log, and all data goes through it. On pulsar://HOST:PORT/TENANT/NAMESPACE
    it stands beside the cluster: applications write to that straight, and ask the service for transactions.
    How it gets into the cluster stands in the section [pulsar] of the configuration.

    The first SIGTERM or SIGINT drains: no new sessions, and open transactions get some seconds to end.
    A second one ends the process at once; nothing acknowledged is lost by that. What happens is told
    on stderr, one JSON object a line; the line with event "serving" has the ports.
    """
    if (address is None) == (broker is None):
        raise click.UsageError("say once which log to serve: ADDRESS, or --broker ADDRESS")
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    of_cluster = {name: changes.pop(name) for name in ("admin_url", "token_file", "tls_trust") if name in changes}
    if insecure:
        changes["insecure"] = True
    if no_create:
        changes["create_topics"] = False
    if standby:
        changes["standby"] = True
    if fence:
        changes["fence"] = True
    service, pulsar = replace(config.service, **changes), replace(config.pulsar, **of_cluster)
    return run(str(address or broker), replace(config, service=service, pulsar=pulsar))


def run(address: str, config: Config) -> int:
    """Serve; the exit code."""
    import asyncio
    import gc
    import socket

    from broker_io import check_address, is_cluster
    from txnbuffer.service.process import Shutdown, check, serve

    check_address(address)
    shared = is_cluster(address)
    check(config, shared=shared)
    gc.set_threshold(50_000, 20, 100)  # many objects live shortly and few are cycles
    owner = f"{socket.gethostname()}:{address}"
    log = _log()
    leaving = Shutdown(config.service.drain_seconds + LEAVING, lambda: _leave(log)) if shared else None
    serving = serve(lambda: open_for_writing(address, config), config, owner, log, shared=shared, shutdown=leaving)
    try:
        error = asyncio.run(serving)
    finally:
        if leaving is not None:
            leaving.done()
    if error is not None:
        click.echo(f"txnbuf: {error}", err=True)
        return error.exit_code
    return 0


def _leave(log: Any) -> None:
    """End at once, from any thread: what is left undone is for the next owner, as after a kill."""
    import os

    log("left", error="the cluster did not let this service end in time: what it left undone its successor does")
    os._exit(LEFT)


def _log() -> Any:
    import logging

    import structlog

    waits = logging.getLogger("txnbuffer.waits")  # the service tells of them in its own log
    waits.propagate = False
    waits.addHandler(logging.NullHandler())
    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return structlog.get_logger().info
