"""`txnbuf groups`: the positions of consumer groups, shown, changed and forgotten"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from txnbuffer.cli.admin import held_back_counted
from txnbuffer.cli.admin_client import answers, changed
from txnbuffer.cli.commands import CommandGroup, address_argument, complete_topic
from txnbuffer.cli.options import LogAddress, log_options
from txnbuffer.cli.output import output_option, show_record, show_rows
from txnbuffer.cli.tail import parse_start
from txnbuffer.errors import InvalidRequest

if TYPE_CHECKING:
    from txnbuffer.client.reading.starts import Start
    from txnbuffer.client.seeking import MovedPosition


@click.group("groups", cls=CommandGroup)
def groups_command() -> None:
    """Show consumer groups and change their positions.

    A group keeps in the log how far its members have processed each topic or partition.
    """


@groups_command.command("list")
@address_argument
@click.argument("group", required=False)
@log_options
@output_option
def list_groups(group: str | None, log: LogAddress, output: str) -> None:
    """Show all consumer groups, or GROUP: the member that owns each topic or partition, its position and its lag.

    `generation` increases whenever a topic or partition changes its owner; the previous owner can no longer commit
    on it. `stage` is stable, rebalancing or empty (no members). `lag` counts the committed records after the
    position. A member without a topic is idle: there are more members than topics and partitions. `held_back`
    counts the messages that a group does not get before an open transaction has ended, which is named on stderr.
    """
    responses = answers(log, "Groups", group=group)
    if group is not None and not any(responses.each):
        responses.check()
        raise InvalidRequest(f"there is no consumer group {group!r}: `txnbuf groups list` shows all")
    show_rows(held_back_counted(responses.rows("group", "topic"), output), output, title="consumer groups")
    responses.check()


@groups_command.command("forget")
@address_argument
@click.argument("group")
@click.option("--topic", metavar="TOPIC", shell_complete=complete_topic,
              help="Only the positions on this topic and its partitions.")  # fmt: skip
@log_options
@output_option
def forget_group(group: str, topic: str | None, log: LogAddress, output: str) -> None:
    """Delete the positions of GROUP, which must have no members.

    Use it after a topic was deleted and created again: the group then keeps nothing in the log, and starts at the
    `start` of its next member.
    """
    show_record(changed(log, "ForgetGroup", group=group, topic=topic), output)


@groups_command.command("seek")
@address_argument
@click.argument("group")
@click.option("--topic", required=True, metavar="TOPIC", shell_complete=complete_topic,
              help="The topic, with all its partitions, or one partition.")  # fmt: skip
@click.option("--to", required=True, metavar="PLACE",
              help="beginning, end, a seqno, a position ledger:entry, or a time: 2026-01-31T12:00+00:00.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@log_options
@output_option
def seek_group(group: str, topic: str, to: str, dry_run: bool, log: LogAddress, output: str) -> None:
    """Let GROUP, which must have no members, continue at PLACE of a topic: the next record is the first one there.

    Shows the last record consumed before and after: all partitions change together, or none does. A seqno or a position
    is in one partition. On a partition without a record at or after a time, the group continues at the end. A group
    that does not exist begins at PLACE.

    With file:DIR the command owns the log meanwhile.
    """
    log.check_not_in_memory()
    moved = asyncio.run(_seek(log, group, topic, parse_start(to, "--to"), dry_run=dry_run))
    show_rows([one._asdict() for one in moved], output, title=f"group {group}{', not changed' if dry_run else ''}")


async def _seek(log: LogAddress, group: str, topic: str, start: Start, *, dry_run: bool) -> list[MovedPosition]:
    from txnbuffer.client.seeking import seek
    from txnbuffer.opening import connect

    async with connect(log.address, **log.connect_options()) as client:
        return await seek(client, group, topic, start, dry_run=dry_run)
