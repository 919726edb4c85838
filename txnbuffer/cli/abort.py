"""`txnbuf abort`: end a transaction of somebody else."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import ServiceAddress, ask_owner, service_option
from txnbuffer.cli.output import output_option, show_record


@click.command("abort")
@click.argument("txn", metavar="MOST:LEAST")
@service_option
@output_option
def command(txn: str, service: ServiceAddress, output: str) -> None:
    """Abort the transaction MOST:LEAST, whoever has it open, and tell its outcome.

    One that has committed stays committed: then the outcome is COMMIT.
    """
    show_record(ask_owner(service, "Abort", txn=txn), output)
