"""`txnbuf list`: the topics of a running service."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import Service, rows_of_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("list")
@service_option
@output_option
def command(service: Service, output: str) -> None:
    """List the topics that a running service has open.

    `max_read_position`: readers of committed records see all up to it; `open`: transactions with
    records behind it.
    """
    show_rows(rows_of_all(service, "List", "topic"), output, title="topics")
