"""`txnbuf find-hanging`: transactions that hold readers back."""

from __future__ import annotations

import click

from txnbuffer.cli.asking import Service, ask, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("find-hanging")
@click.option("--older-than", "seconds", default=10.0, show_default=True, type=click.FloatRange(0),
              help="Seconds since the first record.")  # fmt: skip
@service_option
@output_option
def command(seconds: float, service: Service, output: str) -> None:
    """Find open transactions that wrote their first record long ago, the oldest first.

    Each holds back the readers of all topics it wrote to. It is aborted by itself when its time is up;
    `txnbuf abort` does it now.
    """
    show_rows(ask(service, "FindHanging", seconds=seconds), output, title="open transactions", empty="none hangs")
