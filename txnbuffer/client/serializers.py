"""Values as applications have them, to and from the bytes of a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, Protocol

from broker_io.partitions import whole_name
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


class Schema(Protocol):
    """What the Pulsar client library calls a schema, such as its AvroSchema and JsonSchema."""

    def encode(self, obj: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class SchemaSerializer:
    """Values of one of the Pulsar client library's schemas."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def dumps(self, value: Any) -> bytes:
        """Raises InvalidRequest for a value that is not of the schema."""
        try:
            return self._schema.encode(value)
        except Exception as error:  # it raises whatever it stumbles over
            raise InvalidRequest(f"the value is not of its schema: {type(error).__name__} {error}") from None

    def loads(self, data: bytes) -> Any:
        """Raises InvalidRequest for bytes that are not of the schema."""
        try:
            return self._schema.decode(data)
        except Exception as error:
            raise InvalidRequest(f"the value is not of its schema: {type(error).__name__} {error}") from None


class Serializers:
    """Of which topic values are serialized by what: one for all, and those of topics that have a schema."""

    def __init__(self, serializer: Serializer | None = None, schemas: Mapping[str, Schema] | None = None) -> None:
        """Raises InvalidRequest for what is no serializer, or are no schemas."""
        if serializer is not None and not (hasattr(serializer, "dumps") and hasattr(serializer, "loads")):
            raise InvalidRequest(f"a serializer has dumps and loads, which {serializer!r} has not")
        if not isinstance(schemas, (Mapping, NoneType)):
            raise InvalidRequest(f"schemas is a mapping of topics and their schemas, not {type(schemas).__name__}")
        for topic, schema in (schemas or {}).items():
            if isinstance(schema, type) or not (hasattr(schema, "encode") and hasattr(schema, "decode")):
                text = f"topic {topic!r} is given the schema {schema!r}, which is none: give one of the Pulsar client"
                raise InvalidRequest(f"{text} library's, such as AvroSchema(Order)")
        self._serializer = serializer
        self._schemas = {topic: SchemaSerializer(schema) for topic, schema in (schemas or {}).items()}

    def of(self, topic: str, given: Serializer | None) -> Serializer | None:
        """What a value for a topic goes through; `given` is what a send was told."""
        of_topic = self._schemas.get(whole_name(topic)) if self._schemas and isinstance(topic, str) else None
        return given or of_topic or self._serializer

    def check_sets(self, topic: str) -> None:
        """Raises InvalidRequest for a topic with a schema: a set of records would be no value of it."""
        if whole_name(topic) in self._schemas:
            text = f"topic {topic!r} has a schema, which a message of many records is not of: send it with batching"
            raise InvalidRequest(f"{text}='messages'")
