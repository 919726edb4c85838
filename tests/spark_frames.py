"""Helpers of tests on Spark: assertions on data frames, and streaming queries that end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.testing import assertDataFrameEqual

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@contextmanager
def small_batches(spark: Any, rows: int = 10) -> Iterator[None]:
    """Limit the rows per batch of Python tasks, so that a few rows arrive in several batches."""
    spark.conf.set(BATCH_ROWS, rows)
    yield
    spark.conf.unset(BATCH_ROWS)


def failing(attempts: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes rows through, but fails after the first ones in the first `attempts` attempts of the task.

    An inner function is sent to the tasks as code; they can't import test modules.
    """

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        first = next(batches, None)
        if first is None:
            return
        yield first
        context = TaskContext.get()
        if context is not None and context.attemptNumber() < attempts:
            raise ArithmeticError("planned")
        yield from batches

    return pass_on


def held(directory: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes rows through; after the first ones each task creates the file `begun` and waits for the file `go`."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            Path(directory, "begun").touch()
            deadline = time.monotonic() + 400
            while not Path(directory, "go").exists() and time.monotonic() < deadline:
                time.sleep(0.05)

    return pass_on


def assert_soon_same_rows(frame: Any, expected: Any, seconds: float = 400.0) -> None:
    """As `assertDataFrameEqual`, with retries: new records of topics are visible once all earlier ones are decided."""
    count, deadline = expected.count(), time.monotonic() + seconds
    while frame.count() < count and time.monotonic() < deadline:
        time.sleep(0.2)
    assertDataFrameEqual(frame, expected)


def run_out(writer: Any, seconds: float = 400.0) -> Any:
    """Run the streaming query of a writer until it has read all records.

    Spark's planning processes have ten seconds to start; on a busy machine the query is retried.
    """
    deadline = time.monotonic() + seconds
    while True:
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(400)
        except StreamingQueryException as error:
            if time.monotonic() > deadline or "failed to connect back" not in str(error):
                raise
        else:
            return query
