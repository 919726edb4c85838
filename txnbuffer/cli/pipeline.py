"""`txnbuf pipeline`: Spark jobs over committed records"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from broker_io import is_cluster
from broker_io.addresses import shown_address
from broker_io.errors import InvalidAddress
from txnbuffer.cli.commands import CommandGroup, address_argument, complete_topic
from txnbuffer.cli.global_options import file_and_profile, load_given
from txnbuffer.cli.options import ACCESS, LogAddress, access_options
from txnbuffer.cli.output import narrate, output_option, show_record, show_rows
from txnbuffer.errors import InvalidRequest
from txnbuffer.pipeline.delta import DELTA, PARQUET, check_outside_log, find
from txnbuffer.pipeline.delta import target as target_of
from txnbuffer.pipeline.exports import LATEST, VERSIONS, ExportRun
from txnbuffer.rpc.service_access import ServiceAccess


@click.group("pipeline", cls=CommandGroup)
def pipeline_command() -> None:
    """Run Spark jobs on logs that are too big for one process.

    Jobs run on all cores of this machine, on a Spark cluster with --master, or under spark-submit. They need
    txnbuffer[spark] and Java 17.
    """


class Job(NamedTuple):
    """How a job runs: the master and settings of Spark, and the options of the data source."""

    master: str | None
    settings: dict[str, str]
    source: dict[str, str]


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every job, as one argument `job`."""

    @functools.wraps(function)
    def with_job(
        *arguments: Any, master: str | None, conf: tuple[str, ...], config_path: str | None, flags: tuple[str, ...],
        access: ServiceAccess, **named: Any,
    ) -> Any:  # fmt: skip
        settings = dict(_pair("--conf", text) for text in conf)
        source = dict(_pair("--set", text) for text in flags)
        if unknown := sorted(name for name in source if not name.startswith("pulsar.")):
            raise InvalidRequest(f"--set {unknown[0]} is invalid: jobs accept settings of the section pulsar only")
        if is_cluster(named["address"]):
            source |= file_and_profile(click.get_current_context(), config_path)
        elif config_path is not None:
            source["config"] = config_path
        if named["address"].startswith("txnbuf:"):
            files = {name: getattr(access, name) for name in ACCESS}
            source |= {name: path for name, path in files.items() if path is not None}
        return function(*arguments, job=Job(master, settings, source), **named)

    decorated: Callable[..., Any] = with_job
    for option in (
        access_options,
        click.option(
            "--set",
            "flags",
            multiple=True,
            metavar="pulsar.KEY=VALUE",
            help="One setting; repeatable.",
        ),
        click.option("--config", "config_path", metavar="FILE", help="Configuration file (TOML)."),
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="One setting of Spark; repeatable."),
        click.option("--master", metavar="URL", help="Spark master; by default local[*], or that of spark-submit."),
    ):
        decorated = option(decorated)
    return decorated


def topics_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("--pattern", metavar="REGEX", help="Only topics whose whole name matches.")(function)
    return click.option(
        "--topic", "topics", multiple=True, metavar="NAME", shell_complete=complete_topic,
        help="Only this topic; repeatable.",
    )(function)  # fmt: skip


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidRequest(f"{option} {text} is invalid: write KEY=VALUE")
    return name, value


@pipeline_command.command("export")
@address_argument
@click.argument("directory", metavar="DIR")
@topics_options
@click.option("--latest", is_flag=True, help="Export the latest value of each key instead of all records.")
@click.option(
    "--columns", metavar="NAMES", help="Columns, separated by commas; topic and position are always exported."
)
@click.option("--messages", type=click.IntRange(1), metavar="N", help="Maximum number of log messages per run.")
@click.option("--continuous", is_flag=True, help="Export again and again until SIGTERM or SIGINT.")
@click.option("--every", type=click.FloatRange(0.1), default=60.0, show_default=True, metavar="SECONDS",
              help="With --continuous: time from the start of one run to the next.")  # fmt: skip
@click.option("--format", "form", type=click.Choice([PARQUET, DELTA]), default=PARQUET, show_default=True,
              help="File format; delta needs txnbuffer[delta].")  # fmt: skip
@click.option(
    "--skip-lost",
    is_flag=True,
    help="Skip records that were trimmed or deleted before they were exported, instead of failing.",
)
@job_options
@output_option
def export(
    address: str, directory: str, topics: tuple[str, ...], pattern: str | None, latest: bool, columns: str | None,
    messages: int | None, continuous: bool, every: float, form: str, skip_lost: bool, job: Job, output: str,
) -> None:  # fmt: skip
    """Write committed records of ADDRESS to DIR, each exactly once.

    Each run continues where the last one ended, and is atomic: a killed run leaves nothing. By default DIR is a table
    of Parquet files to which each run adds a directory. With --latest the table is DIR/latest, and each run replaces
    it; it has neither deleted keys nor records without a key. With --format delta DIR is a Delta table, and each run
    is one commit.
    """
    from txnbuffer.pipeline.jobs.export import COLUMNS, Export, columns_of
    from txnbuffer.pipeline.jobs.running import check_reading, session
    from txnbuffer.pipeline.options import reading_options

    options = reading_options(address, topics, pattern, job.source)
    options["fail_on_data_loss"] = "false" if skip_lost else "true"
    target = target_of(directory, LATEST if latest else VERSIONS, form)
    check_outside_log(target, address)
    wanted = COLUMNS if columns is None else tuple(name.strip() for name in columns.split(","))
    columns_of(wanted, target.kind)
    if not continuous:
        check_reading(options)
    stop = threading.Event()
    with target.locked(), session(job.master, job.settings) as spark:
        if continuous:  # after Spark's start, which installs its own SIGINT handler
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
        work = Export(spark, options, target, columns=wanted, messages=messages, on_progress=narrate)
        run = work.follow(stop, every) if continuous else work.run()
    if run is None:
        narrate("no new records")
    show_rows(_reached(run or target.last()), output, title=target.table, empty="nothing exported")


def _reached(run: ExportRun | None) -> list[dict[str, Any]]:
    if run is None:
        return []
    return [
        {"topic": topic, "exported_to": str(reached.at), "run": run.number, "records_of_run": run.records}
        for topic, reached in sorted(run.offset.topics.items())
    ]


@pipeline_command.command("audit")
@address_argument
@click.argument("directory", metavar="DIR")
@click.option("--html", metavar="FILE", help="Also write the report as an HTML page with plots.")
@job_options
@output_option
def audit(address: str, directory: str, html: str | None, job: Job, output: str) -> None:
    """Compare every key of the export in DIR with the log of ADDRESS, up to the end of the export.

    Exit code 1 if keys differ (the first are shown) or an exported topic was deleted. Records that were trimmed from
    the log are not compared.
    """
    from txnbuffer.pipeline.jobs.audit import as_json, as_page
    from txnbuffer.pipeline.jobs.audit import audit as compare
    from txnbuffer.pipeline.jobs.running import check_reading, session
    from txnbuffer.pipeline.options import reading_options

    _check_page(html)
    target = find(directory)
    options = reading_options(address, (), None, job.source)
    check_reading(options)
    with session(job.master, job.settings) as spark:
        found = compare(
            spark, {name: text for name, text in options.items() if name != "pattern"}, target, on_progress=narrate
        )
    _write(html, as_page(found, target.path, address))
    report = as_json(found)
    if output == "json":
        show_record(report, output)
    else:
        show_rows(report["topics"], output, title=target.path)
        show_rows(report["differences"], output, title="first different keys", empty="none")
    sys.exit(0 if found.same else 1)


def _check_page(path: str | None) -> None:
    """Raises InvalidRequest before a long job starts if its report cannot be written."""
    if path is None:
        return
    place = path if os.path.lexists(path) else os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(place, os.W_OK):
        raise InvalidRequest(
            f"cannot write the report to {path}: give a file that is writable, in a directory that exists"
        )


def _write(path: str | None, page: str) -> None:
    if path is None:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise InvalidRequest(f"cannot write the report to {path}: {error.strerror}") from None
    narrate(f"report: {path}")


@pipeline_command.command("profile")
@address_argument
@topics_options
@click.option("--html", metavar="FILE", help="Also write the report as an HTML page with plots.")
@job_options
@output_option
def profile(
    address: str, topics: tuple[str, ...], pattern: str | None, html: str | None, job: Job, output: str
) -> None:
    """Show the sizes, aborts, late records, long transactions and hot keys of ADDRESS."""
    from txnbuffer.pipeline.jobs.profile import as_page
    from txnbuffer.pipeline.jobs.profile import profile as run_profile
    from txnbuffer.pipeline.jobs.running import check_reading, session
    from txnbuffer.pipeline.options import reading_options

    _check_page(html)
    options = reading_options(address, topics, pattern, job.source)
    check_reading(options)
    with session(job.master, job.settings) as spark:
        found = run_profile(spark, options, on_progress=narrate)
    _write(html, as_page(found, address))
    report = dataclasses.asdict(found)
    if output == "json":
        show_record(report, output)
        return
    for name in ("topics", "long_transactions", "late", "hot_keys"):
        show_rows(report[name], output, title=name.replace("_", " "), empty="none")


@pipeline_command.command("recover")
@address_argument
@topics_options
@click.option("--write", "wanted", is_flag=True, help="Write lost or differing snapshots; no service may be running.")
@click.option("--all", "everything", is_flag=True, help="With --write: also rewrite snapshots that are correct.")
@job_options
@output_option
def recover(
    address: str, topics: tuple[str, ...], pattern: str | None, wanted: bool, everything: bool, job: Job, output: str
) -> None:
    """Rebuild the buffer snapshots of many topics from their logs in parallel.

    Rebuilds the state of each topic from its whole log and compares it with the topic's snapshot. --write replaces
    snapshots that are lost or differ; without it, exit code 1 if any would be replaced. If ledgers were trimmed, a
    snapshot that knows them is kept unless it is wrong; if it is lost or wrong, their information is lost. No
    service may own the log at the same time.
    """
    from txnbuffer.pipeline.jobs.recover import TRIMMED
    from txnbuffer.pipeline.jobs.recover import recover as rebuild
    from txnbuffer.pipeline.jobs.running import check_reading, session
    from txnbuffer.pipeline.options import reading_options

    options = reading_options(address, topics, pattern, job.source)
    check_reading(options)
    with session(job.master, job.settings) as spark:
        rows = rebuild(spark, options, everything=everything, wanted=wanted, on_progress=narrate)
    show_rows(rows, output, empty="no topic has transactions")
    sys.exit(0 if all(row["written"] or row["snapshot"] in ("equal", TRIMMED) for row in rows) else 1)


@pipeline_command.command("compact")
@address_argument
@topics_options
@job_options
@output_option
def compact(address: str, topics: tuple[str, ...], pattern: str | None, job: Job, output: str) -> None:
    """Compact topics of a log file:DIR that has more keys or bytes than one process should handle.

    Does what `txnbuf compact file:DIR TOPIC` does, for each topic of --topic or --pattern, or else for each that
    has a policy. No service may own the log at the same time, and DIR must have the same path on all workers. Shows
    the same statistics.
    """
    from txnbuffer.pipeline.jobs.compact import compact as run
    from txnbuffer.pipeline.jobs.compact import with_policy
    from txnbuffer.pipeline.jobs.running import check_reading, session
    from txnbuffer.pipeline.options import ReadOptions, reading_options
    from txnbuffer.pipeline.planning import names
    from txnbuffer.pipeline.spark.tasks import anywhere

    if not address.startswith("file:"):
        raise InvalidAddress(f"{shown_address(address)!r} is not a directory: give file:DIR")
    source = {name: text for name, text in job.source.items() if name != "config"}
    options = reading_options(address, topics, pattern, source)
    check_reading(options)
    chosen = anywhere(ReadOptions.of(options))
    config = load_given(click.get_current_context(), job.source.get("config")).config
    with LogAddress(chosen.broker, config).open_for_writing() as broker:
        wanted = names(broker, chosen)
        if not topics and pattern is None:
            wanted = with_policy(broker, wanted)
        if not wanted:
            show_rows([], output, empty="no topic has a policy")
            return
        with session(job.master, job.settings) as spark:
            rows, failures = run(spark, broker, config.compaction, wanted, on_progress=narrate)
    show_rows(rows, output, title="compaction", empty="no topic was compacted")
    for error in failures[:-1]:
        narrate(str(error))
    if failures:
        raise failures[-1]
