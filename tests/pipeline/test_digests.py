"""Digests of records by key, and the ranges that keys are cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.pipeline.digests import MASK, Tally, added, cut_points, range_of, record_digest

records = st.tuples(
    st.text(max_size=3), st.none() | st.binary(max_size=4), st.none() | st.binary(max_size=4),
    st.none() | st.tuples(*[st.integers(-1, 2**40)] * 3), st.none() | st.integers(0, 2**53),
    st.none() | st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
)  # fmt: skip


@given(records, records)
def test_other_records_have_other_digests(one: tuple, other: tuple) -> None:
    # Digests are compared by topic and key, and by the same columns.
    compared = [None not in pair for pair in zip(one[3:], other[3:], strict=True)]
    one, other = (
        (*record[:3], *(part if both else None for part, both in zip(record[3:], compared, strict=True)))
        for record in (one, other)
    )
    same = (one[:2], record_digest(*one)) == (other[:2], record_digest(*other))
    assert same == (one == other)


@given(st.lists(st.integers(0, MASK), max_size=9))
def test_halves_add_up_to_the_whole(digests: list[int]) -> None:
    low, high = sum(one & 0xFFFFFFFF for one in digests), sum(one >> 32 for one in digests)
    tally = Tally()
    for one in digests:
        tally = tally.plus(Tally(1, 1, one))
    assert tally == (len(digests), len(digests), added(low, high))


@given(st.lists(st.binary(max_size=3)), st.integers(1, 6))
def test_ranges_cut_all_keys_in_order(keys: list[bytes], ranges: int) -> None:
    cuts = cut_points(keys, ranges)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < ranges
    assert [range_of(cuts, key) for key in sorted(keys)] == sorted(range_of(cuts, key) for key in keys)
    assert range_of(cuts, None) == 0
    for number, cut in enumerate(cuts, 1):
        assert range_of(cuts, cut) == number


def test_ranges_hold_about_as_many_keys() -> None:
    keys = [b"%03d" % number for number in range(100)]
    cuts = cut_points(keys, 4)
    assert cuts == [b"025", b"050", b"075"]


@pytest.mark.parametrize("value", [b"", None])
def test_a_deleted_key_is_not_an_empty_one(value: bytes | None) -> None:
    assert record_digest("t", b"k", value) != record_digest("t", b"k", b"" if value is None else None)
