"""`txnbuf streams`: change streams."""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.asking import ServiceAddress, ask_all, service_option
from txnbuffer.cli.output import output_option, show_line, show_rows

SHOWN = (
    *("topic", "stream", "state", "last_sent_seqno", "items_remaining", "items_sent", "bytes_sent", "snapshots_sent"),
    *("backfill_disk_items", "unacked_bytes", "paused_current_reason"),
)


@click.command("streams")
@service_option
@output_option
def command(service: ServiceAddress, output: str) -> None:
    """Show the change streams that are open, and how far each has come.

    In JSON it is one object: connections with their streams, for each topic its mutation manager with its cursors,
    and the memory of all; with shards one such object of each. `items_remaining` is at most what is still to be sent.
    """
    found = ask_all(service, "Streams")
    if output == "json":
        for answer in found.each:
            show_line(answer)
    else:
        _show_table(found.each)
    found.check()


def _show_table(answers: list[dict[str, Any]]) -> None:
    rows = [
        {"peer": connection["peer"], **{name: stream[name] for name in SHOWN}}
        for answer in answers
        for connection in answer["connections"]
        for stream in connection["streams"]
    ]
    used, budget = (sum(answer["memory"][name] for answer in answers) for name in ("bytes", "budget"))
    show_rows(rows, "table", title=f"change streams; {used:,} of {budget:,} bytes of memory")
