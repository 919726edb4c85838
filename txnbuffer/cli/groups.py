"""`txnbuf groups`: consumer groups"""

from __future__ import annotations

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_all, call_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.errors import InvalidRequest


@click.command("groups")
@click.argument("group", required=False)
@click.option("--forget", is_flag=True, help="Delete the positions of GROUP, which must have no members.")
@click.option("--topic", metavar="TOPIC", help="With --forget: only the positions on this topic and its partitions.")
@service_option
@output_option
def command(group: str | None, forget: bool, topic: str | None, service: ServiceAddress, output: str) -> None:
    """Show all consumer groups, or GROUP: the member that owns each topic or partition, its position and its lag.

    `generation` increases whenever a topic or partition changes its owner; the previous owner can no longer commit
    on it. `stage` is stable, rebalancing or empty (no members). `lag` counts the messages of the log after the
    position, markers included. A member without a topic is idle: there are more members than topics and partitions.

    Use --forget after a topic was deleted and created again: the group then keeps nothing in the log, and starts
    at the `start` of its next member.
    """
    if forget:
        if group is None:
            raise InvalidRequest("--forget needs a GROUP: name the group to forget")
        show_record(call_owner(service, "ForgetGroup", group=group, topic=topic), output)
        return
    if topic is not None:
        raise InvalidRequest("--topic works with --forget only")
    responses = call_all(service, "Groups", group=group)
    show_rows(responses.rows("group", "topic"), output, title="consumer groups")
    responses.check()
