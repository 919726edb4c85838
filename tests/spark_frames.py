"""What tests on Spark share: its own assertion on data frames, and streaming queries that come to an end."""

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
    """Tasks of Python are given so many rows at a time: a few rows come in several batches."""
    spark.conf.set(BATCH_ROWS, rows)
    yield
    spark.conf.unset(BATCH_ROWS)


def failing(attempts: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes rows on, but fails behind the first ones in so many attempts of the task.

    A function in a function goes to the tasks as code: they can't import what tests import.
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
    """Passes rows on; behind the first ones each task says `begun`, and waits for `go`, files of a directory."""

    def pass_on(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            Path(directory, "begun").touch()
            deadline = time.monotonic() + 400
            while not Path(directory, "go").exists() and time.monotonic() < deadline:
                time.sleep(0.05)

    return pass_on


def assert_soon_same_rows(frame: Any, expected: Any, seconds: float = 400.0) -> None:
    """As `assertDataFrameEqual`, of topics: what was just committed is read once all before it is decided."""
    count, deadline = expected.count(), time.monotonic() + seconds
    while frame.count() < count and time.monotonic() < deadline:
        time.sleep(0.2)
    assertDataFrameEqual(frame, expected)


def run_out(writer: Any, seconds: float = 400.0) -> Any:
    """The streaming query of a writer, run until it has read what is there.

    Spark gives the processes that plan ten seconds to start; where others keep the machine busy it tries again.
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
