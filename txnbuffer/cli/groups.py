"""`txnbuf groups`: consumer groups."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import ServiceAddress, ask_all, ask_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.errors import InvalidRequest


@click.command("groups")
@click.argument("group", required=False)
@click.option("--forget", is_flag=True, help="Let GROUP, which must have no members, begin anew.")
@click.option("--topic", metavar="TOPIC", help="With --forget: on this topic only, and its partitions.")
@service_option
@output_option
def command(group: str | None, forget: bool, topic: str | None, service: ServiceAddress, output: str) -> None:
    """Show consumer groups, or GROUP: who holds which topic or partition, how far each has come, and what is left.

    `generation` grows whenever something gets another holder; whoever lost it can't commit there any more. `stage` is
    stable, rebalancing, or empty: nobody processes for the group. `lag` counts messages of the log, markers included.
    A member without a topic has nothing to do: there are more members than topics and partitions.

    A group that was forgotten, as after its topic was deleted and made anew, holds nothing in the log any more, and
    begins where `start` says when somebody processes for it.
    """
    if forget:
        if group is None:
            raise InvalidRequest("name the group to forget")
        show_record(ask_owner(service, "ForgetGroup", group=group, topic=topic), output)
        return
    if topic is not None:
        raise InvalidRequest("--topic goes with --forget")
    found = ask_all(service, "Groups", group=group)
    show_rows(found.rows("group", "topic"), output, title="consumer groups")
    found.check()
