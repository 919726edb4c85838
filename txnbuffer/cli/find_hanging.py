"""`txnbuf find-hanging`: transactions that hold readers back."""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.asking import ServiceAddress, ask_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("find-hanging")
@click.option("--older-than", "seconds", default=10.0, show_default=True, type=click.FloatRange(0),
              help="Seconds since the first record.")  # fmt: skip
@service_option
@output_option
def command(seconds: float, service: ServiceAddress, output: str) -> None:
    """Find open transactions that wrote their first record long ago, the oldest first.

    Each holds back the readers of all topics it wrote to. It is aborted by itself when its time is up;
    `txnbuf abort` does it now.
    """
    found = ask_all(service, "FindHanging", seconds=seconds)
    show_rows(merged(found.each), output, title="open transactions", empty="none hangs")
    found.check()


def merged(answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each transaction, of what the shards know: its coordinator knows most, each its own topics."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for answer in answers for row in answer):
        known = found.setdefault(row["txn"], row)
        if known is not row:
            better = row if known["session"] is None else known
            ages = [one["open_seconds"] for one in (row, known) if one["open_seconds"] is not None]
            topics = sorted({*known["topics"], *row["topics"]})
            found[row["txn"]] = better | {"topics": topics, "open_seconds": max(ages, default=None)}
    return sorted(found.values(), key=lambda row: -(row["open_seconds"] or 0))
