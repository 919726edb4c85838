"""`txnbuf abort`: abort a transaction of any client."""

from __future__ import annotations

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_owner, service_option
from txnbuffer.cli.options import parse_txn
from txnbuffer.cli.output import output_option, show_record


@click.command("abort")
@click.argument("txn", metavar="MOST:LEAST")
@service_option
@output_option
def command(txn: str, service: ServiceAddress, output: str) -> None:
    """Abort the transaction MOST:LEAST of any client, and show its outcome.

    A committed transaction stays committed; its outcome is then COMMIT.
    """
    show_record(call_owner(service, "Abort", txn=str(parse_txn(txn))), output)
