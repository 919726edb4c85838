"""Values of topics that have a schema of the Pulsar client library."""

from __future__ import annotations

import pytest
from pulsar.schema import AvroSchema, Integer, JsonSchema
from pulsar.schema import Record as SchemaRecord

from txnbuffer import JsonSerializer, connect
from txnbuffer.client.serializers import Serializers
from txnbuffer.errors import InvalidRequest


class Order(SchemaRecord):  # type: ignore[misc]  # the client library has no types
    apples = Integer(required=True)


@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_values_of_a_topic_and_its_partitions_are_encoded_with_its_schema(kind):
    serializers = Serializers(JsonSerializer(), {"orders": kind(Order)})
    for topic in ("orders", "orders-partition-3"):
        serializer = serializers.of(topic, None)
        assert serializer.loads(serializer.dumps(Order(apples=3))).apples == 3
    assert serializers.of("other", None).dumps([1]) == b"[1]"


def test_serializer_of_a_send_takes_precedence_over_the_schema():
    given = JsonSerializer()
    assert Serializers(None, {"orders": AvroSchema(Order)}).of("orders", given) is given


def test_invalid_topic_is_left_to_the_topic_check():
    assert Serializers(None, {"orders": AvroSchema(Order)}).of(5, None) is None  # type: ignore[arg-type]  # on purpose


def test_no_serializer_by_default():
    assert Serializers().of("orders", None) is None


@pytest.mark.parametrize("value", [{"apples": 3}, "three", 3])
def test_value_that_does_not_match_the_schema_is_rejected(value):
    serializer = Serializers(None, {"orders": AvroSchema(Order)}).of("orders", None)
    assert serializer is not None
    with pytest.raises(InvalidRequest, match="does not match its schema"):
        serializer.dumps(value)


def test_bytes_that_do_not_match_the_schema_are_rejected():
    serializer = Serializers(None, {"orders": AvroSchema(Order)}).of("orders", None)
    assert serializer is not None
    with pytest.raises(InvalidRequest, match="does not match its schema"):
        serializer.loads(b"")


def test_record_sets_are_rejected_for_topics_with_a_schema():
    serializers = Serializers(None, {"orders": AvroSchema(Order)})
    serializers.check_sets("other")
    for topic in ("orders", "orders-partition-3"):
        with pytest.raises(InvalidRequest, match="has a schema"):
            serializers.check_sets(topic)


def test_schemas_require_a_cluster():
    with (
        pytest.raises(InvalidRequest, match="not a cluster"),
        connect("memory:", schemas={"orders": AvroSchema(Order)}),
    ):
        pass
