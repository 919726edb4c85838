"""`txnbuf list`: the topics of a running service"""

from __future__ import annotations

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("list")
@service_option
@output_option
def command(service: ServiceAddress, output: str) -> None:
    """List the topics that a running service has open.

    `max_read_position` is the last position that readers of committed records can see; `open` counts the
    open transactions of the topic.
    """
    responses = call_all(service, "List")
    show_rows(responses.rows("topic"), output, title="topics")
    responses.check()
