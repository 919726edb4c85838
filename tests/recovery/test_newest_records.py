"""The newest record of each key, in memory and in sorted runs, against a dict."""

from __future__ import annotations

import errno
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_io.environment import Environment, use
from broker_io.errors import DiskFailed, DiskFull, Error, TooManyFiles
from broker_io.testing import SimulatedDisk
from broker_io.testing.disk import SimulatedFile
from txnbuffer.recovery.newest_records import ROW, NewestRecords, Rows, paired

Key = tuple[int, int]
HALVES = [0, 1, 2**54 - 1, 2**54, 2**63, 2**64 - 1]
keys = st.tuples(st.sampled_from(HALVES), st.sampled_from(HALVES))
records = st.lists(st.lists(keys, max_size=6), max_size=8)


def rows_of(found: list[Key], first: int) -> Rows:
    rows = np.zeros(len(found), ROW)
    for index, key in enumerate(found):
        rows[index] = (*key, 7, 8, first + index, 1, first + index, -1)
    return rows


def collected(parts: list[list[Key]], found: NewestRecords) -> dict[Key, int]:
    newest: dict[Key, int] = {}
    seqno = 1
    for part in parts:
        found.add(rows_of(part, seqno))
        newest |= {key: seqno + index for index, key in enumerate(part)}
        seqno += len(part)
    return newest


def seqnos(rows: Rows) -> dict[Key, int]:
    return {(int(row["key_high"]), int(row["key_low"])): int(row["seqno"]) for row in rows if row["seqno"]}


@given(records, records, st.sampled_from([1, 2, 3, 7, 100]), st.sampled_from([1, 5, 100]))
def test_two_topics_are_paired_by_key(some: list[list[Key]], others: list[list[Key]], most: int, together: int) -> None:
    disk = SimulatedDisk()
    with (
        use(Environment(disk=disk)),
        NewestRecords(most, "/some") as one,
        NewestRecords(most, "/others") as other,
    ):
        collected([*others, *some], one)
        one.clear()
        mine, theirs = collected(some, one), collected(others, other)
        lefts: dict[Key, int] = {}
        rights: dict[Key, int] = {}
        for left, right in paired(one, other, together):
            assert len(left) == len(right) > 0
            pairs = zip(left, right, strict=True)
            both = [(x, y) for x, y in pairs if x["seqno"] and y["seqno"]]
            assert all(x["key_high"] == y["key_high"] and x["key_low"] == y["key_low"] for x, y in both)
            assert not set(lefts) & set(seqnos(left))
            lefts, rights = lefts | seqnos(left), rights | seqnos(right)
            assert len(left) == len(seqnos(left).keys() | seqnos(right).keys())
        assert (lefts, rights) == (mine, theirs)
    assert disk.files() == {}


def test_what_is_in_memory_is_bounded() -> None:
    disk = SimulatedDisk()
    with use(Environment(disk=disk)), NewestRecords(100, "/runs") as found, NewestRecords(100, "/none") as none:
        for start in range(0, 10_000, 500):
            found.add(rows_of([(key * (2**64 // 10_000), key) for key in range(start, start + 500)], start + 1))
        assert found.runs >= 99
        found.add(rows_of([(key * (2**64 // 10_000), key) for key in range(10_000)], 10_001))
        largest = 0
        total = 0
        for left, _ in paired(found, none, 200):
            largest, total = max(largest, len(left)), total + len(left)
            assert (left["seqno"] > 10_000).all()
        assert total == 10_000
        assert largest <= 200
    assert disk.files() == {}


def test_few_keys_need_no_file() -> None:
    disk = SimulatedDisk()
    with use(Environment(disk=disk)), NewestRecords(100, "/runs") as found:
        for start in range(0, 10_000, 50):
            found.add(rows_of([(key, key) for key in range(50)], start + 1))
        assert (found.runs, disk.history) == (0, [])


FAILURES = [
    (1, errno.EIO, DiskFailed),
    (1, errno.EMFILE, TooManyFiles),
    (1, errno.ENFILE, TooManyFiles),
    (2, errno.ENOSPC, DiskFull),
    (2, errno.EDQUOT, DiskFull),
    (2, errno.EIO, DiskFailed),
]


@pytest.mark.parametrize(("operation", "number", "kind"), FAILURES)
def test_a_temporary_file_that_cannot_be_written_is_named(operation: int, number: int, kind: type[Error]) -> None:
    disk = SimulatedDisk()
    disk.fail_at(operation, number)  # its creation, or the write
    with use(Environment(disk=disk)), NewestRecords(100, "/runs") as found:
        found.add(rows_of([(key, key) for key in range(100)], 1))
        remedy = r"raise the limit \(ulimit -n\)$" if kind is TooManyFiles else "set TMPDIR .* or give more --memory"
        with pytest.raises(Error, match=f"/runs: .*temporary file; {remedy}") as failed:
            found.add(rows_of([(100, 100)], 101))
        assert type(failed.value) is kind
    assert disk.files() == {}


def test_a_temporary_file_that_cannot_be_read_is_named() -> None:
    disk = SimulatedDisk()
    with use(Environment(disk=disk)), NewestRecords(100, "/runs") as found, NewestRecords(100, "/none") as none:
        for start in range(0, 200, 100):
            found.add(rows_of([(key, key) for key in range(start, start + 100)], start + 1))
        assert found.runs == 1
        failed = OSError(errno.EIO, "Input/output error")
        with (
            mock.patch.object(SimulatedFile, "read", side_effect=failed),
            pytest.raises(DiskFailed, match=r"/runs: Input/output error: .*set TMPDIR"),
        ):
            list(paired(found, none, 1000))
    assert disk.files() == {}
