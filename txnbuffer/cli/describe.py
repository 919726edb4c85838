"""`txnbuf describe`: one topic, and what its readers wait for."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import Service, ask_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows


@click.command("describe")
@click.argument("topic")
@service_option
@output_option
def command(topic: str, service: Service, output: str) -> None:
    """Tell all about a TOPIC, and in words what its readers wait for.

    Says which transaction holds max_read_position back, since when, and whose it is.
    """
    answer = ask_owner(service, "Describe", topic=topic)
    if output == "json":
        show_record(answer, output)
        return
    transactions = answer.pop("transactions") if isinstance(answer["transactions"], list) else []
    show_record(answer, output, title=f"topic {topic}")
    if transactions:
        show_rows(transactions, output, title="open transactions, oldest first")
