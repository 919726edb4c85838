"""`txnbuf describe`: one topic, and what its readers wait for."""

from __future__ import annotations

import re

import click

from broker_io.errors import TopicNotFound
from txnbuffer.cli.asking import ServiceAddress, ask_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows


@click.command("describe")
@click.argument("topic")
@service_option
@output_option
def command(topic: str, service: ServiceAddress, output: str) -> None:
    """Tell all about a TOPIC, and in words what its readers wait for.

    Says which transaction holds max_read_position back, since when, and whose it is.
    """
    try:
        answer = ask_owner(service, "Describe", topic=topic)
    except TopicNotFound as error:
        raise TopicNotFound(f"{error}{hint(topic)}") from None
    if output == "json":
        show_record(answer, output)
        return
    transactions = answer.pop("transactions") if isinstance(answer["transactions"], list) else []
    show_record(answer, output, title=f"topic {topic}")
    if transactions:
        show_rows(transactions, output, title="open transactions, oldest first")


def hint(topic: str) -> str:
    """What to say to who named a transaction."""
    if not re.fullmatch(r"\d+(:\d+)?", topic):
        return ""
    return ". Is it a transaction? `txnbuf find-hanging` shows those that are open, with their topics"
