"""The digest of a set of records is a sum of hashes of their keys and positions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from broker_io.key_digest import KeyDigest

numbers = st.integers(0, 2**63 - 1)
records = st.lists(st.tuples(st.integers(0, 2**64 - 1), numbers, numbers), max_size=20)
Records = list[tuple[int, int, int]]


def digest(found: Records, seed: int = 7) -> KeyDigest:
    hashes, ledgers, entries = zip(*found, strict=True) if found else ((), (), ())
    columns = np.array(hashes, np.uint64), np.array(ledgers, np.int64), np.array(entries, np.int64)
    return KeyDigest(seed).add(*columns)


@given(records, st.randoms(use_true_random=False), st.integers(0, 20))
def test_the_order_and_the_parts_do_not_matter(found: Records, random: object, cut: int) -> None:
    whole = digest(found)
    shuffled = [*found]
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
    some, others = digest(shuffled[:cut]), digest(shuffled[cut:])
    assert some.combine(others) == whole
    assert whole.subtract(others) == some
    assert whole.subtract(whole) == KeyDigest(7)


@given(records, records)
def test_different_sets_have_different_digests(some: Records, others: Records) -> None:
    assume(Counter(some) != Counter(others))
    assert digest(some) != digest(others)
    assert digest(some).total != digest(some, 8).total or not some


def test_every_word_counts_in_its_place() -> None:
    found = [(1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1), (1, 2, 4), (2**63 + 1, 2, 3)]
    totals = {digest([one]).total for one in found}
    assert len(totals) == 6
    assert all(total >> 64 != total & (2**64 - 1) for total in totals)
    assert digest([(1, 2, 3)] * 2).total == 2 * digest([(1, 2, 3)]).total % 2**128


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**128 - 1))
def test_its_text(seed: int, total: int) -> None:
    one = KeyDigest(seed, total)
    assert KeyDigest.parse(str(one)) == one
    assert len(str(one)) == 48


def test_the_text_of_known_records() -> None:
    assert str(digest([(2**64 - 1, 1, 0), (5, 2, 9)])) == "0000000000000007b34623adbc37b77db3a72c54402b51fe"


@pytest.mark.parametrize("text", ["", "0" * 47, "0" * 49, "0" * 47 + "g", "0" * 47 + "A"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a digest"):
        KeyDigest.parse(text)


def test_digests_of_two_seeds_can_not_be_combined() -> None:
    for operation in (KeyDigest(1).combine, KeyDigest(1).subtract):
        with pytest.raises(ValueError, match="have nothing in common"):
            operation(KeyDigest(2))
