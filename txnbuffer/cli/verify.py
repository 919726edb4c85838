"""`txnbuf verify`: every buffer snapshot in itself and against its log."""

from __future__ import annotations

import sys

import click

from txnbuffer.cli.opening import address_argument, open_for_reading, tls_option, with_config
from txnbuffer.cli.output import narrate, output_option, show_rows
from txnbuffer.config import Config
from txnbuffer.recovery.verify import Level, verify


@click.command("verify")
@address_argument
@click.argument("topic", required=False)
@tls_option
@with_config
@output_option
def command(address: str, topic: str | None, tls_ca: str | None, config: Config, output: str) -> None:
    """Check the buffer snapshots of all topics, or of TOPIC, without changing anything.

    Each entry is checked in itself, the chain of parts as a whole, and the state against one that is
    folded from the log anew. Files and decisions are looked at as whoever serves the log next would. Exit code 1
    if anything is wrong.
    """
    with open_for_reading(address, config, tls_ca) as broker:
        findings = verify(broker, topic)
    rows = [
        {
            "level": finding.level.value,
            "topic": finding.topic,
            "entry": finding.entry,
            "position": finding.position,
            "what": finding.what,
        }
        for finding in findings
    ]
    show_rows(rows, output, empty="no snapshots")
    wrong = sum(finding.level is Level.ERROR for finding in findings)
    narrate(f"{wrong} errors in {len({finding.topic for finding in findings})} topics")
    sys.exit(1 if wrong else 0)
