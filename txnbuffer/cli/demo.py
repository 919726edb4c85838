"""`txnbuf demo`: the main job on real input, with kills."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import click

from txnbuffer.cli.output import narrate, output_option, show_line
from txnbuffer.errors import InvalidRequest

if TYPE_CHECKING:
    from txnbuffer.demo.conductor import Report


@click.command("demo")
@click.option("--broker", default="file", show_default=True, type=click.Choice(["file", "pulsar"]), help="Where.")
@click.option(
    "--pulsar-home",
    envvar="TXNBUFFER_PULSAR_HOME",
    metavar="DIR",
    help="Pulsar's server distribution [env: TXNBUFFER_PULSAR_HOME].",
)
@click.option("--kills", default=6, show_default=True, type=click.IntRange(4), help="SIGKILLs for the service.")
@click.option("--broker-kills", default=2, show_default=True, type=click.IntRange(1), help="And for a broker.")
@click.option("--transactions", type=click.IntRange(500), help="Only the first so many hours of the year.")
@click.option("--seed", type=int, help="Choose the moments of the kills; random unless given.")
@click.option("--dir", "directory", type=click.Path(), help="Keep the log in this directory (must be new or empty).")
@output_option
def command(
    broker: str,
    pulsar_home: str | None,
    kills: int,
    broker_kills: int,
    transactions: int | None,
    seed: int | None,
    directory: str | None,
    output: str,
) -> None:
    """Write a year of flights in transactions while the service is killed; compare the end with the source.

    One transaction per hour of 2013 over the topics `departures` and `arrivals`, from several producer
    processes, one in ten aborted after writing. The service is killed with SIGKILL at random moments, once
    during its recovery, and so is a producer, while another process follows live. Exit code 1 unless
    nothing was lost, doubled, or seen uncommitted.

    With --broker pulsar all of it happens on a broker that is started for the demo and goes with it. The
    broker is killed too, and another service stands by and takes over from one that is killed.
    """
    from txnbuffer.demo.conductor import Conductor
    from txnbuffer.demo.sites import ClusterSite, EmbeddedSite, Site

    beside = broker == "pulsar"
    if directory is not None:
        if beside:
            raise click.UsageError("--dir is for --broker file: what a broker stores goes with the demo")
        _check_new(directory)
    home = _distribution(pulsar_home) if beside else ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    started = time.monotonic()
    # A broker that was killed may leave its directory half made.
    with tempfile.TemporaryDirectory(prefix="txnbuf-demo-", ignore_cleanup_errors=True) as scratch:
        place = scratch if beside else directory or os.path.join(scratch, "log")
        narrate(f"{'broker and its log' if beside else 'log'} in {place}; the kills come from --seed {seed}")
        chance = random.Random(seed)  # noqa: S311 - moments, no secrets
        site: Site = ClusterSite(home, place) if beside else EmbeddedSite(place, scratch)
        report = Conductor(site, kills, broker_kills if beside else 0, chance, narrate, transactions).run()
    summary = _summary(report, time.monotonic() - started)
    if output == "json":
        narrate(summary)
        show_line(dataclasses.asdict(report))
    else:
        click.echo(summary)
    sys.exit(0 if report.good else 1)


def _summary(report: Report, seconds: float) -> str:
    verdict = "every committed record once, no aborted one" if report.good else "NOT what the source says"
    of_broker = f", {report.broker_kills} of the broker" if report.broker_kills else ""
    return (
        f"{verdict}: {report.records_read:,} of {report.records_expected:,} records read, "
        f"lost {report.lost}, duplicated {report.duplicated}, uncommitted seen {report.uncommitted_seen}; "
        f"{report.kills} kills of the service{of_broker} and {report.producer_kills} of a producer, "
        f"slowest recovery {report.recovery_seconds_max * 1000:.0f} ms, "
        f"{report.transactions_per_second:,.0f} transactions/s, {seconds:.0f} s in all"
    )


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


def _distribution(home: str | None) -> str:
    """Raises InvalidRequest unless it is the directory of a server distribution."""
    if not home:
        raise InvalidRequest(
            "a broker needs Pulsar's server distribution: say make demo BROKER=pulsar, or --pulsar-home"
        )
    if not os.access(os.path.join(home, "bin", "pulsar"), os.X_OK):
        raise InvalidRequest(f"{home} is no server distribution of Pulsar: it has no bin/pulsar")
    return home
