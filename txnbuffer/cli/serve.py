"""`txnbuf serve`: the service."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from txnbuffer.cli.opening import address_argument, config_options, configuration, open_for_writing
from txnbuffer.config import Config


@click.command("serve")
@address_argument
@click.option("--listen", metavar="HOST:PORT", help="Where to serve gRPC (127.0.0.1:7711); port 0 takes a free one.")
@click.option("--http", metavar="HOST:PORT", help='Where to serve metrics and health (127.0.0.1:7712); "" for nowhere.')
@click.option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Listen on any address without TLS.")
@click.option("--no-create", is_flag=True, help="Don't make topics on first use.")
@config_options
def command(
    address: str,
    listen: str | None,
    http: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
    no_create: bool,
    config_path: str | None,
    flags: tuple[str, ...],
) -> int:
    """Serve transactions on the log at ADDRESS until SIGTERM.

    The first SIGTERM or SIGINT drains: no new sessions, and open transactions get some seconds to end.
    A second one ends the process at once; nothing acknowledged is lost by that. What happens is told
    on stderr, one JSON object a line; the line with event "serving" has the ports.
    """
    config = configuration(config_path, flags)
    given = {"listen": listen, "http": http, "tls_cert": tls_cert, "tls_key": tls_key}
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if insecure:
        changes["insecure"] = True
    if no_create:
        changes["create_topics"] = False
    return run(address, replace(config, service=replace(config.service, **changes)))  # type: ignore[arg-type]  # checked by click


def run(address: str, config: Config) -> int:
    """Serve; the exit code."""
    import asyncio
    import gc
    import socket

    from broker_io import check_address
    from txnbuffer.service.serving import check, serve

    check_address(address)
    check(config)
    gc.set_threshold(50_000, 20, 100)  # many objects live shortly and few are cycles
    owner = f"{socket.gethostname()}:{address}"
    error = asyncio.run(serve(lambda: open_for_writing(address, config), config, owner, _log()))
    if error is not None:
        click.echo(f"txnbuf: {error}", err=True)
        return error.exit_code
    return 0


def _log() -> Any:
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return structlog.get_logger().info
