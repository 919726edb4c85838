"""Exports to Delta tables without Spark: the values of a run's records are its number."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from txnbuffer.model import Position
from txnbuffer.pipeline.arrow import schema_of
from txnbuffer.pipeline.exports import VERSIONS, ExportDirectory, ExportRun
from txnbuffer.pipeline.offsets import Offset, ReadProgress

COLUMNS = ("topic", "position", "value", "publish_time")
ROWS = 2
"""Rows of each run, one per file."""


def run_of(number: int, kind: str, records: int = ROWS) -> ExportRun:
    return ExportRun(number, kind, COLUMNS, Offset({"orders": ReadProgress(Position(1, number), "9f")}), records)


def write(directory: ExportDirectory, number: int, rows: int = ROWS) -> None:
    """Write the files that Spark writes for a run, with its number as the value of each row, and one without rows."""
    os.makedirs(directory.writing)
    Path(directory.writing, "_SUCCESS").touch()
    for file in range(rows + 1):
        time = datetime.datetime(2026, 1, number % 28 + 1, 0, 0, 0, 123456, datetime.UTC)
        row = {"topic": "orders", "position": {"ledger": number, "entry": file, "batch": -1}}
        row |= {"value": b"%d" % number, "publish_time": time}
        table = pa.Table.from_pylist([row] if file < rows else [], schema_of(COLUMNS))
        pq.write_table(table, f"{directory.writing}/part-{file}.parquet")


def export(directory: ExportDirectory, rows: int = ROWS) -> ExportRun:
    with directory.locked():
        directory.clear()
        last = directory.last()
        number = 1 if last is None else last.number + 1
        write(directory, number, rows)
        return directory.publish(run_of(number, directory.kind, rows))


def values_in(path: str) -> list[int]:
    """The values that a reader of the table gets."""
    if not DeltaTable.is_deltatable(path):
        return []
    return sorted(int(value) for value in DeltaTable(path).to_pyarrow_table()["value"].to_pylist())


def expected(kind: str, last: int) -> list[int]:
    return [number for number in range(1 if kind == VERSIONS else last, last + 1) for _ in range(ROWS)]
