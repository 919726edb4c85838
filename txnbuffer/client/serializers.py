"""Values of records as objects: serializers make bytes of them for senders, deserializers objects for readers

A serializer has `dumps`, a deserializer has `loads`, and each serializer of this module is also the deserializer of
what it writes. Both are chosen by topic; a topic's partitions have those of the topic.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from broker_io.errors import MissingDependency
from broker_io.partitions import whole_name
from broker_io.port import Broker, SchemaBroker, TopicSchema
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
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the value is not valid JSON: {error}") from None


class JsonSerializer(JsonDeserializer):
    """Encodes values as JSON in UTF-8, without spaces.

    `None` as the value of a record is refused before it is encoded, since a record without a value deletes its key.
    """

    def dumps(self, value: Any) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if JSON cannot represent it."""
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"cannot encode the value as JSON: {error}") from None


class AvroDeserializer:
    """Decodes values that are Avro records without the schema. `schema` is an Avro schema as Python objects."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        try:
            self._schema = avro.schema(schema)
        except Exception as error:  # the parser raises errors of many classes
            raise InvalidRequest(f"schema must be an Avro schema as Python objects: {_line(error)}") from None

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


# Pulsar's schema registry


class RegistryDeserializer:
    """Decodes values with the Avro or JSON schemas of their topic in Pulsar's schema registry, into dictionaries.

    Each value is decoded with the version of the schema that it was written with, or with the newest if it has none.
    """


class RegistrySerializer(RegistryDeserializer):
    """Encodes dictionaries with the newest Avro or JSON schema of their topic in Pulsar's schema registry.

    A value that does not match the schema is an InvalidRequest. Messages have the version of the schema, as those of
    any producer of Pulsar. A topic must have a schema before the first send; a client uses the one that it finds then.
    """


class RegisteredAvro(AvroSerializer):
    """Values of a registered Avro schema. They have exactly its fields; those with a default may be missing."""

    def dumps(self, value: Mapping[str, Any]) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the schema."""
        try:
            return avro.encode(self._schema, value, strict=True)
        except Exception as error:  # the encoder raises exceptions of any class
            raise InvalidRequest(f"the value does not match the schema of its topic: {_line(error)}") from None


class RegisteredJson(JsonSerializer):
    """Values of a registered JSON schema, which Pulsar writes as an Avro schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = avro.schema(schema)

    def dumps(self, value: Mapping[str, Any]) -> bytes:
        """Return the value as bytes. Raises InvalidRequest if it does not match the schema."""
        try:
            avro.check(self._schema, value)
        except Exception as error:  # as above
            raise InvalidRequest(f"the value does not match the schema of its topic: {_line(error)}") from None
        return super().dumps(value)


RegisteredValues: TypeAlias = "RegisteredAvro | RegisteredJson"
KINDS: Mapping[str, type[RegisteredAvro | RegisteredJson]] = {"avro": RegisteredAvro, "json": RegisteredJson}


class SchemaRegistry:
    """The registered schemas of topics; each version is requested once. Its methods wait for the cluster."""

    def __init__(self, broker: SchemaBroker) -> None:
        self._broker = broker
        self._known: dict[tuple[str, int | None], RegisteredValues] = {}

    def knows(self, topic: str) -> bool:
        """Whether `of` returns the newest schema of a topic without a request."""
        return (whole_name(topic), None) in self._known

    def of(self, topic: str, version: int | None = None, *, writes: bool = False) -> RegisteredValues:
        """Return the values of a version, by default the newest. `writes`: writers of the topic declare it.

        Raises InvalidRequest if the topic has no Avro or JSON schema, and as requests to a cluster.
        """
        topic = whole_name(topic)
        found = self._known.get((topic, version))
        if found is None:
            schema = self._broker.schema(topic, version)
            found = self._known[topic, version] = _registered(topic, schema)
            if writes and schema is not None:
                self._broker.write_with(topic, schema)
        return found


def _registered(topic: str, schema: TopicSchema | None) -> RegisteredValues:
    if schema is None:
        raise InvalidRequest(f"topic {topic!r} has no schema in the registry of the cluster: register one first")
    if (kind := KINDS.get(schema.kind)) is None:
        raise InvalidRequest(
            f"the schema of topic {topic!r} is of type {schema.kind}: only Avro and JSON can be used, give another "
            "serializer or deserializer for this topic"
        )
    try:
        return kind(json.loads(schema.definition))
    except Exception as error:  # parsers raise errors of many classes
        raise InvalidRequest(f"the schema of topic {topic!r} can't be read: {_line(error)}") from None


class TopicValues:
    """The deserializer of one topic with registered schemas."""

    def __init__(self, registry: SchemaRegistry, topic: str) -> None:
        self._registry = registry
        self._topic = topic

    def prepare(self, versions: Iterable[int | None]) -> None:
        """Request the schemas of messages; after that `loads` does not wait. Raises as `SchemaRegistry.of`."""
        for version in versions:
            self._registry.of(self._topic, version)

    def loads(self, data: bytes, version: int | None = None) -> Any:
        """Return the value. Raises InvalidRequest."""
        return self._registry.of(self._topic, version).loads(data)


SerializerChoice: TypeAlias = "Serializer | RegistrySerializer | Mapping[str, Serializer | RegistrySerializer] | None"
"""A serializer for all topics, or one for each topic."""
DeserializerChoice: TypeAlias = (
    "Deserializer | RegistryDeserializer | Mapping[str, Deserializer | RegistryDeserializer] | None"
)
"""A deserializer for all topics, or one for each topic."""


class Serializers:
    """The serializers of a client: one for each topic with a schema, and one for all other topics.

    Without any (`has_any`), a value without a serializer of its own has none.
    """

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
        self._registry: SchemaRegistry | None = None
        self.has_any = self._all is not None or bool(self._of_topic)

    def use(self, broker: Broker) -> None:
        """Take registered schemas from a broker, if it has a registry."""
        self._registry = SchemaRegistry(broker) if isinstance(broker, SchemaBroker) else None

    def must_load(self, topic: str, given: Serializer | None) -> bool:
        """Return whether `of` waits for the cluster."""
        if self._registry is None or not isinstance(self._chosen(topic, given), RegistrySerializer):
            return False
        return not self._registry.knows(topic)

    def of(self, topic: str, given: Serializer | None) -> Serializer | None:
        """Return the serializer for a value of a topic: `given`, the argument of the send, takes precedence.

        Raises InvalidRequest if that has no method dumps, and as `SchemaRegistry.of`.
        """
        found = self._chosen(topic, given)
        if not isinstance(found, RegistrySerializer):
            return found
        if self._registry is None:
            raise InvalidRequest("RegistrySerializer needs a Pulsar cluster: give another serializer for other logs")
        return self._registry.of(topic, writes=True)

    def _chosen(self, topic: str, given: Serializer | None) -> Serializer | RegistrySerializer | None:
        if given is not None:
            _check_method("serializer", "dumps", given)
        of_topic = self._of_topic.get(whole_name(topic)) if self._of_topic and isinstance(topic, str) else None
        return given or of_topic or self._all

    def check_sets(self, topic: str) -> None:
        """Raises InvalidRequest if the topic has a schema, because record sets do not match a schema."""
        registered = self._registry is not None and self._registry.knows(topic)
        if whole_name(topic) in self._schemas or registered:
            raise InvalidRequest(
                f"topic {topic!r} has a schema, which record sets do not match: use batching='messages'"
            )


class Deserializers:
    """The deserializers of a client or a reader: one for all topics, or one for each topic."""

    def __init__(self, choice: DeserializerChoice = None) -> None:
        """Raises InvalidRequest for an invalid deserializer."""
        chosen: tuple[Deserializer | RegistryDeserializer | None, dict[str, Deserializer | RegistryDeserializer]]
        chosen = _chosen("deserializer", "loads", choice)
        self._all, self._of_topic = chosen

    def of(self, topic: str, broker: object = None) -> Deserializer | None:
        """Return the deserializer for the values of a topic of a broker; None: they stay bytes.

        Raises InvalidRequest for registered schemas if the broker has no registry.
        """
        found = self._of_topic.get(whole_name(topic), self._all) if self._of_topic else self._all
        if not isinstance(found, RegistryDeserializer):
            return found
        if not isinstance(broker, SchemaBroker):
            raise InvalidRequest("RegistryDeserializer needs a Pulsar cluster: give another deserializer")
        return TopicValues(SchemaRegistry(broker), topic)


def _chosen(what: str, method: str, choice: Any) -> tuple[Any, dict[str, Any]]:
    """The one for all topics, and those for some. Raises InvalidRequest."""
    by_topic = dict(choice) if isinstance(choice, Mapping) else {}
    one = None if isinstance(choice, Mapping) else choice
    for found in filter(lambda found: found is not None, (one, *by_topic.values())):
        _check_method(what, method, found)
    if not all(isinstance(topic, str) for topic in by_topic):
        raise InvalidRequest(f"a mapping of {what}s has names of topics as keys, got {[*by_topic]!r:.80}")
    return one, by_topic


def _check_method(what: str, method: str, found: Any) -> None:
    """Raises InvalidRequest for what is no serializer or deserializer."""
    registered = isinstance(found, RegistrySerializer if method == "dumps" else RegistryDeserializer)
    if isinstance(found, type) or not (registered or callable(getattr(found, method, None))):
        raise InvalidRequest(f"a {what} needs a method {method}, got {found!r:.80}")


def optional(module: str, extra: str) -> Any:
    """Import a library that only an extra installs. Raises MissingDependency, which names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"this needs {module} ({error}): pip install 'txnbuffer[{extra}]'") from None


def _line(error: Exception) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__} {error}".split())
