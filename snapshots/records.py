"""Avro records whose arrays are columns: columns of integers, flat records, positions in records.

The schemas are plain Avro in the directory `schemas` of the package that writes the records, one file per kind and
version. They use `long`, `boolean`, `string`, `bytes`, `fixed`, `array<long>` (a column) and `array<bytes>`, in one
flat record. Any Avro library reads what is written here, and what it writes is read here.

A column of n numbers is an Avro `array<long>` of n longs: the first number, then the difference of each to the one
before it, modulo 2**64. Avro's array is one block (its count, then the items) and a closing 0; a long is the zigzag of
the number in groups of seven bits, lowest first, the high bit set on all but the last. An empty column is the closing 0
alone. Columns are coded with numpy, because one number at a time is slower by a factor of ten.

A column whose n > 1 numbers are all equal may be written as one element, where another field has the number of rows
(`constant_shortened`, `expanded`). So each group of columns has its number of rows in a field of its own.

A column of positions `x` becomes the three columns `x_ledger`, `x_entry`, `x_batch`, a single position three longs of
these names; no position is -1, -1, -1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from broker_io.position import EARLIEST, NO_INDEX, Int64s, Position, Positions

MAX_LONG_BYTES = 10
"""Maximum size of an encoded 64-bit long."""

_CONTINUED = 0x80
_THRESHOLDS = np.array([1 << shift for shift in range(7, 64, 7)], np.uint64)
_EMPTY = np.empty(0, np.int64)


class BadColumn(ValueError):
    """Bytes that are not a column; the caller names the entry."""


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
    """One Avro long at `offset`, and the offset after it. Raises BadColumn."""
    rest = shift = 0
    for at in range(offset, min(offset + MAX_LONG_BYTES, len(data))):
        byte = data[at]
        rest |= (byte & 0x7F) << shift
        if byte < _CONTINUED:
            if rest >> 64:
                break
            return (rest >> 1) ^ -(rest & 1), at + 1
        shift += 7
    raise BadColumn(f"the number at offset {offset} is incomplete or too large")


def encode_longs(values: Int64s) -> bytes:
    """Consecutive longs, without count or end."""
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
    """`count` longs from `offset`, and the offset after them. Raises BadColumn."""
    if count == 0:
        return _EMPTY, offset
    if not 0 < count <= len(data) - offset:
        raise BadColumn(f"{count} numbers do not fit into the {len(data) - offset} bytes from offset {offset}")
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
    """int64[n] from the Avro array at `offset`, and the offset after it. Raises BadColumn.

    Accepts every form that Avro allows, including several blocks with and without byte sizes.
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
    """The column at its full length `count`. Raises BadColumn if it has another length."""
    if len(values) == count:
        return values
    if len(values) == 1 and count > 1:
        return np.full(count, values[0], np.int64)
    raise BadColumn(f"a column has {len(values)} numbers for {count} rows")


Value: TypeAlias = "int | bool | str | bytes | Int64s | list[bytes]"
Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes, int], tuple[Any, int]]


class BadRecord(ValueError):
    """Bytes that are not a record of the schema."""


def _encode_bytes(value: bytes) -> bytes:
    return encode_long(len(value)) + value


def _decode_bytes(data: bytes, offset: int) -> tuple[bytes, int]:
    size, offset = decode_long(data, offset)
    return _exactly(data, offset, size), offset + size


def _exactly(data: bytes, offset: int, size: int) -> bytes:
    if not 0 <= size <= len(data) - offset:
        raise BadRecord(f"{size} bytes do not fit into the {len(data) - offset} from offset {offset}")
    return data[offset : offset + size]


def _encode_string(value: str) -> bytes:
    return _encode_bytes(value.encode())


def _decode_string(data: bytes, offset: int) -> tuple[str, int]:
    text, offset = _decode_bytes(data, offset)
    return text.decode(), offset


def _encode_boolean(value: bool) -> bytes:
    return b"\1" if value else b"\0"


def _decode_boolean(data: bytes, offset: int) -> tuple[bool, int]:
    byte = _exactly(data, offset, 1)
    if byte not in (b"\0", b"\1"):
        raise BadRecord(f"the byte at offset {offset} is not a boolean")
    return byte == b"\1", offset + 1


def _encode_blobs(values: list[bytes]) -> bytes:
    if not values:
        return b"\0"
    return encode_long(len(values)) + b"".join(map(_encode_bytes, values)) + b"\0"


def _decode_blobs(data: bytes, offset: int) -> tuple[list[bytes], int]:
    values: list[bytes] = []
    while True:
        count, offset = decode_long(data, offset)
        if count == 0:
            return values, offset
        if count < 0:
            _, offset = decode_long(data, offset)
        for _ in range(abs(count)):
            value, offset = _decode_bytes(data, offset)
            values.append(value)


_PLAIN: dict[str, tuple[Encode, Decode]] = {
    "long": (encode_long, decode_long),
    "boolean": (_encode_boolean, _decode_boolean),
    "string": (_encode_string, _decode_string),
    "bytes": (_encode_bytes, _decode_bytes),
    "array<long>": (encode_column, decode_column),
    "array<bytes>": (_encode_blobs, _decode_blobs),
}


def _fixed(size: int) -> tuple[Encode, Decode]:
    def encode(value: bytes) -> bytes:
        if len(value) != size:
            raise ValueError(f"a fixed field must have {size} bytes, got {len(value)}")
        return value

    return encode, lambda data, offset: (_exactly(data, offset, size), offset + size)


def _codec(kind: Any, named: dict[str, tuple[Encode, Decode]]) -> tuple[Encode, Decode]:
    if isinstance(kind, str):
        return named.get(kind) or _PLAIN[kind]
    if kind["type"] == "array":
        return _PLAIN[f"array<{kind['items']}>"]
    if kind["type"] == "fixed":
        return named.setdefault(kind["name"], _fixed(kind["size"]))
    return _PLAIN[kind["type"]]


class RecordCodec:
    """The codec of one schema: mappings of its field names to values, and back."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        named: dict[str, tuple[Encode, Decode]] = {}
        self.name: str = schema["name"]
        self.fields = [(field["name"], *_codec(field["type"], named)) for field in schema["fields"]]

    def encode(self, values: Mapping[str, Value]) -> bytes:
        return b"".join([encode(values[name]) for name, encode, _ in self.fields])

    def decode(self, data: bytes) -> dict[str, Any]:
        """All fields. Raises BadRecord, also for bytes after the last field."""
        values: dict[str, Any] = {}
        offset = 0
        for name, _, decode in self.fields:
            try:
                values[name], offset = decode(data, offset)
            except (BadColumn, BadRecord, UnicodeDecodeError) as error:
                raise BadRecord(f"field {name} of {self.name}: {error}") from error
        if offset != len(data):
            raise BadRecord(f"{self.name} is followed by {len(data) - offset} more bytes")
        return values


def schema(name: str, package: str) -> Mapping[str, Any]:
    """The Avro schema of one kind and version, such as `end-1`, in a package."""
    text = resources.files(package).joinpath("schemas", f"{name}.avsc").read_text()
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


@cache
def record(name: str, package: str) -> RecordCodec:
    return RecordCodec(schema(name, package))


AXES = ("ledger", "entry", "batch")


def put_position(name: str, position: Position | None) -> dict[str, int]:
    return {f"{name}_{axis}": number for axis, number in zip(AXES, position or EARLIEST, strict=True)}


def get_position(values: Mapping[str, Any], name: str) -> Position | None:
    position = Position(*(values[f"{name}_{axis}"] for axis in AXES))
    return None if position == EARLIEST else position


def reaches(at: Position | None, position: Position | None) -> bool:
    """Whether a reader that has read the message `at` has passed the record at `position`."""
    if position is None:
        return True
    if at is None:
        return False
    return at >= position or (at.batch == NO_INDEX and at[:2] == position[:2])


def put_columns(columns: Mapping[str, Int64s]) -> dict[str, Int64s]:
    return {name: constant_shortened(column) for name, column in columns.items()}


def get_column(values: Mapping[str, Any], name: str, count: int) -> Int64s:
    """Raises BadColumn if it has another number of rows."""
    return expanded(values[name], count)


def put_positions(name: str, positions: Positions) -> dict[str, Int64s]:
    columns = zip(AXES, (positions.ledgers, positions.entries, positions.indexes), strict=True)
    return put_columns({f"{name}_{axis}": column for axis, column in columns})


def get_positions(values: Mapping[str, Any], name: str, count: int) -> Positions:
    ledgers, entries, indexes = (get_column(values, f"{name}_{axis}", count) for axis in AXES)
    return Positions(ledgers, entries, indexes)
