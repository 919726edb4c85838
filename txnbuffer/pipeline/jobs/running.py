"""Helpers of all jobs: a Spark session, options, progress lines, and errors of Spark as errors of this package"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from broker_io.errors import Error, MissingDependency
from txnbuffer.model import Position
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.planning import names
from txnbuffer.progress import is_reported, report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OnProgress = Callable[[str], None]

PROGRESS_INTERVAL = 5.0
"""Seconds between two progress lines of a job."""
UPDATE_INTERVAL = 0.5
"""Seconds between two updates of a bar."""
Stages: TypeAlias = list[tuple[int, int]]
"""The completed and all tasks of each running stage."""

SETTINGS = {
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_CALL = re.compile(r"\A\s*An error occurred while calling \S+\s*: (?=\S)")
_CAUSES = re.compile(r"^\s*Caused by: (.+?)\s*$", re.MULTILINE)
_OWN_ERROR = re.compile(r"^((?:broker_io|snapshots|txnbuffer)[\w.]*\.(\w+)): (.*)", re.MULTILINE)


class JobFailed(Error):
    """A Spark job failed; `exit_code` and `retryable` are those of the cause, if it is an error of this package."""

    def __init__(self, message: str, exit_code: int = 5, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable  # type: ignore[misc]  # a class attribute otherwise
        self.exit_code = exit_code  # type: ignore[misc]  # a class attribute otherwise


def check_reading(options: Mapping[str, str]) -> None:
    """Open the broker and find the topics, so that their errors are raised before a JVM starts."""
    try:
        from txnbuffer.pipeline.spark.tasks import open_for_reading
    except ImportError as error:
        raise _missing(error) from None
    wanted = ReadOptions.of(options)
    with open_for_reading(wanted) as broker:
        names(broker, wanted, require_all=wanted.fail_on_data_loss)


def _missing(error: ImportError) -> MissingDependency:
    return MissingDependency(f"jobs require Spark ({error}): pip install 'txnbuffer[spark]'")


@contextmanager
def session(master: str | None = None, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session for one job, which ends at SIGTERM. Under spark-submit its options apply, unless `master` is given.

    Raises MissingDependency without PySpark or Java, JobFailed.
    """
    try:
        from txnbuffer.pipeline.spark.session import open_session
    except ImportError as error:
        raise _missing(error) from None
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted and not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise MissingDependency("jobs require Java 17 for Spark: install it, or set JAVA_HOME")
    with spark_errors("Spark does not start"):
        if master is None and not submitted:
            master = "local[*]"
        spark = open_session(master, settings={**SETTINGS, **(settings or {})})
    with _ending(spark), spark_errors():
        yield spark


@contextmanager
def spark_errors(what: str = "Spark failed") -> Iterator[None]:
    """Raise errors of Spark, and of the connection to its JVM, as JobFailed with a message of one line."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        try:
            yield
        except (PySparkException, Py4JError) as error:
            if isinstance(error, Py4JNetworkError):
                raise
            failed = job_error(str(error), what)  # `str` asks the JVM for an exception's message
        else:
            return
    except (ConnectionError, EOFError, Py4JNetworkError) as error:
        failed = JobFailed(
            f"{what}: its JVM has ended or does not answer ({first_line(str(error))}); if it ran out of memory, raise "
            f"--conf spark.driver.memory"
        )
    raise failed from None


@contextmanager
def _ending(spark: SparkSession) -> Iterator[None]:
    """Stop a session after a job, or at SIGTERM, which hides the errors of calls that wait for Spark."""
    ending: list[threading.Thread] = []

    def end(*_: object) -> None:
        if not ending:  # in another thread: this one may be in a call of the JVM
            ending.append(threading.Thread(target=_stop, args=(spark,), daemon=True))
            ending[0].start()

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception:
        if not ending:
            raise
    finally:
        for thread in ending:
            thread.join()
        with suppress(Exception):  # the JVM may have ended; errors of the job are reported already
            spark.stop()
        signal.signal(signal.SIGTERM, before)
    if ending:
        raise SystemExit(128 + signal.SIGTERM)


def _stop(spark: SparkSession) -> None:
    spark.sparkContext.setLogLevel("OFF")
    spark.sparkContext.stop()


@contextmanager
def report_progress(spark: SparkSession, what: str, on_progress: OnProgress) -> Iterator[None]:
    """Report the progress of Spark while a job runs, and raise its errors as `spark_errors`.

    It goes to the callback of `txnbuffer.progress.reporting`; if there is none, as lines to `on_progress`.
    """
    ended = threading.Event()
    with report(what, "tasks") as progress:

        def update(stages: Stages, _: float) -> None:
            progress.update(sum(done for done, _ in stages), sum(total for _, total in stages))

        def print_line(stages: Stages, seconds: float) -> None:
            tasks = ", ".join(f"{done} of {total} tasks done" for done, total in stages)
            on_progress(f"{what}: {tasks or 'planning'}, {seconds:.0f} s")

        call = (update, UPDATE_INTERVAL) if is_reported() else (print_line, PROGRESS_INTERVAL)
        reporter = threading.Thread(target=_report, args=(spark, ended, *call), daemon=True)
        reporter.start()
        try:
            with spark_errors():
                yield
        finally:
            ended.set()
            reporter.join()


def _report(
    spark: SparkSession, ended: threading.Event, show: Callable[[Stages, float], None], interval: float
) -> None:
    with suppress(JobFailed), spark_errors():  # the job itself raises them
        tracker, began = spark.sparkContext.statusTracker(), time.monotonic()
        while not ended.wait(interval):
            stages = [info for number in tracker.getActiveStageIds() if (info := tracker.getStageInfo(number))]
            show([(info.numCompletedTasks, info.numTasks) for info in stages], time.monotonic() - began)


def job_error(text: str, failed: str = "Spark failed") -> JobFailed:
    """The error for Spark's report of an error in a task or during planning, as one line.

    It has the message of an error of this package, if the report contains one.
    """
    found = _OWN_ERROR.findall(text)
    if not found:
        report = _CALL.sub("", text)
        cause = _CAUSES.findall(report)[-1:]
        return JobFailed(f"{failed}: {first_line(report)}{''.join(f' ({one})' for one in cause)}")
    dotted, name, what = found[-1]
    kind = getattr(importlib.import_module(dotted.rpartition(".")[0]), name, None)
    if isinstance(kind, type) and issubclass(kind, Error):
        return JobFailed(what, kind.exit_code, retryable=kind.retryable)
    return JobFailed(what)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no error message")


def source(spark: SparkSession, options: Mapping[str, str], **more: str | None) -> DataFrame:
    """The data frame of the data source `txnbuffer`; options that are None are left out."""
    wanted = {**options, **{name: text for name, text in more.items() if text is not None}}
    return spark.read.format("txnbuffer").options(**wanted).load()


def places(positions: Mapping[str, Position]) -> str:
    """Positions by topic as JSON, for the options `start` and `end`."""
    return json.dumps({topic: str(position) for topic, position in positions.items()})
