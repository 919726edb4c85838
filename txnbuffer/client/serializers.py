"""Values of records as objects: serializers make bytes of them for senders, deserializers objects for readers

A serializer has `dumps`, a deserializer has `loads`, and each serializer of this module is also the deserializer of
what it writes. Both are chosen by topic; a topic's partitions have those of the topic.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from broker_io.errors import MissingDependency
from broker_io.partitions import whole_name
from txnbuffer import avro
from txnbuffer.errors import InvalidRequest

T = TypeVar("T")


class Serializer(Protocol):
    """The interface of a serializer."""

    def dumps(self, value: Any) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it can't represent the value."""


class Deserializer(Protocol):
    """The interface of a deserializer."""

    def loads(self, data: bytes) -> Any:
        """Return the value of these bytes. Any exception says that they are not such a value."""


class JsonDeserializer:
    """Decodes values that are JSON in UTF-8."""

    def loads(self, data: bytes) -> Any:
        """Return the value. Raises InvalidRequest if the bytes are not JSON."""
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the value is not valid JSON: {error}") from None


class JsonSerializer(JsonDeserializer):
    """Encodes values as JSON in UTF-8, without spaces."""

    def dumps(self, value: Any) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if JSON cannot represent it."""
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"cannot encode the value as JSON: {error}") from None


class AvroDeserializer:
    """Decodes values that are Avro records without the schema. `schema` is an Avro schema as Python objects."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = avro.schema(schema)

    def loads(self, data: bytes) -> dict[str, Any]:
        """Return the value. Raises InvalidRequest if the bytes are not a record of the schema."""
        try:
            return avro.decode(self._schema, data)
        except ValueError as error:
            raise InvalidRequest(f"the value is {error}") from None


class AvroSerializer(AvroDeserializer):
    """Encodes values as Avro records, without the schema. `schema` is an Avro schema as Python objects."""

    def dumps(self, value: Mapping[str, Any]) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the schema."""
        try:
            return avro.encode(self._schema, value)
        except Exception as error:  # the encoder raises exceptions of any class
            raise InvalidRequest(f"the value does not match its Avro schema: {type(error).__name__} {error}") from None


class PydanticDeserializer(Generic[T]):
    """Decodes values that are JSON into a pydantic model, or into another type that pydantic knows.

    Raises MissingDependency without pydantic.
    """

    def __init__(self, model: type[T]) -> None:
        adapter = optional("pydantic", "pydantic").TypeAdapter
        try:
            self._adapter = adapter(model)
        except Exception as error:  # pydantic raises errors of several classes
            raise InvalidRequest(f"give a pydantic model, got {model!r}: {_line(error)}") from None

    def loads(self, data: bytes) -> T:
        """Return the value. Raises InvalidRequest if the bytes are not JSON that matches the model."""
        try:
            value: T = self._adapter.validate_json(data)
        except Exception as error:  # also those of the model's own validators
            raise InvalidRequest(f"the value does not match its model: {_line(error)}") from None
        return value


class PydanticSerializer(PydanticDeserializer[T]):
    """Encodes instances of a pydantic model, or what the model accepts instead of one, as JSON."""

    def dumps(self, value: T) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the model."""
        try:
            data: bytes = self._adapter.dump_json(self._adapter.validate_python(value))
        except Exception as error:
            raise InvalidRequest(f"the value does not match its model: {_line(error)}") from None
        return data


M = TypeVar("M", bound=Message)


class ProtobufDeserializer(Generic[M]):
    """Decodes values that are messages of a class which protoc has generated."""

    def __init__(self, message: type[M]) -> None:
        if not (isinstance(message, type) and issubclass(message, Message)):
            raise InvalidRequest(f"give a message class that protoc has generated, got {message!r}")
        self._message = message

    def loads(self, data: bytes) -> M:
        """Return the value. Raises InvalidRequest if the bytes are not such a message."""
        try:
            message: M = self._message.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"the value is not a {self._message.DESCRIPTOR.full_name}: {error}") from None
        return message


class ProtobufSerializer(ProtobufDeserializer[M]):
    """Encodes messages of a class which protoc has generated."""

    def dumps(self, value: M) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it is of another class, or lacks required fields."""
        if not isinstance(value, self._message):
            name = self._message.DESCRIPTOR.full_name
            raise InvalidRequest(f"a value must be a {name}, got {type(value).__name__}")
        try:
            data: bytes = value.SerializeToString()
        except Exception as error:  # implementations raise errors of several classes
            raise InvalidRequest(f"cannot encode the value: {_line(error)}") from None
        return data


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


SerializerChoice: TypeAlias = "Serializer | Mapping[str, Serializer] | None"
"""A serializer for all topics, or one for each topic."""
DeserializerChoice: TypeAlias = "Deserializer | Mapping[str, Deserializer] | None"
"""A deserializer for all topics, or one for each topic."""


class Serializers:
    """The serializers of a client: one for each topic with a schema, and one for all other topics."""

    def __init__(self, serializer: SerializerChoice = None, schemas: Mapping[str, Schema] | None = None) -> None:
        """Raises InvalidRequest for an invalid serializer or schema."""
        self._all, self._of_topic = _chosen("serializer", "dumps", serializer)
        if not isinstance(schemas, (Mapping, NoneType)):
            raise InvalidRequest(f"schemas must be a mapping from topic to schema, got {type(schemas).__name__}")
        for topic, schema in (schemas or {}).items():
            if isinstance(schema, type) or not (hasattr(schema, "encode") and hasattr(schema, "decode")):
                text = (
                    f"the schema of topic {topic!r} must be one of the Pulsar client library, such as AvroSchema(Order)"
                )
                raise InvalidRequest(f"{text}, got {schema!r}")
        self._schemas = {topic: SchemaSerializer(schema) for topic, schema in (schemas or {}).items()}
        self._of_topic |= self._schemas

    def of(self, topic: str, given: Serializer | None) -> Serializer | None:
        """Return the serializer for a value of a topic: `given`, the argument of the send, takes precedence."""
        of_topic = self._of_topic.get(whole_name(topic)) if self._of_topic and isinstance(topic, str) else None
        return given or of_topic or self._all

    def check_sets(self, topic: str) -> None:
        """Raises InvalidRequest if the topic has a schema, because record sets do not match a schema."""
        if whole_name(topic) in self._schemas:
            raise InvalidRequest(
                f"topic {topic!r} has a schema, which record sets do not match: use batching='messages'"
            )


class Deserializers:
    """The deserializers of a client or a reader: one for all topics, or one for each topic."""

    def __init__(self, choice: DeserializerChoice = None) -> None:
        """Raises InvalidRequest for an invalid deserializer."""
        chosen: tuple[Deserializer | None, dict[str, Deserializer]] = _chosen("deserializer", "loads", choice)
        self._all, self._of_topic = chosen

    def of(self, topic: str) -> Deserializer | None:
        """Return the deserializer for the values of a topic; None: they stay bytes."""
        return self._of_topic.get(whole_name(topic), self._all) if self._of_topic else self._all


def _chosen(what: str, method: str, choice: Any) -> tuple[Any, dict[str, Any]]:
    """The one for all topics, and those for some. Raises InvalidRequest."""
    by_topic = dict(choice) if isinstance(choice, Mapping) else {}
    one = None if isinstance(choice, Mapping) else choice
    for found in filter(lambda found: found is not None, (one, *by_topic.values())):
        if isinstance(found, type) or not callable(getattr(found, method, None)):
            raise InvalidRequest(f"a {what} needs a method {method}, got {found!r}")
    if not all(isinstance(topic, str) for topic in by_topic):
        raise InvalidRequest(f"a mapping of {what}s has names of topics as keys, got {[*by_topic]!r:.80}")
    return one, by_topic


def optional(module: str, extra: str) -> Any:
    """Import a library that only an extra installs. Raises MissingDependency, which names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"this needs {module} ({error}): pip install 'txnbuffer[{extra}]'") from None


def _line(error: Exception) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__} {error}".split())
