"""`txnbuf cursors`: durable cursors of change streams"""

from __future__ import annotations

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_all, call_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows


@click.group("cursors")
def command() -> None:
    """List and change durable cursors: each keeps in the log what its reader has not read yet.

    A cursor is a named position on a topic of a running service. Retention does not trim the log after it. A cursor
    that keeps more than streams.cursor_bytes is dropped.
    """


@command.command("list")
@service_option
@output_option
def list_(service: ServiceAddress, output: str) -> None:
    """Show all cursors, their positions and what they keep in the log.

    `items_remaining` is the number of mutations after the cursor; `first_ledger` is the first ledger that it keeps.
    """
    responses = call_all(service, "Cursors")
    show_rows(responses.rows("topic", "cursor"), output, title="durable cursors", empty="none")
    responses.check()


@command.command("add")
@click.argument("topic")
@click.argument("cursor")
@click.option("--at", default="beginning", show_default=True, metavar="PLACE",
              help="Position: beginning, now, a seqno or a resume token.")  # fmt: skip
@service_option
@output_option
def add(topic: str, cursor: str, at: str, service: ServiceAddress, output: str) -> None:
    """Add CURSOR to TOPIC. A cursor that exists keeps its position."""
    show_record(call_owner(service, "AddCursor", topic=topic, cursor=cursor, at=at), output)


@command.command("advance")
@click.argument("topic")
@click.argument("cursor")
@click.argument("place")
@service_option
@output_option
def advance(topic: str, cursor: str, place: str, service: ServiceAddress, output: str) -> None:
    """Move CURSOR of TOPIC forward to PLACE, the seqno or resume token that its reader has processed.

    A cursor never moves back.
    """
    show_record(call_owner(service, "AdvanceCursor", topic=topic, cursor=cursor, at=place), output)


@command.command("remove")
@click.argument("topic")
@click.argument("cursor")
@service_option
@output_option
def remove(topic: str, cursor: str, service: ServiceAddress, output: str) -> None:
    """Remove CURSOR of TOPIC, so that retention may trim what it kept."""
    show_record(call_owner(service, "RemoveCursor", topic=topic, cursor=cursor), output)
