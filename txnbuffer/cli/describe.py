"""`txnbuf describe`: the state of one topic"""

from __future__ import annotations

import re

import click

from broker_io.errors import TopicNotFound
from txnbuffer.cli.admin_client import ServiceAddress, call_owner, service_option
from txnbuffer.cli.output import output_option, show_record, show_rows


@click.command("describe")
@click.argument("topic")
@service_option
@output_option
def command(topic: str, service: ServiceAddress, output: str) -> None:
    """Show the state of TOPIC and what its readers wait for.

    Names the transaction that blocks max_read_position, its age and its client.
    """
    try:
        answer = call_owner(service, "Describe", topic=topic)
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
    """What an error adds where the name of a topic looks like a transaction id."""
    if not re.fullmatch(r"\d+(:\d+)?", topic):
        return ""
    return ". If it is a transaction: `txnbuf find-hanging` shows open transactions with their topics"
