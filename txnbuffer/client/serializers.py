"""Serializers: they convert values to the bytes of records, and back"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, Protocol

from broker_io.partitions import whole_name
from txnbuffer import avro
from txnbuffer.errors import InvalidRequest


class Serializer(Protocol):
    """The interface of a serializer; `loads(dumps(value))` must equal `value`."""

    def dumps(self, value: Any) -> bytes: ...

    def loads(self, data: bytes) -> Any: ...


class JsonSerializer:
    """Encodes values as JSON in UTF-8, without spaces."""

    def dumps(self, value: Any) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if JSON cannot represent it."""
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"cannot encode the value as JSON: {error}") from None

    def loads(self, data: bytes) -> Any:
        """Return the value. Raises InvalidRequest if the bytes are not JSON."""
        try:
            return json.loads(data)
        except ValueError as error:
            raise InvalidRequest(f"the value is not valid JSON: {error}") from None


class AvroSerializer:
    """Encodes values as Avro records, without the schema. `schema` is an Avro schema as Python objects."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = avro.schema(schema)

    def dumps(self, value: Mapping[str, Any]) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the schema."""
        try:
            return avro.encode(self._schema, value)
        except Exception as error:  # the encoder raises exceptions of any class
            raise InvalidRequest(f"the value does not match its Avro schema: {type(error).__name__} {error}") from None

    def loads(self, data: bytes) -> dict[str, Any]:
        """Return the value. Raises InvalidRequest if the bytes are not a record of the schema."""
        try:
            return avro.decode(self._schema, data)
        except ValueError as error:
            raise InvalidRequest(f"the value is {error}") from None


class Schema(Protocol):
    """The interface of the schemas of the Pulsar client library, such as AvroSchema and JsonSchema."""

    def encode(self, obj: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class SchemaSerializer:
    """A serializer that uses a schema of the Pulsar client library."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def dumps(self, value: Any) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the schema."""
        try:
            return self._schema.encode(value)
        except Exception as error:  # schemas raise exceptions of any class
            raise InvalidRequest(f"the value does not match its schema: {type(error).__name__} {error}") from None

    def loads(self, data: bytes) -> Any:
        """Return the value. Raises InvalidRequest if the bytes do not match the schema."""
        try:
            return self._schema.decode(data)
        except Exception as error:
            raise InvalidRequest(f"the value does not match its schema: {type(error).__name__} {error}") from None


class Serializers:
    """The serializers of a client: one for each topic with a schema, and one for all other topics."""

    def __init__(self, serializer: Serializer | None = None, schemas: Mapping[str, Schema] | None = None) -> None:
        """Raises InvalidRequest for an invalid serializer or schema."""
        if serializer is not None and not (hasattr(serializer, "dumps") and hasattr(serializer, "loads")):
            raise InvalidRequest(f"a serializer needs methods dumps and loads, got {serializer!r}")
        if not isinstance(schemas, (Mapping, NoneType)):
            raise InvalidRequest(f"schemas must be a mapping from topic to schema, got {type(schemas).__name__}")
        for topic, schema in (schemas or {}).items():
            if isinstance(schema, type) or not (hasattr(schema, "encode") and hasattr(schema, "decode")):
                text = (
                    f"the schema of topic {topic!r} must be one of the Pulsar client library, such as AvroSchema(Order)"
                )
                raise InvalidRequest(f"{text}, got {schema!r}")
        self._serializer = serializer
        self._schemas = {topic: SchemaSerializer(schema) for topic, schema in (schemas or {}).items()}

    def of(self, topic: str, given: Serializer | None) -> Serializer | None:
        """Return the serializer for a value of a topic: `given`, the argument of the send, takes precedence."""
        of_topic = self._schemas.get(whole_name(topic)) if self._schemas and isinstance(topic, str) else None
        return given or of_topic or self._serializer

    def check_sets(self, topic: str) -> None:
        """Raises InvalidRequest if the topic has a schema, because record sets do not match a schema."""
        if whole_name(topic) in self._schemas:
            raise InvalidRequest(
                f"topic {topic!r} has a schema, which record sets do not match: use batching='messages'"
            )
