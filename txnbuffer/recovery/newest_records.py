"""The newest record of each key of a topic, in a bounded amount of memory

Records are added in the order of the log, as rows of hashes and places. When the rows in memory reach a limit, they are
sorted by the hash of their key and reduced to the newest of each key; if more than half of them remain, they are
written to a temporary file as a sorted run. Hashes are spread evenly, so a range of them has about the same share of
each run: `paired` reads all runs of two topics range by range, as many hashes at once as fit into memory.

Keys and values are represented by 128-bit hashes, whose seed nobody knows in advance. A deletion has the value hash 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.batch import PlacedBatch
from broker_io.block import hash_keys
from broker_io.environment import File, current
from broker_io.errors import disk_error
from broker_io.port import Resource
from broker_io.position import Int64s

ROW = np.dtype(
    [
        ("key_high", np.uint64),
        ("key_low", np.uint64),
        ("value_high", np.uint64),
        ("value_low", np.uint64),
        ("seqno", np.int64),
        ("ledger", np.int64),
        ("entry", np.int64),
        ("index", np.int64),
    ]
)
"""A record: the hashes of its key and its value, its seqno, and its position. Zeros: there is no record."""
Rows: TypeAlias = NDArray[np.void]

BUCKETS = 1024
"""Ranges of hashes, by the upper bits: what is read at once from a run consists of whole ranges."""
_BUCKET_SHIFT = np.uint64(64 - 10)
SHARES = 6
"""Parts of the memory: rows of two topics, a sorted copy of one, and the rows of a range of both with their copy."""


def rows_in(memory_bytes: int) -> int:
    """How many rows of one topic are in memory at most."""
    return max(memory_bytes // (SHARES * ROW.itemsize), 1)


def hashed_rows(records: PlacedBatch, seqnos: Int64s, seed: int) -> Rows:
    """The rows of those of n records that have a key; `seqnos`: int64[n]."""
    keyed = ~records.messages.keys.absent_mask()
    if not keyed.all():
        records, seqnos = records.take(keyed), seqnos[keyed]
    rows = np.zeros(len(records), ROW)
    for name, column in (("key", records.messages.keys), ("value", records.messages.values)):
        hashes = np.frombuffer(hash_keys(column, seed), ">u8").reshape(-1, 2)
        rows[f"{name}_high"], rows[f"{name}_low"] = hashes[:, 0], hashes[:, 1]
    rows["seqno"] = seqnos
    rows["ledger"], rows["entry"] = records.positions.ledgers, records.positions.entries
    rows["index"] = records.positions.indexes
    return rows


def has_value(rows: Rows) -> NDArray[np.bool_]:
    """bool[n]: which rows are records with a value."""
    present: NDArray[np.bool_] = (rows["value_high"] != 0) | (rows["value_low"] != 0)
    return present


@contextlib.contextmanager
def _temporary_file(path: str) -> Iterator[None]:
    """Turn an OSError about the temporary file `path` into DiskFull, DiskFailed or TooManyFiles."""
    try:
        yield
    except OSError as error:
        what = "keys for which --memory has no room go to this temporary file"
        remedy = "set TMPDIR to another directory with room, or give more --memory"
        raise disk_error(error, path, what, remedy) from error


class SortedRun(NamedTuple):
    """Sorted rows with one row a key: in memory, or in the file `path` from `offset` on.

    `bounds`: where the buckets begin.
    """

    bounds: NDArray[np.int32]
    rows: Rows | None
    file: File | None
    offset: int = 0
    path: str = ""

    def read(self, first: int, end: int) -> Rows:
        """The rows of the buckets from `first` to before `end`. Raises DiskFailed or TooManyFiles."""
        start, stop = int(self.bounds[first]), int(self.bounds[end])
        if self.rows is not None or self.file is None:
            return np.zeros(0, ROW) if self.rows is None else self.rows[start:stop]
        with _temporary_file(self.path):
            data = self.file.read(self.offset + start * ROW.itemsize, (stop - start) * ROW.itemsize)
        return np.frombuffer(data, ROW)


class NewestRecords(Resource):
    """The newest record of each key of one topic, with at most about `most_rows` of them in memory.

    `path` is that of the temporary file, which is created when it is needed. `runs`: the number of runs in it.
    """

    def __init__(self, most_rows: int, path: str) -> None:
        self._most_rows = most_rows
        self._path = path
        self._disk = current().disk
        self._file: File | None = None
        self._end = 0
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        self.runs = 0
        self._runs: list[SortedRun] = []
        self._rows: list[Rows] = []
        self._count = 0
        self._end = 0

    def add(self, rows: Rows) -> None:
        """Add records that are newer than those added before. Raises DiskFull, DiskFailed or TooManyFiles."""
        for start in range(0, len(rows), self._most_rows):
            self._add(rows[start : start + self._most_rows])

    def _add(self, rows: Rows) -> None:
        if self._count + len(rows) > self._most_rows:
            self._reduce()
            if 2 * self._count > self._most_rows or self._count + len(rows) > self._most_rows:
                self._write()
        self._rows.append(rows)
        self._count += len(rows)

    def _reduce(self) -> None:
        self._rows = [newest(self._rows)]
        self._count = len(self._rows[0])

    def _write(self) -> None:
        """Write the rows, which are reduced, as a run."""
        (rows,) = self._rows
        with _temporary_file(self._path):
            if self._file is None:
                self._file = self._disk.open(self._path, write=True, create=True)
            self._file.write(self._end, [rows.tobytes()])
        self._runs.append(SortedRun(_bounds(rows), None, self._file, self._end, self._path))
        self._end += rows.nbytes
        self.runs += 1
        self._rows, self._count = [], 0

    def sorted_runs(self) -> list[SortedRun]:
        """All runs, the newest last."""
        self._reduce()
        return [*self._runs, SortedRun(_bounds(self._rows[0]), self._rows[0], None)]

    def close(self) -> None:
        self.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):  # its directory is removed, too
                self._disk.remove(self._path)


def newest(parts: Sequence[Rows]) -> Rows:
    """The newest row of each key, sorted by the hash of the key; later rows are newer."""
    rows = np.concatenate([*parts, np.zeros(0, ROW)])
    high, low = (np.ascontiguousarray(rows[name]) for name in ("key_high", "key_low"))
    order = np.argsort(high)
    same = high[order[1:]] == high[order[:-1]]
    if (same & (low[order[1:]] != low[order[:-1]])).any():  # keys with one half of a hash: rare
        order = np.lexsort((low, high))
        same = _same_keys(rows[order])
    begins = np.flatnonzero(np.append(True, ~same)[: len(order)])
    return rows[np.maximum.reduceat(order, begins)] if len(order) else rows


def _same_keys(rows: Rows) -> NDArray[np.bool_]:
    """bool[n - 1]: which rows have the same key as the next one."""
    high, low = rows["key_high"], rows["key_low"]
    same: NDArray[np.bool_] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return same


def _bounds(rows: Rows) -> NDArray[np.int32]:
    edges = np.arange(BUCKETS, dtype=np.uint64) << _BUCKET_SHIFT
    return np.append(np.searchsorted(rows["key_high"], edges), len(rows)).astype(np.int32)


def paired(some: NewestRecords, others: NewestRecords, most_rows: int) -> Iterator[tuple[Rows, Rows]]:
    """The newest records of two topics in pairs of one key, range by range; zeros where a topic does not have the key.

    At most about `most_rows` rows are in memory at once. Nothing may be added meanwhile.

    Raises DiskFailed or TooManyFiles.
    """
    sides = [some.sorted_runs(), others.sorted_runs()]
    sizes = np.sum([np.diff(run.bounds) for runs in sides for run in runs], axis=0)
    ends = np.cumsum(sizes)
    first = 0
    while first < BUCKETS:
        before = int(ends[first - 1]) if first else 0
        end = max(int(np.searchsorted(ends, before + most_rows, side="right")), first + 1)
        one, other = (newest([run.read(first, end) for run in runs]) for runs in sides)
        if len(one) or len(other):
            yield _joined(one, other)
        first = end


def newest_with_value(records: NewestRecords, most_rows: int) -> Iterator[Rows]:
    """The newest records of one topic that are no deletions, as `paired`."""
    with NewestRecords(1, "") as nothing:
        for rows, _ in paired(records, nothing, most_rows):
            yield rows[has_value(rows)]


def _joined(some: Rows, others: Rows) -> tuple[Rows, Rows]:
    both = np.concatenate([some, others])
    order = np.lexsort((np.ascontiguousarray(both["key_low"]), np.ascontiguousarray(both["key_high"])))
    both, second = both[order], order >= len(some)
    begins = np.ones(len(both), np.bool_)
    begins[1:] = ~_same_keys(both)
    pairs = np.cumsum(begins) - 1
    left, right = np.zeros((2, int(begins.sum())), ROW)
    left[pairs[~second]] = both[~second]
    right[pairs[second]] = both[second]
    return left, right
