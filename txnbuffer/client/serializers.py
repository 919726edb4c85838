"""Values as applications have them, to and from the bytes of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from txnbuffer import avro
from txnbuffer.errors import InvalidRequest


class Serializer(Protocol):
    def dumps(self, value: Any) -> bytes: ...

    def loads(self, data: bytes) -> Any: ...


class JsonSerializer:
    """JSON in UTF-8, without spaces."""

    def dumps(self, value: Any) -> bytes:
        """Raises InvalidRequest for what JSON can't say."""
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the value can't be written as JSON: {error}") from None

    def loads(self, data: bytes) -> Any:
        """Raises InvalidRequest for what is no JSON."""
        try:
            return json.loads(data)
        except ValueError as error:
            raise InvalidRequest(f"the value is no JSON: {error}") from None


class AvroSerializer:
    """Avro records of one schema, without the schema in front."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = avro.schema(schema)

    def dumps(self, value: Mapping[str, Any]) -> bytes:
        """Raises InvalidRequest for a value that does not fit the schema."""
        try:
            return avro.encode(self._schema, value)
        except Exception as error:  # the encoder raises whatever it stumbles over
            raise InvalidRequest(f"the value does not fit its Avro schema: {type(error).__name__} {error}") from None

    def loads(self, data: bytes) -> dict[str, Any]:
        """Raises InvalidRequest for bytes that are no record of the schema."""
        try:
            return avro.decode(self._schema, data)
        except ValueError as error:
            raise InvalidRequest(f"the value is {error}") from None
