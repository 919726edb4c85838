"""`txnbuf verify`: check of all buffer snapshots against their logs"""

from __future__ import annotations

import sys

import click

from txnbuffer.cli.options import address_argument, open_for_reading, tls_option, with_config
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

    Checks each snapshot entry, the chain of segments, and the state against the state rebuilt from the log.
    Also checks the files and the decision log as the service does at its start. Exit code 1 if anything is
    wrong.
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
