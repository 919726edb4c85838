"""How tasks share the files of an export, and read them: without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.pipeline.arrow import TYPES
from txnbuffer.pipeline.jobs import export
from txnbuffer.pipeline.jobs.export import MAX_TASK_BYTES, MIN_TASK_BYTES, RowGroups, read, shares

COLUMNS = ("topic", "position", "key", "value", "properties", "event_time")


@given(st.lists(st.integers(0, 5 * MAX_TASK_BYTES), max_size=30), st.integers(1, 16))
def test_each_file_is_read_once_in_shares_that_are_alike(found: list[int], cores: int) -> None:
    sizes = {f"part-{number}": size for number, size in enumerate(found)}
    tasks = shares(sizes, cores)
    assert [piece for task in tasks for piece in task] == [
        RowGroups(path, number, piece.pieces)
        for path in sizes
        for piece in [next(one for task in tasks for one in task if one.path == path)]
        for number in range(piece.pieces)
    ]
    share = min(max(sum(found) // cores + 1, MIN_TASK_BYTES), MAX_TASK_BYTES)
    weights = [sum(sizes[piece.path] / piece.pieces for piece in task) for task in tasks]
    assert all(weight <= 2.25 * share for weight in weights)
    assert all(tasks)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_of_a_file_hold_each_record_once(tmp_path: Path, pieces: int) -> None:
    table = records(20, pa.string())
    pq.write_table(table, tmp_path / "part", row_group_size=4)
    found = [
        batch for number in range(pieces) for batch in read(RowGroups(f"{tmp_path}/part", number, pieces), COLUMNS)
    ]
    assert pa.Table.from_batches(found, records(0, pa.string()).schema) == table


def test_large_records_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(records(20, pa.string(), bytes(1000)), tmp_path / "part", compression="none", use_dictionary=False)
    monkeypatch.setattr(export, "BATCH_BYTES", 5000)
    assert max(map(len, read(RowGroups(f"{tmp_path}/part", 0, 1), COLUMNS))) < 10


def test_files_that_others_wrote_with_types_of_their_own_have_those_of_the_source(tmp_path: Path) -> None:
    """As engines do that move the records of a Delta table into larger files."""
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(records(20, kind).append_column("more", pa.array(range(20))), tmp_path / "part")
        found = pa.Table.from_batches(read(RowGroups(f"{tmp_path}/part", 0, 1), COLUMNS))
        assert found == records(20, pa.string())


def test_a_file_without_records_gives_none(tmp_path: Path) -> None:
    pq.write_table(records(0, pa.string()), tmp_path / "part")
    assert not sum(map(len, read(RowGroups(f"{tmp_path}/part", 0, 1), COLUMNS)))


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
