"""The assignment of an export's files to tasks, and their reading, without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.pipeline.arrow import TYPES
from txnbuffer.pipeline.jobs import export
from txnbuffer.pipeline.jobs.export import MAX_TASK_BYTES, MIN_TASK_BYTES, RowGroupSlice, file_tasks, read

COLUMNS = ("topic", "position", "key", "value", "properties", "event_time")


@given(st.lists(st.integers(0, 5 * MAX_TASK_BYTES), max_size=30), st.integers(1, 16))
def test_each_file_is_read_once_by_tasks_of_similar_size(found: list[int], cores: int) -> None:
    sizes = {f"part-{number}": size for number, size in enumerate(found)}
    tasks = file_tasks(sizes, cores)
    assert [part for task in tasks for part in task] == [
        RowGroupSlice(path, number, part.slices)
        for path in sizes
        for part in [next(one for task in tasks for one in task if one.path == path)]
        for number in range(part.slices)
    ]
    share = min(max(sum(found) // cores + 1, MIN_TASK_BYTES), MAX_TASK_BYTES)
    weights = [sum(sizes[part.path] / part.slices for part in task) for task in tasks]
    assert all(weight <= 2.25 * share for weight in weights)
    assert all(tasks)


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_slices_of_a_file_contain_each_record_once(tmp_path: Path, slices: int) -> None:
    table = records(20, pa.string())
    pq.write_table(table, tmp_path / "part", row_group_size=4)
    found = [
        batch for number in range(slices) for batch in read(RowGroupSlice(f"{tmp_path}/part", number, slices), COLUMNS)
    ]
    assert pa.Table.from_batches(found, records(0, pa.string()).schema) == table


def test_large_records_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(records(20, pa.string(), bytes(1000)), tmp_path / "part", compression="none", use_dictionary=False)
    monkeypatch.setattr(export, "BATCH_BYTES", 5000)
    assert max(map(len, read(RowGroupSlice(f"{tmp_path}/part", 0, 1), COLUMNS))) < 10


def test_types_of_other_writers_are_converted(tmp_path: Path) -> None:
    """As of engines that compact a Delta table."""
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(records(20, kind).append_column("more", pa.array(range(20))), tmp_path / "part")
        found = pa.Table.from_batches(read(RowGroupSlice(f"{tmp_path}/part", 0, 1), COLUMNS))
        assert found == records(20, pa.string())


def test_a_file_without_records_gives_none(tmp_path: Path) -> None:
    pq.write_table(records(0, pa.string()), tmp_path / "part")
    assert not sum(map(len, read(RowGroupSlice(f"{tmp_path}/part", 0, 1), COLUMNS)))


def records(count: int, topic: pa.DataType, value: bytes = b"v") -> pa.Table:
    columns = {
        "topic": pa.array(["orders"] * count).cast(topic),
        "position": [{"ledger": 1, "entry": number, "batch": -1} for number in range(count)],
        "key": [b"%d" % (number % 3) for number in range(count)],
        "value": [None if number % 5 == 0 else value for number in range(count)],
        "properties": [[("n", str(number))] if number % 2 else [] for number in range(count)],
        "event_time": [None if number % 3 else number for number in range(count)],
    }
    types = {**{name: TYPES[name] for name in COLUMNS}, "topic": topic}
    return pa.table({name: pa.array(column, types[name]) for name, column in columns.items()})
