"""`txnbuf demo`: the main job on real input, with kills."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import tempfile
import time

import click

from txnbuffer.cli.output import narrate, output_option, show_line
from txnbuffer.errors import InvalidRequest


@click.command("demo")
@click.option("--kills", default=6, show_default=True, type=click.IntRange(4), help="SIGKILLs for the service.")
@click.option("--transactions", type=click.IntRange(500), help="Only the first so many hours of the year.")
@click.option("--seed", type=int, help="Choose the moments of the kills; random unless given.")
@click.option("--dir", "directory", type=click.Path(), help="Keep the log in this directory (must be new or empty).")
@output_option
def command(kills: int, transactions: int | None, seed: int | None, directory: str | None, output: str) -> None:
    """Write a year of flights in transactions while the service is killed; compare the end with the source.

    One transaction per hour of 2013 over the topics `departures` and `arrivals`, from several producer
    processes, one in ten aborted after writing. The service is killed with SIGKILL at random moments, once
    during its recovery, and so is a producer, while another process follows live. Exit code 1 unless
    nothing was lost, doubled, or seen uncommitted.
    """
    from txnbuffer.demo.conductor import Conductor
    from txnbuffer.demo.processes import Service

    if directory is not None:
        _check_new(directory)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="txnbuf-demo-") as scratch:
        place = directory or os.path.join(scratch, "log")
        narrate(f"log in {place}; the kills come from --seed {seed}")
        chance = random.Random(seed)  # noqa: S311 - moments, no secrets
        service = Service(place, os.path.join(scratch, "service.log"))
        report = Conductor(service, kills, chance, narrate, transactions).run()
    verdict = "every committed record once, no aborted one" if report.good else "NOT what the source says"
    summary = (
        f"{verdict}: {report.records_read:,} of {report.records_expected:,} records read, "
        f"lost {report.lost}, duplicated {report.duplicated}, uncommitted seen {report.uncommitted_seen}; "
        f"{report.kills} kills of the service and {report.producer_kills} of a producer, "
        f"slowest recovery {report.recovery_seconds_max * 1000:.0f} ms, "
        f"{report.transactions_per_second:,.0f} transactions/s, {time.monotonic() - started:.0f} s in all"
    )
    if output == "json":
        narrate(summary)
        show_line(dataclasses.asdict(report))
    else:
        click.echo(summary)
    sys.exit(0 if report.good else 1)


def _check_new(directory: str) -> None:
    """Raises InvalidRequest unless nothing stands there: what it holds would be taken for the demo's own."""
    try:
        empty = not os.listdir(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidRequest(f"{directory} can't hold the log of the demo: {error.strerror}") from error
    if not empty:
        raise InvalidRequest(f"{directory} is not empty: give a new or an empty directory")
