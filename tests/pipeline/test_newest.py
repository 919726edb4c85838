"""The latest record of each key, in Arrow columns: against a dictionary."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txnbuffer.pipeline.arrow import TYPES
from txnbuffer.pipeline.spark import newest

Place = tuple[int, int, int]
Row = tuple[str, bytes, Place, int]

axes = st.one_of(st.integers(-1, 4), st.sampled_from([2**62, -(2**62)]))
# Keys of one short length are compared as numbers, others as bytes: padding with zeros must not make keys equal.
short, word, any_key = [b"x", b"\xff"], [bytes(7) + b"x", b"x" + bytes(7)], [b"", b"x", b"x\0", bytes(8) + b"x"]
keys = st.sampled_from([short, word, any_key])
rows = keys.flatmap(
    lambda some: st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(some), st.tuples(axes, axes, axes)))
)


def batch(found: list[Row]) -> pa.RecordBatch:
    topics, keys, places, numbers = zip(*found, strict=True) if found else ((), (), (), ())
    names = ("ledger", "entry", "batch")
    position = pa.array([dict(zip(names, place, strict=True)) for place in places], TYPES["position"])
    columns = [pa.array(topics, pa.string()), pa.array(keys, pa.binary()), position, pa.array(numbers, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, names=["topic", "key", "position", "number"])


def numbers_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [number for one in batches for number in one["number"].to_pylist()]


@settings(max_examples=200)
@given(rows, st.lists(st.integers(0, 40), max_size=3), st.sampled_from([None, 0]), st.sampled_from([1, 5, 500_000]))
def test_only_records_that_are_not_superseded_remain(
    places: list[tuple[str, bytes, Place]], cuts: list[int], held: int | None, first_rows: int
) -> None:
    # No two records have the same position.
    found: list[Row] = [(*row, number) for number, row in enumerate({row[2]: row for row in places}.values())]
    borders = sorted({0, len(found), *(cut for cut in cuts if cut < len(found))})
    batches = [batch(found[low:high]) for low, high in itertools.pairwise(borders)]
    last: dict[tuple[str, bytes], Row] = {}
    for row in sorted(found, key=lambda row: row[2]):
        last[row[0], row[1]] = row
    wanted = sorted(row[3] for row in last.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newest, "FIRST_ROWS", first_rows)
        thinned = numbers_of([*newest.newest(batches, held)])
        assert set(wanted) <= set(thinned)
        assert len(set(thinned)) == len(thinned)
        if held is None:
            assert sorted(thinned) == wanted
    assert sorted(numbers_of([*newest.newest([batch([found[number] for number in thinned])])])) == wanted


def test_large_records_are_deduplicated_before_they_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Row] = [("a", b"k", (1, number, -1), number) for number in range(400)]
    looked: list[int] = []
    whole = newest.thinned
    monkeypatch.setattr(newest, "thinned", lambda table: looked.append(len(table)) or whole(table))
    monkeypatch.setattr(newest, "HELD_BYTES", 1000)
    assert numbers_of([*newest.newest([batch(found[low : low + 10]) for low in range(0, 400, 10)])]) == [399]
    assert max(looked) <= 40


def test_ordered_records_keep_their_order_and_nothing_is_sorted() -> None:
    found: list[Row] = [("a", b"%d" % (number % 3), (1, number, -1), number) for number in range(9)]
    table = pa.Table.from_batches([batch(found)])
    assert newest.order_of(table) is None
    assert numbers_of(newest.thinned(table).to_batches()) == [6, 7, 8]


def test_keys_that_differ_only_in_trailing_zeros_are_different() -> None:
    found: list[Row] = [("a", key, (1, number, -1), number) for number, key in enumerate([b"x", b"x", b"x\0", b"x\0"])]
    assert numbers_of([*newest.newest([batch(found[:2]), batch(found[2:])])]) == [1, 3]
