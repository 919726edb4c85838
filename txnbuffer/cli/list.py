"""`txnbuf list`: the topics of a running service."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import ServiceAddress, ask_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("list")
@service_option
@output_option
def command(service: ServiceAddress, output: str) -> None:
    """List the topics that a running service has open.

    `max_read_position`: readers of committed records see all up to it; `open`: transactions with
    records behind it.
    """
    found = ask_all(service, "List")
    show_rows(found.rows("topic"), output, title="topics")
    found.check()
