"""`txnbuf cursors`: durable cursors of change streams."""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.asking import ServiceAddress, ask_all, ask_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows


@click.group("cursors")
def command() -> None:
    """Durable cursors: each keeps in the log what its reader does not have yet, however old that is.

    A cursor is a name at a topic of a running service. What stands behind it is not trimmed by retention, unless that
    is more than streams.cursor_bytes: then the cursor is dropped.
    """


@command.command("list")
@service_option
@output_option
def list_(service: ServiceAddress, output: str) -> None:
    """Show all cursors, where they stand and what they hold.

    `items_remaining`: mutations behind it; `first_ledger`: the first one that it holds.
    """
    found = ask_all(service, "Cursors")
    show_rows(found.rows("topic", "cursor"), output, title="durable cursors", empty="none")
    found.check()


@command.command("add")
@click.argument("topic")
@click.argument("cursor")
@click.option("--at", default="beginning", show_default=True, metavar="PLACE",
              help="beginning, now, a seqno or a resume token.")  # fmt: skip
@service_option
@output_option
def add(topic: str, cursor: str, at: str, service: ServiceAddress, output: str) -> None:
    """Make CURSOR at TOPIC; one that is there stays where it is."""
    _show(ask_owner(service, "AddCursor", topic=topic, cursor=cursor, at=at), output)


@command.command("advance")
@click.argument("topic")
@click.argument("cursor")
@click.argument("place")
@service_option
@output_option
def advance(topic: str, cursor: str, place: str, service: ServiceAddress, output: str) -> None:
    """Move CURSOR of TOPIC to PLACE, the seqno or resume token up to which its reader has everything.

    It never moves back.
    """
    _show(ask_owner(service, "AdvanceCursor", topic=topic, cursor=cursor, at=place), output)


@command.command("remove")
@click.argument("topic")
@click.argument("cursor")
@service_option
@output_option
def remove(topic: str, cursor: str, service: ServiceAddress, output: str) -> None:
    """Remove CURSOR of TOPIC: what it held may go."""
    _show(ask_owner(service, "RemoveCursor", topic=topic, cursor=cursor), output)


def _show(answer: dict[str, Any], output: str) -> None:
    show_record(answer, output)
