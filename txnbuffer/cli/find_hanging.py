"""`txnbuf find-hanging`: open transactions that block readers"""

from __future__ import annotations

from typing import Any

import click

from txnbuffer.cli.admin_client import ServiceAddress, call_all, service_option
from txnbuffer.cli.output import output_option, show_rows


@click.command("find-hanging")
@click.option("--older-than", "seconds", default=10.0, show_default=True, type=click.FloatRange(0),
              help="Show transactions whose first record is at least this many seconds old.")  # fmt: skip
@service_option
@output_option
def command(seconds: float, service: ServiceAddress, output: str) -> None:
    """Find transactions that have been open for long, the oldest first.

    Each one blocks the readers of all topics that it wrote to. The service aborts it at its timeout;
    `txnbuf abort` aborts it now.
    """
    responses = call_all(service, "FindHanging", seconds=seconds)
    show_rows(merged(responses.each), output, title="open transactions", empty="none found")
    responses.check()


def merged(answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per transaction from the rows of all shards: each knows its own topics, the coordinator the rest."""
    found: dict[str, dict[str, Any]] = {}
    for row in (row for answer in answers for row in answer):
        known = found.setdefault(row["txn"], row)
        if known is not row:
            better = row if known["session"] is None else known
            ages = [one["open_seconds"] for one in (row, known) if one["open_seconds"] is not None]
            topics = sorted({*known["topics"], *row["topics"]})
            found[row["txn"]] = better | {"topics": topics, "open_seconds": max(ages, default=None)}
    return sorted(found.values(), key=lambda row: -(row["open_seconds"] or 0))
