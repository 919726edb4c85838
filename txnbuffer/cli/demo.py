"""`txnbuf demo`: transactions on real input while processes are killed"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from txnbuffer.cli.commands import AddressCommand
from txnbuffer.cli.output import narrate, output_option, show_line
from txnbuffer.cli.plugin import NoPlugIn, jar_of
from txnbuffer.errors import InvalidRequest, counted

if TYPE_CHECKING:
    from txnbuffer.demo.conductor import Report


@click.command("demo", cls=AddressCommand)
@click.option("--broker", default="file", show_default=True, type=click.Choice(["file", "pulsar"]),
              help="Backend to run the demo on.")  # fmt: skip
@click.option("--pair", is_flag=True, help="With --broker file: two services, of which one follows the other.")
@click.option("--pulsar-home", envvar="TXNBUFFER_PULSAR_HOME", metavar="DIR",
              help="Directory of the Pulsar server distribution. Environment: TXNBUFFER_PULSAR_HOME.")  # fmt: skip
@click.option("--kills", default=6, show_default=True, type=click.IntRange(4), help="SIGKILLs of the service.")
@click.option("--broker-kills", default=2, show_default=True, type=click.IntRange(1), help="SIGKILLs of the broker.")
@click.option("--transactions", type=click.IntRange(500), help="Use only this many hours of the year.")
@click.option("--seed", type=int, help="Seed for the moments of the kills; random by default.")
@click.option("--dir", "directory", type=click.Path(), help="Keep the log in this new or empty directory.")
@output_option
def demo_command(
    broker: str,
    pair: bool,
    pulsar_home: str | None,
    kills: int,
    broker_kills: int,
    transactions: int | None,
    seed: int | None,
    directory: str | None,
    output: str,
) -> None:
    """Write a year of flights in transactions while the service is killed, then compare the result with the input.

    Several producer processes write one transaction per hour of 2013 to the topics `departures` and
    `arrivals`; every tenth is aborted after writing. The service is killed with SIGKILL at random moments,
    once during its recovery, and a producer is killed too, while another process reads live. Exit code 1 if
    a record was lost, duplicated, or seen uncommitted; 3 if a process of the demo failed.

    With --pair the log is on two services: the backup takes over from the killed one, whose directory is deleted once
    half-way, and which then follows.

    With --broker pulsar the demo starts a Pulsar broker and removes it at the end. The broker is killed too,
    and a standby service takes over from a killed one. It has the plug-in for plain consumers, and at the end a
    plain Pulsar reader must get the same records.
    """
    from txnbuffer.demo.conductor import Conductor
    from txnbuffer.demo.sites import ClusterSite, EmbeddedSite, PairSite

    on_cluster = broker == "pulsar"
    _check_options(directory, pair=pair, on_cluster=on_cluster)
    home = _distribution(pulsar_home) if on_cluster else ""
    _end_cleanly()
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    started = time.monotonic()
    # A killed broker may leave its directory half written.
    with tempfile.TemporaryDirectory(prefix="txnbuf-demo-", ignore_cleanup_errors=True) as scratch:
        place = scratch if on_cluster else directory or os.path.join(scratch, "log")
        removed = "" if directory else ", removed at the end"
        narrate(f"{'broker' if on_cluster else 'log'} in {place}{removed}; repeat the kills with --seed {seed}")
        chance = random.Random(seed)  # noqa: S311 - moments, no secrets
        embedded = PairSite(place, scratch, kills) if pair else EmbeddedSite(place, scratch)
        site = ClusterSite(home, place, _plug_in(home)) if on_cluster else embedded
        report = Conductor(site, kills, broker_kills if on_cluster else 0, chance, narrate, transactions).run()
    _show(report, time.monotonic() - started, output)
    sys.exit(0 if report.good else 1)


def _end_cleanly() -> None:
    """Let signals end the command as an exit does, which also ends the child processes and removes the log."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))


def _show(report: Report, seconds: float, output: str) -> None:
    if output == "json":
        narrate(_summary(report, seconds))
        show_line(dataclasses.asdict(report))
    else:
        click.echo(_summary(report, seconds))


def _summary(report: Report, seconds: float) -> str:
    result = "every committed record once, no aborted one" if report.good else "NOT equal to the input"
    of_broker = f", {report.broker_kills} of the broker" if report.broker_kills else ""
    without = f"{counted(report.takeovers, 'take-over')} without a kill, " if report.takeovers else ""
    plain = "" if report.plain_records is None else f", by a plain Pulsar reader {report.plain_records:,}"
    return (
        f"{result}: {report.records_read:,} of {report.records_expected:,} records read{plain}, "
        f"lost {report.lost}, duplicated {report.duplicated}, uncommitted seen {report.uncommitted_seen}; "
        f"{counted(report.kills, 'kill')} of the service{of_broker} and {report.producer_kills} of a producer, "
        f"{without}slowest recovery {report.recovery_seconds_max * 1000:.0f} ms, "
        f"{report.transactions_per_second:,.0f} transactions/s, {seconds:.0f} s in all"
    )


def _check_options(directory: str | None, *, pair: bool, on_cluster: bool) -> None:
    """Raises UsageError for options that do not fit the backend, InvalidRequest for a directory that is in use."""
    if pair and on_cluster:
        raise click.UsageError("--pair works with --broker file only: a cluster replicates its topics itself")
    if directory is not None:
        if on_cluster:
            raise click.UsageError("--dir works with --broker file only: the demo removes its Pulsar broker at the end")
        _check_new(directory)


def _check_new(directory: str) -> None:
    """Raises InvalidRequest unless the directory is new or empty: the demo would take its contents for its own."""
    try:
        empty = not os.listdir(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidRequest(f"the demo cannot use the directory {directory}: {error.strerror}") from error
    if not empty:
        raise InvalidRequest(f"{directory} is not empty: give a new or empty directory")


def _plug_in(home: str) -> Path | None:
    """The jar of the plug-in for a distribution, if this installation has it."""
    try:
        return jar_of(Path(home, "lib"))
    except NoPlugIn as error:
        narrate(f"without the plug-in for plain consumers: {error}")
        return None


def _distribution(home: str | None) -> str:
    """Raises InvalidRequest unless `home` is the directory of a Pulsar server distribution."""
    if not home:
        raise InvalidRequest(
            "--broker pulsar needs a Pulsar server distribution: give --pulsar-home, or run make demo BROKER=pulsar"
        )
    if not os.access(os.path.join(home, "bin", "pulsar"), os.X_OK):
        raise InvalidRequest(f"{home} is not a Pulsar server distribution: it has no executable bin/pulsar")
    return home
