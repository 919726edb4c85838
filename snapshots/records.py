"""Avro records whose arrays are columns.

The schemas stand as plain Avro in the directory `schemas` of the package that writes the records, one file
a kind and version. Of Avro they use `long`, `boolean`, `string`, `bytes`, `fixed`, `array<long>` (a column,
see `snapshots.columns`) and `array<bytes>`, in one flat record; what is written here is what any Avro
library writes for the same schema, and reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

from broker_io.position import Int64s
from snapshots.columns import BadColumn, decode_column, decode_long, encode_column, encode_long

Value: TypeAlias = "int | bool | str | bytes | Int64s | list[bytes]"
Encode: TypeAlias = Callable[[Any], bytes]
Decode: TypeAlias = Callable[[bytes, int], tuple[Any, int]]


class BadRecord(ValueError):
    """Bytes that are no record of the schema."""


def _encode_bytes(value: bytes) -> bytes:
    return encode_long(len(value)) + value


def _decode_bytes(data: bytes, offset: int) -> tuple[bytes, int]:
    size, offset = decode_long(data, offset)
    return _exactly(data, offset, size), offset + size


def _exactly(data: bytes, offset: int, size: int) -> bytes:
    if not 0 <= size <= len(data) - offset:
        raise BadRecord(f"{size} bytes can't stand in the {len(data) - offset} from offset {offset}")
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
        raise BadRecord(f"no boolean at offset {offset}")
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
            raise ValueError(f"{len(value)} bytes where {size} are fixed")
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


class Record:
    """The codec of one schema: mappings of its field names to values, and back."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        named: dict[str, tuple[Encode, Decode]] = {}
        self.name: str = schema["name"]
        self.fields = [(field["name"], *_codec(field["type"], named)) for field in schema["fields"]]

    def encode(self, values: Mapping[str, Value]) -> bytes:
        return b"".join([encode(values[name]) for name, encode, _ in self.fields])

    def decode(self, data: bytes) -> dict[str, Any]:
        """All fields. Raises BadRecord, also for bytes behind the last one."""
        values: dict[str, Any] = {}
        offset = 0
        for name, _, decode in self.fields:
            try:
                values[name], offset = decode(data, offset)
            except (BadColumn, BadRecord, UnicodeDecodeError) as error:
                raise BadRecord(f"field {name} of {self.name}: {error}") from error
        if offset != len(data):
            raise BadRecord(f"{len(data) - offset} bytes too many behind {self.name}")
        return values


def schema(name: str, package: str) -> Mapping[str, Any]:
    """The Avro schema of one kind and version, such as `end-1`, that a package has."""
    text = resources.files(package).joinpath("schemas", f"{name}.avsc").read_text()
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


@cache
def record(name: str, package: str) -> Record:
    return Record(schema(name, package))
