"""Columns of whole numbers as Avro writes them.

A column of n numbers is an Avro `array<long>` of n longs: the first number, then the difference of
each to the one before it, modulo 2**64. Avro's array is one block (its count, then the items) and a
closing 0; a long is the zigzag of the number in groups of seven bits, lowest first, the high bit set
on all but the last. An empty column is the closing 0 alone. Any Avro library reads them; here numpy
does, because one number at a time is too slow by a factor of ten.

*One stands for all*: a column whose n > 1 numbers are all equal may be written as one element, where
the record says elsewhere how many rows there are. `constant_shortened` and `expanded` do that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from broker_io.position import Int64s

MAX_LONG_BYTES = 10
"""A long of 64 bits never takes more."""

_CONTINUED = 0x80
_THRESHOLDS = np.array([1 << shift for shift in range(7, 64, 7)], np.uint64)
_EMPTY = np.empty(0, np.int64)


class BadColumn(ValueError):
    """Bytes that are no column; the caller knows which entry they are of."""


def encode_long(value: int) -> bytes:
    """One Avro long."""
    rest = ((value << 1) ^ (value >> 63)) & 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while rest >= _CONTINUED:
        out.append(rest & 0x7F | _CONTINUED)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def decode_long(data: bytes, offset: int) -> tuple[int, int]:
    """One Avro long at `offset`, and the offset behind it. Raises BadColumn."""
    rest = shift = 0
    for at in range(offset, min(offset + MAX_LONG_BYTES, len(data))):
        byte = data[at]
        rest |= (byte & 0x7F) << shift
        if byte < _CONTINUED:
            if rest >> 64:
                break
            return (rest >> 1) ^ -(rest & 1), at + 1
        shift += 7
    raise BadColumn(f"no whole number at offset {offset}")


def encode_longs(values: Int64s) -> bytes:
    """N longs one behind the other, without count or end."""
    zigzag = ((values << np.int64(1)) ^ (values >> np.int64(63))).view(np.uint64)
    if not len(zigzag):
        return b""
    if int(zigzag.max()) < _CONTINUED:
        return zigzag.astype(np.uint8).tobytes()
    lengths = np.searchsorted(_THRESHOLDS, zigzag, side="right") + 1
    ends = np.cumsum(lengths)
    starts = ends - lengths
    out = np.empty(int(ends[-1]), np.uint8)
    for group in range(int(lengths.max())):
        rows = lengths > group if group else slice(None)
        more = np.where(lengths[rows] > group + 1, _CONTINUED, 0)
        low = (zigzag[rows] >> np.uint64(7 * group)) & np.uint64(0x7F)
        out[starts[rows] + group] = low.astype(np.uint8) | more.astype(np.uint8)
    return out.tobytes()


def decode_longs(data: bytes, offset: int, count: int) -> tuple[Int64s, int]:
    """`count` longs from `offset`, and the offset behind them. Raises BadColumn."""
    if count == 0:
        return _EMPTY, offset
    if not 0 < count <= len(data) - offset:
        raise BadColumn(f"{count} numbers can't stand in the {len(data) - offset} bytes from offset {offset}")
    window = np.frombuffer(data, np.uint8, count, offset)
    if int(window.max()) < _CONTINUED:
        return _unzigzag(window.astype(np.uint64)), offset + count
    window = np.frombuffer(data, np.uint8, min(len(data) - offset, count * MAX_LONG_BYTES), offset)
    ends = np.flatnonzero(window < _CONTINUED)[:count]
    if len(ends) < count:
        raise BadColumn(f"fewer than {count} numbers from offset {offset}")
    starts = np.empty(count, np.int64)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    return _unzigzag(_gather(window, starts, ends - starts + 1)), offset + int(ends[-1]) + 1


def _gather(window: NDArray[np.uint8], starts: Int64s, lengths: Int64s) -> NDArray[np.uint64]:
    longest = int(lengths.max())
    if longest > MAX_LONG_BYTES:
        raise BadColumn("a number of more than 64 bits")
    zigzag = (window[starts] & 0x7F).astype(np.uint64)
    for group in range(1, longest):
        rows = np.flatnonzero(lengths > group)
        bits = (window[starts[rows] + group] & 0x7F).astype(np.uint64)
        if group == MAX_LONG_BYTES - 1 and int(bits.max()) > 1:
            raise BadColumn("a number of more than 64 bits")
        zigzag[rows] |= bits << np.uint64(7 * group)
    return zigzag


def _unzigzag(zigzag: NDArray[np.uint64]) -> Int64s:
    halves = (zigzag >> np.uint64(1)).view(np.int64)
    return halves ^ -(zigzag & np.uint64(1)).view(np.int64)


def encode_column(values: Int64s) -> bytes:
    """int64[n] as an Avro array of differences."""
    if not len(values):
        return b"\0"
    differences = np.empty(len(values), np.int64)
    differences[0] = values[0]
    np.subtract(values[1:], values[:-1], out=differences[1:])
    return encode_long(len(values)) + encode_longs(differences) + b"\0"


def decode_column(data: bytes, offset: int) -> tuple[Int64s, int]:
    """int64[n] from the Avro array at `offset`, and the offset behind it. Raises BadColumn.

    Takes every form that Avro allows, several blocks with and without byte sizes included.
    """
    blocks: list[Int64s] = []
    while True:
        count, offset = decode_long(data, offset)
        if count == 0:
            break
        if count < 0:
            _, offset = decode_long(data, offset)
        values, offset = decode_longs(data, offset, abs(count))
        blocks.append(values)
    differences = blocks[0] if len(blocks) == 1 else np.concatenate([_EMPTY, *blocks])
    return np.cumsum(differences), offset


def constant_shortened(values: Int64s) -> Int64s:
    """The column, or one element of it if all are equal."""
    return values[:1] if len(values) > 1 and bool((values == values[0]).all()) else values


def expanded(values: Int64s, count: int) -> Int64s:
    """The column at its full length `count`. Raises BadColumn if it can't have that."""
    if len(values) == count:
        return values
    if len(values) == 1 and count > 1:
        return np.full(count, values[0], np.int64)
    raise BadColumn(f"a column of {len(values)} numbers where {count} rows are")
