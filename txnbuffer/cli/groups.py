"""`txnbuf groups`: consumer groups."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import Service, ask, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("groups")
@service_option
@output_option
def command(service: Service, output: str) -> None:
    """Show how far each consumer group has come on each topic.

    `generation` grows whenever a consumer joins the group; an older one can't commit any more.
    """
    show_rows(ask(service, "Groups"), output, title="consumer groups")
