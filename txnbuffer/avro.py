"""Single Avro records as bytes without a schema, which the reader knows"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.read import LOGICAL_READERS
from fastavro.validation import validate
from fastavro.write import LOGICAL_WRITERS

Schema = Any
"""The result of `schema`."""


def schema(definition: Mapping[str, Any]) -> Schema:
    return parse_schema(dict(definition))


def stored_schema(definition: Mapping[str, Any]) -> Schema:
    """As `schema`, for a record of this library: `decode` refuses a boolean whose byte is neither 0 nor 1.

    The decoder takes such a byte for true, so a boolean field is read as its byte.
    """
    fields = [
        {**field, "type": {"type": "fixed", "size": 1, "name": field["name"], "logicalType": _BOOLEAN}}
        if field["type"] == "boolean"
        else field
        for field in definition["fields"]
    ]
    return schema({**definition, "fields": fields})


_BOOLEAN = "txnbuffer-boolean"


def _read_boolean(data: bytes, *_: object) -> bool:
    if data[0] > 1:
        raise ValueError(f"{data[0]} is not a boolean, which is 0 or 1")
    return data == b"\1"


LOGICAL_READERS[f"fixed-{_BOOLEAN}"] = _read_boolean
LOGICAL_WRITERS[f"fixed-{_BOOLEAN}"] = lambda value, *_: b"\1" if value else b"\0"


def encode(parsed: Schema, record: Mapping[str, Any], *, strict: bool = False) -> bytes:
    """Return the payload of a record. `strict`: it has exactly the fields of the schema; those with defaults may lack.

    Raises exceptions of any class if it does not match the schema.
    """
    out = BytesIO()
    schemaless_writer(out, parsed, record, strict_allow_default=strict)
    return out.getvalue()


def check(parsed: Schema, value: Any) -> None:
    """Raises exceptions of any class if a value does not match the schema."""
    validate(value, parsed, raise_errors=True)


def decode(parsed: Schema, payload: bytes) -> dict[str, Any]:
    """Return the record of a payload. Raises ValueError if the payload is not exactly one record."""
    source = BytesIO(payload)
    try:
        record = schemaless_reader(source, parsed, None)
    except Exception as error:  # the decoder raises errors of many classes
        raise ValueError(f"not an Avro record of this schema: {type(error).__name__} {error}".strip()) from None
    if not isinstance(record, dict):
        raise ValueError("the schema is not of a record")  # noqa: TRY004
    if source.tell() != len(payload):
        raise ValueError(f"{len(payload) - source.tell()} bytes follow the Avro record")
    return record
