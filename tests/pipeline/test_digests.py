"""Digests of records by key, and the ranges into which keys are divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from txnbuffer.pipeline.jobs.audit import MASK, KeyTally, added, cut_points


@given(st.lists(st.integers(0, MASK), max_size=9))
def test_halves_add_up_to_the_whole(digests: list[int]) -> None:
    low, high = sum(one & 0xFFFFFFFF for one in digests), sum(one >> 32 for one in digests)
    tally = KeyTally()
    for one in digests:
        tally = tally.plus(KeyTally(1, 1, one))
    assert tally == (len(digests), len(digests), added(low, high))


@given(st.lists(st.binary(max_size=3)), st.integers(1, 6))
def test_ranges_contain_all_keys_in_order(keys: list[bytes], ranges: int) -> None:
    cuts = cut_points(keys, ranges)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < ranges
    assert set(cuts) <= set(keys)


def test_ranges_contain_about_the_same_number_of_keys() -> None:
    keys = [b"%03d" % number for number in range(100)]
    cuts = cut_points(keys, 4)
    assert cuts == [b"025", b"050", b"075"]
