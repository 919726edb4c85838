"""Columns of mutations against lists of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mutations.naive_mutations import position_of

from txnbuffer.mutations.batch import Mutation, MutationBatch

some = st.one_of(st.none(), st.binary(max_size=6))
properties = st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "1", "22", "xyz"]))
drawn = st.lists(st.tuples(some, some, properties, st.integers(0, 3)), min_size=1, max_size=12)


def mutations(rows: list[tuple[bytes | None, bytes | None, dict[str, str], int]], first: int = 1) -> list[Mutation]:
    return [
        Mutation(seqno, position_of(seqno), key, value, texts, time, seqno + 7)
        for seqno, (key, value, texts, time) in enumerate(rows, first)
    ]


@given(drawn, drawn, st.data())
def test_columns_equal_rows(one: list[Mutation], two: list[Mutation], data: st.DataObject) -> None:
    first = mutations(one)  # type: ignore[arg-type]  # drawn as tuples
    second = mutations(two, len(one) + 1)  # type: ignore[arg-type]  # drawn as tuples
    both = MutationBatch.concat([MutationBatch.of(first), MutationBatch.of(second)])
    rows = first + second
    assert list(both) == rows
    assert both.dense()
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    chosen = both.take(mask)
    assert list(chosen) == [row for row, keep in zip(rows, mask, strict=True) if keep]
    start = data.draw(st.integers(0, len(rows) - 1))
    part = both.take(slice(start, None))
    owned = part.owned()
    assert list(owned) == rows[start:]
    assert owned.owned().nbytes() == owned.nbytes()
    assert all(column.base is None for column in (owned.seqnos, owned.messages.keys.offsets, owned.positions.entries))
    assert owned.payload() == sum(len(row.key or b"") + len(row.value or b"") for row in rows[start:])


@given(drawn, st.integers(0, 12), st.integers(1, 12), st.integers(0, 40))
def test_fitting_counts_whole_rows(one: list[Mutation], start: int, limit: int, max_bytes: int) -> None:
    rows = mutations(one)  # type: ignore[arg-type]  # drawn as tuples
    start = min(start, len(rows) - 1)
    sizes = [len(row.key or b"") + len(row.value or b"") for row in rows][start : start + limit]
    expected = sum(1 for count in range(1, len(sizes) + 1) if sum(sizes[:count]) <= max_bytes)
    batch = MutationBatch.of(rows)
    assert batch.fitting(start, limit, max_bytes) == expected
    parts = list(batch.parts(max_bytes))
    assert [row for part in parts for row in part] == rows
    assert all(len(part) == 1 or part.payload() <= max_bytes for part in parts)


def test_dense_detects_any_other_order() -> None:
    batch = MutationBatch.of(mutations([(None, None, {}, 0)] * 4))
    assert batch.dense()
    assert not batch.take(np.array([0, 1, 3])).dense()
    assert not batch.take(np.array([0, 2, 1, 3])).dense()
    assert not batch.take(np.array([0, 0, 2])).dense()
