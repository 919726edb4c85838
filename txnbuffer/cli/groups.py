"""`txnbuf groups`: consumer groups."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import Service, ask_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("groups")
@click.argument("group", required=False)
@service_option
@output_option
def command(group: str | None, service: Service, output: str) -> None:
    """Show consumer groups, or GROUP: who holds which topic or partition, how far each has come, and what is left.

    `generation` grows whenever something gets another holder; whoever lost it can't commit there any more. `stage` is
    stable, rebalancing, or empty: nobody processes for the group. `lag` counts messages of the log, markers included.
    A member without a topic has nothing to do: there are more members than topics and partitions.
    """
    found = ask_all(service, "Groups", group=group)
    show_rows(found.rows("group", "topic"), output, title="consumer groups")
    found.check()
