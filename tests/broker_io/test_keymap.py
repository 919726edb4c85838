"""The key map against a naive model: any batches, hashes that collide, and memory for a part of the keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_io.filelog.log import keymap
from broker_io.filelog.log.keymap import ALL_HASHES, SMALLEST_BYTES, KeyColumn, KeyMap


def column(keys: list[bytes]) -> KeyColumn:
    lengths = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(b"?" + b"".join(keys), np.uint8)
    return KeyColumn(data, 1 + np.cumsum(lengths) - lengths, lengths)


def superseded(batches: list[list[tuple[int, bytes]]], memory: int) -> tuple[list[list[bool]], int]:
    """Which rows all passes over batches in log order supersede, and the number of passes."""
    marks = [[False] * len(batch) for batch in batches]
    begin = passes = 0
    while begin < ALL_HASHES:
        found = KeyMap(memory, begin)
        passes += 1
        for marked, batch in zip(reversed(marks), reversed(batches), strict=True):
            hashes = np.array([number for number, _ in batch], np.uint64)
            older = found.add(hashes, column([key for _, key in batch])).superseded
            marked[:] = [before or now for before, now in zip(marked, older.tolist(), strict=True)]
        begin = found.end
    return marks, passes


def naive(batches: list[list[tuple[int, bytes]]]) -> list[list[bool]]:
    """The first key that is seen of each hash supersedes its older occurrences; other keys of the hash stay."""
    owners: dict[int, tuple[bytes, tuple[int, int]]] = {}
    marks = [[False] * len(batch) for batch in batches]
    for at in reversed(range(len(batches))):
        for row in reversed(range(len(batches[at]))):
            number, key = batches[at][row]
            owner, place = owners.setdefault(number, (key, (at, row)))
            marks[at][row] = owner == key and place != (at, row)
    return marks


hashes = st.one_of(st.integers(0, ALL_HASHES - 1), st.integers(0, 40), st.sampled_from([0, 1, ALL_HASHES - 1]))
keys = st.one_of(st.binary(max_size=3), st.sampled_from([b"", b"a", b"b", b"ab" * 40]))


@given(st.lists(st.lists(st.tuples(hashes, keys), max_size=40), max_size=8))
def test_rows_are_superseded_as_by_a_naive_model(batches: list[list[tuple[int, bytes]]]) -> None:
    assert superseded(batches, SMALLEST_BYTES) == (naive(batches), 1)


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([1, 8, 100]))
def test_passes_with_little_memory_decide_about_all_keys(seed: int, repeats: int, length: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 3000, (repeats, 2000))
    made = {number: int(random.integers(0, ALL_HASHES, dtype=np.uint64)) for number in range(3000)}
    batches = [[(made[one], b"%d" % one * length) for one in row.tolist()] for row in numbers]
    marks, passes = superseded(batches, SMALLEST_BYTES)
    assert marks == naive(batches)
    assert passes > 1


def test_keys_too_long_for_the_memory_stay() -> None:
    found = KeyMap(SMALLEST_BYTES)
    long = b"x" * SMALLEST_BYTES
    assert found.add(np.array([7, 7, 8], np.uint64), column([long, long, b"a"])).newest.tolist() == [
        False,
        False,
        True,
    ]
    assert found.add(np.array([7, 8], np.uint64), column([long, b"a"])).superseded.tolist() == [False, True]


def test_a_full_map_still_takes_many_rows_of_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keymap, "FEW_ROWS", 4)
    found = KeyMap(SMALLEST_BYTES)
    numbers = np.arange(700, dtype=np.uint64)
    names = column([b"%d" % number for number in range(700)])
    assert found.add(numbers, names).newest.all()
    for _ in range(5):
        assert found.add(numbers, names).superseded.all()
    assert (found.count, found.end) == (700, ALL_HASHES)


def test_memory_below_the_least_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 65536 bytes, got 65535"):
        KeyMap(SMALLEST_BYTES - 1)
