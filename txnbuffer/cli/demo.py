"""`txnbuf demo`: the main job on real input, with kills."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
import tempfile
import time

import click

from txnbuffer.cli.output import narrate, output_option, show_line


@click.command("demo")
@click.option("--kills", default=6, show_default=True, type=click.IntRange(4), help="SIGKILLs for the writer.")
@click.option("--transactions", type=click.IntRange(100), help="Only the first so many hours of the year.")
@click.option("--seed", type=int, help="Choose the moments of the kills; random unless given.")
@click.option("--dir", "directory", type=click.Path(), help="Keep the log in this directory (must be new or empty).")
@output_option
def command(kills: int, transactions: int | None, seed: int | None, directory: str | None, output: str) -> None:
    """Write a year of flights in transactions while the writer is killed; compare the end with the source.

    One transaction per hour of 2013 over the topics `departures` and `arrivals`, one in ten aborted
    after writing. The writer is killed with SIGKILL at random moments, once during its recovery, while
    another process follows live. Exit code 1 unless nothing was lost, doubled, or seen uncommitted.
    """
    from txnbuffer.demo.conductor import Conductor

    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    place = directory or tempfile.mkdtemp(prefix="txnbuf-demo-")
    narrate(f"log in {place}; the kills come from --seed {seed}")
    started = time.monotonic()
    try:
        chance = random.Random(seed)  # noqa: S311 - moments, no secrets
        report = Conductor(f"file:{place}", kills, chance, narrate, transactions).run()
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)
    verdict = "every committed record once, no aborted one" if report.good else "NOT what the source says"
    summary = (
        f"{verdict}: {report.records_read:,} of {report.records_expected:,} records read, "
        f"lost {report.lost}, duplicated {report.duplicated}, uncommitted seen {report.uncommitted_seen}; "
        f"{report.kills} kills, slowest recovery {report.recovery_seconds_max * 1000:.0f} ms, "
        f"{report.transactions_per_second:,.0f} transactions/s, {time.monotonic() - started:.0f} s in all"
    )
    if output == "json":
        narrate(summary)
        show_line(dataclasses.asdict(report))
    else:
        click.echo(summary)
    sys.exit(0 if report.good else 1)
