"""`txnbuf streams`: open change streams"""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_all, service_option
from txnbuffer.cli.output import output_option, show_line, show_rows

SHOWN = (
    *("topic", "stream", "state", "last_sent_seqno", "items_remaining", "items_sent", "bytes_sent", "snapshots_sent"),
    *("backfill_disk_items", "unacked_bytes", "paused_current_reason"),
)


@click.command("streams")
@service_option
@output_option
def command(service: ServiceAddress, output: str) -> None:
    """Show the open change streams and their progress.

    With --output json: one object per shard with the connections and their streams, the mutation manager and cursors
    of each topic, and the memory in use. `items_remaining` is an upper bound of the items still to be sent.
    """
    responses = call_all(service, "Streams")
    if output == "json":
        for response in responses.each:
            show_line(response)
    else:
        _show_table(responses.each)
    responses.check()


def _show_table(responses: list[dict[str, Any]]) -> None:
    rows = [
        {"peer": connection["peer"], **{name: stream[name] for name in SHOWN}}
        for response in responses
        for connection in response["connections"]
        for stream in connection["streams"]
    ]
    used, budget = (sum(response["memory"][name] for response in responses) for name in ("bytes", "budget"))
    show_rows(rows, "table", title=f"change streams; {used:,} of {budget:,} bytes of memory")
