"""Streaming queries without Spark, on a log in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pipeline_world import Row, rows_of_batch

from bench.log_owner import LogOwner
from broker_io.environment import Clock
from broker_io.memory import MemoryBroker
from broker_io.system import SystemClock
from txnbuffer.pipeline.options import ReadOptions
from txnbuffer.pipeline.spark import source, tasks
from txnbuffer.pipeline.spark.source import StreamReader


class Kept:
    """A broker that readers can't close."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def close(self) -> None: ...

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def world(clock: Clock | None = None) -> Iterator[tuple[MemoryBroker, LogOwner]]:
    """A log in memory that stream readers open instead of the one at their address."""
    with (
        pytest.MonkeyPatch.context() as patch,
        MemoryBroker(clock=clock) as broker,
        LogOwner(broker, segment_size=2) as manager,
    ):
        manager.recover()
        for module in (source, tasks):
            patch.setattr(module, "open_for_reading", lambda options: Kept(broker))
        yield broker, manager


class SetClock(SystemClock):
    """A clock with the time that a test sets."""

    seconds = 1_700_000_000

    def now_ms(self) -> int:
        return self.seconds * 1000


class Query:
    """A streaming query without Spark: it plans and reads micro-batches and stores its offset as JSON."""

    def __init__(self, **options: str) -> None:
        chosen = {} if "topics" in options else {"pattern": ".*"}
        self.options = ReadOptions.of({"broker": "file:log", "partition_bytes": "300", **chosen, **options})
        self.reader = StreamReader(self.options)
        self.offset = through_json(self.reader.initialOffset())
        self.rows: list[Row] = []

    def restart(self) -> None:
        self.reader.stop()
        self.reader = StreamReader(self.options)

    def trigger(self, limit: Any = None) -> bool:
        """Run one micro-batch; whether it had messages."""
        end = through_json(self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit()))
        if end == self.offset:
            return False
        self.rows += self.read(self.offset, end)
        self.offset = end
        return True

    def read(self, start: Any, end: Any) -> list[Row]:
        rows = []
        for task in self.reader.partitions(start, end):
            for batch in self.reader.read(task):
                rows += rows_of_batch(batch)
        return rows

    def run_out(self) -> None:
        self.reader.prepareForTriggerAvailableNow()
        for _ in range(1000):
            if not self.trigger():
                return
        raise AssertionError("the query does not reach its end")


def through_json(offset: Any) -> Any:
    return json.loads(json.dumps(offset))
