"""The newest record of each key in Arrow columns, without a sort"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from txnbuffer.client.reading.arrow import fixed

ORDER = "position"

FIRST_ROWS = 500_000
"""Records that a task gathers before it first drops superseded ones, if they are small."""

HELD_BYTES = 256 * 1024 * 1024
"""Bytes that a task deduplicates before the shuffle; further records are shuffled as they are."""

WORD_BYTES = 8

Rows = NDArray[np.intp]


def with_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch that have a key."""
    return batch.filter(batch["key"].is_valid()) if batch["key"].null_count else batch


def newest(batches: Iterable[pa.RecordBatch], held_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
    """The latest record of each topic and key; beyond `held_bytes` bytes, the other records as they are."""
    gathered: list[pa.RecordBatch] = []
    rows, size = 0, 0
    due_rows, due_bytes = FIRST_ROWS, HELD_BYTES
    for batch in batches:
        gathered.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows < due_rows and size < due_bytes:
            continue
        kept = thinned(pa.Table.from_batches(gathered))
        gathered, rows, size = kept.to_batches(), len(kept), kept.nbytes
        if held_bytes is not None and size > held_bytes:
            yield from gathered
            gathered, rows, size = [], 0, 0
        due_rows, due_bytes = 2 * rows + FIRST_ROWS, 2 * size + HELD_BYTES
    if gathered:
        yield from thinned(pa.Table.from_batches(gathered)).to_batches()


def thinned(table: pa.Table) -> pa.Table:
    """The records of a table that no later one with the same topic and key supersedes, in their order."""
    wanted = np.zeros(len(table), np.bool_)
    wanted[last_rows(codes_of(table), order_of(table))] = True
    bits = pa.py_buffer(np.packbits(wanted, bitorder="little"))
    return table.filter(pa.Array.from_buffers(pa.bool_(), len(table), [None, bits]))


def last_rows(codes: NDArray[np.int64], order: Rows | None) -> Rows:
    """The last row of each code in `order`; None: in the order of the rows."""
    last = np.full(int(codes.max()) + 1 if len(codes) else 0, -1, np.intp)
    if order is None:
        last[codes] = np.arange(len(codes))
    else:
        last[codes[order]] = order
    return last[last >= 0]


def codes_of(table: pa.Table) -> NDArray[np.int64]:
    """A number from 0 on for each row: equal for equal topic and key."""
    topics, keys = _codes(table["topic"]), _key_codes(table["key"])
    if not len(topics) or (topics[0] == topics[-1] and not topics.any()):
        return keys
    codes: NDArray[np.int64] = np.unique(topics * (int(keys.max()) + 1) + keys, return_inverse=True)[1]
    return codes


def _key_codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Codes of keys. Keys of one length up to 8 bytes are compared as numbers, several times as fast as strings."""
    numbers = [_as_numbers(chunk) for chunk in column.chunks if len(chunk)]
    widths = {found[0] for found in numbers if found is not None}
    if len(widths) != 1 or None in numbers:
        return _codes(column)
    return _codes(pa.chunked_array([fixed(found[1], pa.uint64()) for found in numbers if found is not None]))


def _as_numbers(keys: Any) -> tuple[int, NDArray[np.uint64]] | None:
    """The length of the keys, and each key as a number; None if the lengths differ or exceed 8 bytes."""
    _, bounds, data = keys.buffers()
    if keys.null_count or keys.type != pa.binary():
        return None
    offsets = np.frombuffer(bounds, np.int32, len(keys) + 1, 4 * keys.offset)
    width = int(offsets[1] - offsets[0])
    if not 0 < width <= WORD_BYTES or (np.diff(offsets) != width).any():
        return None
    padded = np.zeros((len(keys), WORD_BYTES), np.uint8)
    padded[:, :width] = np.frombuffer(data, np.uint8, len(keys) * width, int(offsets[0])).reshape(-1, width)
    return width, padded.view(np.uint64).ravel()


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    chunks = column.dictionary_encode().chunks
    return np.concatenate([_numbers(chunk.indices) for chunk in chunks] or [np.zeros(0, np.int64)])


def order_of(table: pa.Table) -> Rows | None:
    """The rows in the order of their positions; None if they are in this order."""
    if not len(table):
        return None
    chunks = [chunk for chunk in table[ORDER].chunks if len(chunk)]
    axes = [np.concatenate([_numbers(chunk.field(axis)) for chunk in chunks]) for axis in range(3)]
    packed = _packed(axes)
    if packed is None:
        return np.lexsort(axes[::-1])
    return None if (packed[1:] >= packed[:-1]).all() else np.argsort(packed, kind="stable")


def _packed(axes: list[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Numbers in the same order as the positions; None if 63 bits are too few."""
    packed = np.zeros(len(axes[0]), np.int64)
    room = 1
    for axis in axes:
        low, high = int(axis.min()), int(axis.max())
        if low == high:
            continue
        room *= high - low + 1
        if room >= 2**63:
            return None
        packed = packed * (high - low + 1) + (axis - low)
    return packed


def _numbers(array: Any) -> NDArray[np.int64]:
    """An Arrow column of integers without nulls as int64."""
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)
